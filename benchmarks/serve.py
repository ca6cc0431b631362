"""Serving, measured through HTTP: many answers at once against one after another, and against `transformers serve`.

    OMP_NUM_THREADS=2 python benchmarks/serve.py [--peer PYTHON] [--gguf FILE] [--rounds 3] [--tokens 64]

Every server answers the same greedy requests of the 135M model that a wheel brings. Servers are asked in turns, round
by round, so that what else the machine does hits all alike; only ratios within a round are compared. `--peer` is a
Python with transformers[serving] and, for `--gguf` (the same model, by `duoka export --gguf bf16`), with
llama-cpp-python[server]. Writes serve.json and the tables of serve.md.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from watching import Tree, describe_machine, end_like_an_interrupt, fill_page, package_versions, stamp

HERE = Path(__file__).parent
KEY = "benchmark"
READY_S = 240.0
PEER_BYTES = 4 << 30
SUBJECTS = (
    "a ring of copper", "eight small ships", "the color of snow", "a rank that waits", "an old clock", "bread and salt",
    "a long road", "the number seven", "tall grass", "a paper boat", "the sound of rain", "two wooden chairs",
    "a bird in winter", "the edge of a map", "cold tea", "a borrowed book",
)  # fmt: skip


@dataclass
class Subject:
    """A server: how it is started, what it calls the model, and how many clients ask it at once."""

    name: str
    command: list[str]
    model: str
    clients: tuple[int, ...]
    health: str = "/health"
    port: int = 0
    pid: int = 0


def ask(subject: Subject, prompt: str, tokens: int) -> tuple[int, float, float]:
    """(tokens of the answer, seconds to its first, seconds to its end), streamed as a chat page does."""
    body = {
        "model": subject.model, "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens,
        "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    began, first, count = time.perf_counter(), 0.0, 0
    connection = http.client.HTTPConnection("127.0.0.1", subject.port, timeout=600)
    head = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), head)
    answer = connection.getresponse()
    if answer.status != 200:
        raise SystemExit(f"{subject.name} answers {answer.status}: {answer.read()[:500]!r}")
    while line := answer.readline():
        if not line.startswith(b"data: {"):
            continue
        frame = json.loads(line[6:])
        if "error" in frame:
            raise SystemExit(f"{subject.name} fails: {frame['error']}")
        if any(choice["delta"].get("content") for choice in frame["choices"]):
            first = first or time.perf_counter() - began
            count += 1  # where no usage comes: a frame a token
        if frame.get("usage"):
            count = int(frame["usage"]["completion_tokens"])
    connection.close()
    return count, first, time.perf_counter() - began


def ask_many(subject: Subject, clients: int, number: int, tokens: int, turn: int) -> dict[str, float]:
    """`number` requests by so many clients, each sending its next when its last is answered."""
    prompts = [f"Write about {SUBJECTS[at % len(SUBJECTS)]}, part {turn}-{at}." for at in range(number)]
    found: list[tuple[int, float, float]] = []
    lock, tree = threading.Lock(), Tree(subject.pid)

    def work() -> None:
        while True:
            with lock:
                if not prompts:
                    return
                prompt = prompts.pop()
            one = ask(subject, prompt, tokens)
            with lock:
                found.append(one)

    threads = [threading.Thread(target=work) for _ in range(clients)]
    cpu, began = tree.look(), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall_s, cpu_s = time.perf_counter() - began, tree.look() - cpu
    if len(found) < number:
        raise SystemExit(f"{subject.name} left {number - len(found)} of {number} requests without an answer")
    total = sum(count for count, _, _ in found)
    return {
        "tokens": total, "wall_s": round(wall_s, 2), "cpu_s": round(cpu_s, 2),
        "tokens_per_s": round(total / wall_s, 2), "tokens_per_cpu_s": round(total / cpu_s, 2),
        "first_token_s": round(statistics.median(first for _, first, _ in found), 4),
    }  # fmt: skip


@contextlib.contextmanager
def running(subject: Subject, port: int, folder: Path) -> Iterator[Subject]:
    """Started, and answering."""
    log = folder / f"{port}.log"
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "DUOKA_API_KEY": KEY}
    with log.open("w") as out:
        process = subprocess.Popen(
            [*subject.command, "--port", str(port)], stdout=out, stderr=out, env=env, start_new_session=True
        )
    tree = Tree(process.pid)
    try:
        subject.port, subject.pid = port, process.pid
        end = time.monotonic() + READY_S
        while not _answers(port, subject.health):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{subject.name} does not come up:\n{log.read_text()[-2000:]}")
            time.sleep(0.5)
        ask(subject, "Hello", 4)
        yield subject
    finally:
        tree.look()
        tree.end()


def _answers(port: int, path: str) -> bool:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", path, headers={"Authorization": f"Bearer {KEY}"})
        return connection.getresponse().status == 200
    except OSError:
        return False


def subjects(model: Path, peer: str, gguf: str, precision: str) -> list[Subject]:
    duoka = [sys.executable, "-m", "duoka", "serve", str(model), "--precision", precision, "--cache-gib", "1"]
    name, dtype = model.resolve().name, {"bf16": "bfloat16", "fp32": "float32"}[precision]
    # The same server with one slot is what answers one after another: a pass of eight rows costs more than one of one.
    made = [
        Subject("duoka serve, one slot", [*duoka, "--slots", "1"], name, (1,)),
        Subject("duoka serve, 8 slots", [*duoka, "--slots", "8"], name, (1, 8)),
        Subject("duoka serve, 32 slots", [*duoka, "--slots", "32"], name, (32,)),
    ]
    if peer:
        # It has taken 14 GiB here: what it may allocate is bounded, so that it ends and not what else runs.
        bound = ["prlimit", f"--data={PEER_BYTES}"]
        cli = [peer, "-m", "transformers.cli.transformers"]
        theirs = [*bound, *cli, "serve", str(model), "--dtype", dtype, "--device", "cpu"]
        made.append(Subject("transformers serve", theirs, str(model), (1, 8)))
        # Its cache takes a share of the machine's memory unless it is told blocks: here 16,384 tokens.
        blocks = ["--cb-block-size", "256", "--cb-num-blocks", "64", "--cb-max-batch-tokens", "512"]
        many = [*theirs, "--continuous-batching", "--attn-implementation", "sdpa", *blocks]
        made.append(Subject("transformers serve --continuous-batching", many, str(model), (1, 8, 32)))
    if peer and gguf:
        threads = os.environ["OMP_NUM_THREADS"]
        c = [peer, "-m", "llama_cpp.server", "--model", gguf, "--model_alias", name, "--n_threads", threads]
        c += ["--n_threads_batch", threads, "--interrupt_requests", "false", "--verbose", "false", "--api_key", KEY]
        made.append(Subject("llama-cpp-python", c, name, (1, 8), health="/v1/models"))
    return made


def memory_of(subject: Subject) -> int:
    status = Path(f"/proc/{subject.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS"))


def measure(asked: argparse.Namespace, folder: Path, model: Path) -> dict[str, Any]:
    rows: dict[str, list[dict[str, float]]] = {}
    memory: dict[str, int] = {}
    left_out: dict[str, str] = {}
    chosen = subjects(model, asked.peer, asked.gguf, asked.precision)
    chosen = [one for one in chosen if any(word in one.name for word in asked.only.split(","))]
    with contextlib.ExitStack() as stack:
        started = list[Subject]()
        for place, one in enumerate(chosen):
            try:
                started.append(stack.enter_context(running(one, asked.port + place, folder)))
            except SystemExit as error:
                if one.name.startswith("duoka"):
                    raise
                left_out[one.name] = str(error).splitlines()[0]
                print(f"left out: {left_out[one.name]}", flush=True)
        for turn in range(asked.rounds):
            for subject in started:
                for clients in subject.clients:
                    number = max(asked.least, clients)
                    row = ask_many(subject, clients, number, asked.tokens, turn)
                    name = f"{subject.name}, {clients} at once"
                    rows.setdefault(name, []).append({**row, "load": os.getloadavg()[0]})
                    print(f"{turn} {name}: {row}", flush=True)
        for subject in started:
            memory[subject.name] = memory_of(subject)
    return {"rounds": rows, "memory_bytes": memory, "left_out": left_out}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", default="", help="a Python with transformers[serving]")
    parser.add_argument("--gguf", default="", help="the model as a GGUF file, for llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--least", type=int, default=8, help="requests of a measurement, at least")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--only", default="", help="servers whose names have one of these words, with commas")
    parser.add_argument("--port", type=int, default=18400)
    parser.add_argument("--out", type=Path, default=HERE / "serve.json")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    end_like_an_interrupt()
    from duoka.config.schema import ModelConfig
    from duoka.hub.models import model_folder

    with tempfile.TemporaryDirectory() as name:
        found = measure(asked, Path(name), model_folder(ModelConfig(name="demo"), Path()))
    how = {"tokens": asked.tokens, "precision": asked.precision, "model": "SmolLM2-135M-Instruct"}
    versions = package_versions(asked.peer or sys.executable, ("torch", "transformers"))
    asked.out.write_text(
        json.dumps({**stamp(), "machine": describe_machine(), "versions": versions, "asked": how, **found}, indent=1)
    )
    fill_page(asked.out.with_suffix(".md"), table(found), "table")


def table(found: dict[str, Any]) -> str:
    """Medians over the rounds, and what each is of the first, round by round."""
    rounds = found["rounds"]
    base = next(iter(rounds.values()))
    lines = [
        "| | tokens a second | of the first | tokens a CPU second | of the first | first token, median |",
        "|---|---|---|---|---|---|",
    ]
    for name, rows in rounds.items():
        cells = [name]
        for key in ("tokens_per_s", "tokens_per_cpu_s"):
            ratios = [row[key] / one[key] for row, one in zip(rows, base, strict=True)]
            cells += [f"{statistics.median(row[key] for row in rows):.1f}", f"{statistics.median(ratios):.2f}"]
        cells.append(f"{1000 * statistics.median(row['first_token_s'] for row in rows):.0f} ms")
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| | resident after it |", "|---|---|"]
    lines += [f"| {name} | {size / 2**20:.0f} MiB |" for name, size in found["memory_bytes"].items()]
    lines += ["", *(f"Left out: {said}" for said in found["left_out"].values())]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
