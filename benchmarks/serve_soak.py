"""Serving 10,000 requests: whether the server's memory, threads, open files and rows grow.

    python benchmarks/serve_soak.py [--requests 10000]

A tiny model, so that what is measured is the server: eight clients at once, streamed and whole answers, several answers
to a request, shared beginnings, and one reader in twenty that goes away in the middle. Writes serve_soak.json and its
table in serve.md.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from watching import describe_machine, end_like_an_interrupt, fill_page, stamp

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))
KEY, CLIENTS, LOOKS = "benchmark", 8, 10
WORDS = ("copper", "ships", "snow", "ranks", "clocks", "bread", "roads", "seven")


def send(port: int, number: int) -> None:
    """One request of the mixture; which one hangs on its number alone."""
    kind, is_left = number % 4, number % 20 == 7
    body: dict[str, Any] = {"model": "model", "max_tokens": 4 + number % 13, "temperature": 0.7, "seed": number}
    path = "/v1/chat/completions"
    text = f"Tell of {WORDS[number % len(WORDS)]}. " * (1 + number % 9)
    if kind < 2:
        body |= {"messages": [{"role": "user", "content": text}], "stream": kind == 0}
    elif kind == 2:
        path, body = "/v1/completions", {**body, "prompt": [text, text + "And"], "n": 2}
    else:
        body |= {"messages": [{"role": "user", "content": text}], "logprobs": True, "top_logprobs": 2}
    if is_left:
        body |= {"stream": True, "max_tokens": 200}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    head = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    connection.request("POST", path, json.dumps(body), head)
    answer = connection.getresponse()
    if answer.status != 200:
        raise SystemExit(f"request {number} is answered {answer.status}: {answer.read()[:300]!r}")
    if is_left:
        answer.read(64)
        answer.close()
    else:
        answer.read()
    connection.close()


def send_many(port: int, numbers: range) -> None:
    left, lock, broken = iter(numbers), threading.Lock(), list[BaseException]()

    def work() -> None:
        while not broken:
            with lock:
                chosen = next(left, None)
            if chosen is None:
                return
            try:
                send(port, chosen)
            except (OSError, http.client.HTTPException, SystemExit) as error:
                broken.append(error)

    threads = [threading.Thread(target=work) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if broken:
        raise broken[0]


def numbers_of(port: int) -> dict[str, float]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {KEY}"})
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return {name: float(value) for line in lines if line[0] != "#" for name, value in [line.split()]}


def look(port: int, process: psutil.Process, answered: int, began: float) -> dict[str, float]:
    """After what was on its way has ended."""
    end = time.monotonic() + 30
    while numbers_of(port)["duoka_active_requests"] and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.5)
    found = numbers_of(port)
    return {
        "requests": answered, "memory_mib": round(process.memory_info().rss / 2**20, 1),
        "threads": process.num_threads(), "open_files": process.num_fds(), "active": found["duoka_active_requests"],
        "waiting": found["duoka_waiting_requests"], "answer_tokens": found["duoka_answer_tokens_total"],
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


def soak(port: int, model: Path, requests: int) -> list[dict[str, float]]:
    command = [sys.executable, "-m", "duoka", "serve", str(model), "--port", str(port), "--cache-gib", "0.05"]
    command += ["--precision", "fp32", "--max-waiting", "64"]
    env = {**os.environ, "DUOKA_API_KEY": KEY}
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            end = time.monotonic() + 120
            while True:
                try:
                    numbers_of(port)
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > end:
                        raise SystemExit("the server does not come up") from None
                    time.sleep(0.2)
            watched, rows, began = psutil.Process(process.pid), [], time.monotonic()
            bounds = [requests * place // LOOKS for place in range(LOOKS + 1)]
            for first, last in itertools.pairwise(bounds):
                send_many(port, range(first, last))
                rows.append(look(port, watched, last, began))
                print(rows[-1], flush=True)
            return rows
        finally:
            process.terminate()


def table(rows: list[dict[str, float]]) -> str:
    names = {"requests": "requests", "memory_mib": "resident, MiB", "threads": "threads", "open_files": "open files"}
    names |= {"active": "rows in use after them", "answer_tokens": "tokens of answers"}
    lines = [f"| {' | '.join(names.values())} |", "|" + "---|" * len(names)]
    return "\n".join([*lines, *(f"| {' | '.join(f'{row[key]:,g}' for key in names)} |" for row in rows)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--port", type=int, default=18500)
    parser.add_argument("--out", type=Path, default=HERE / "serve_soak.json")
    asked = parser.parse_args()
    end_like_an_interrupt()
    os.environ["OMP_NUM_THREADS"] = "1"
    from tiny import write_tiny_model

    with tempfile.TemporaryDirectory() as name:
        rows = soak(asked.port, write_tiny_model(Path(name) / "model"), asked.requests)
    asked.out.write_text(json.dumps({**stamp(), "machine": describe_machine(), "rows": rows}, indent=1))
    fill_page(HERE / "serve.md", table(rows), "soak")


if __name__ == "__main__":
    main()
