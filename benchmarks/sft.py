"""What fine-tuning costs: duoka beside transformers' Trainer, TRL, LLaMA-Factory and others, on the same conversations.

    python benchmarks/sft.py --out benchmarks/sft.json --page benchmarks/sft.md [--peers PYTHON] [--llamafactory PYTHON]

`--peers` is the interpreter of an environment with transformers, trl, peft and datasets; `--llamafactory`,
`--unsloth` and `--torchtune` of environments with those. A tool without one is left out. All cases run in turns, one at
a time; each is watched from outside: CPU time of its whole process tree, its largest process's peak memory, and a line
per optimizer step that it writes. Rows that `--out` has already stay, unless the same case is measured again; each says
when, and of which code.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from sft_page import page_text
from watching import describe_machine, end_like_an_interrupt, fill_page, machine_kind, package_versions, stamp, watch

from duoka.process.allocator import allocator_environment

PEERS = Path(__file__).with_name("sft_peers.py")
NUM_CHATS, MAX_LENGTH, ROWS = 400, 512, 4
# saving: with a checkpoint beside every step; recompute: with activations computed again, as trl does by default;
# narrow: with weights of bf16 alone, as unsloth's are.
TOOLS = (
    "duoka",
    "duoka-saving",
    "duoka-recompute",
    "duoka-narrow",
    "trainer",
    "trl",
    "llamafactory",
    "unsloth",
    "torchtune",
)
OWN_PYTHON = {  # tools with an environment of their own, and which versions there are told
    "llamafactory": ("torch", "transformers", "trl", "llamafactory"),
    "unsloth": ("torch", "transformers", "trl", "unsloth"),
    "torchtune": ("torch", "torchao", "torchtune"),
}
WORDS = (
    "the of and to in is that it for as was on with his he be by at are this have from or an they which one you model "
    "data train time people water music year city number house river story paper"
)


@dataclass(frozen=True)
class Case:
    tool: str
    method: str  # full, lora
    precision: str  # fp32, bf16
    layout: str  # padded: a peer's defaults; packed: a peer tuned
    processes: int = 1
    machine: str = "2 cores, AVX2"  # rows of before machines were told apart
    threads: int = 1  # of each process

    @property
    def name(self) -> str:
        return f"{self.tool} {self.method} {self.precision} {self.layout} {self.processes}p {self.threads}t"


def write_chats(path: Path, seed: int = 0) -> None:
    """Conversations like alpaca's: one to four turns, 45 to 2010 tokens, a median of about 350."""
    dice = np.random.default_rng(seed)
    words = WORDS.split()
    with path.open("w", encoding="utf-8") as file:
        for length in np.clip(dice.lognormal(5.85, 0.7, NUM_CHATS), 45, 2010).astype(int):
            turns = int(dice.integers(1, 5)) if length > 200 else 1
            free = max(8, int(length) - 24 - 10 * turns)  # the template's own tokens
            messages = []
            for _ in range(turns):
                asked = int(dice.uniform(0.15, 0.45) * free / turns)
                for role, count in (("user", asked), ("assistant", free // turns - asked)):
                    messages.append({"role": role, "content": " ".join(dice.choice(words, max(2, count)))})
            file.write(json.dumps({"messages": messages}) + "\n")


def duoka_command(case: Case, folder: Path, data: Path, steps: int, accumulation: int) -> tuple[list[str], list[Path]]:
    packed = case.layout == "packed"
    config = {
        "model": "demo", "stage": "sft",
        "data": {"train": [{"name": str(data)}], "max_length": MAX_LENGTH, "packing": packed},
        "optim": {"lr": 2e-5},
        "train": {
            "global_batch": ROWS * accumulation * case.processes, "precision": case.precision, "max_steps": steps + 1,
            "micro_batch": "auto" if packed else ROWS, "seed": 0,
            "recompute": "full" if case.tool == "duoka-recompute" else "none",
            "weights": "bf16" if case.tool == "duoka-narrow" else "fp32",
        },
        # By default a checkpoint comes after more steps than are measured, and peers save nothing.
        **({"checkpoint": {"every": 1}} if case.tool == "duoka-saving" else {}),
        "output": str(folder / "run"),
    }  # fmt: skip
    if case.method == "lora":
        config["lora"] = {"rank": 8, "alpha": 16, "dropout": 0}
    (folder / "run.yaml").write_text(json.dumps(config), encoding="utf-8")
    command = [sys.executable, "-m", "duoka", "train", str(folder / "run.yaml"), "--nproc", str(case.processes)]
    return command, [folder / "run" / "events" / "run.jsonl"]


def peer_command(
    case: Case, python: str, folder: Path, data: Path, model: str, steps: int, accumulation: int
) -> tuple[list[str], list[Path]]:
    facts = {
        "tool": case.tool, "model": model, "data": str(data), "steps": steps + 1, "method": case.method,
        "precision": case.precision, "packed": case.layout == "packed", "max_length": MAX_LENGTH, "rows": ROWS,
        "accumulation": accumulation, "progress": str(folder / "progress"), "work": str(folder / "work"),
    }  # fmt: skip
    (folder / "case.json").write_text(json.dumps(facts), encoding="utf-8")
    start = [python]
    if case.processes > 1:
        start = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.processes}"]
    logs = [folder / f"progress.{rank}" for rank in range(case.processes)]
    return [*start, str(PEERS), str(folder / "case.json")], logs


def measure(case: Case, python: str, data: Path, model: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if case.tool.startswith("duoka"):
            # The demo's weights are unpacked once by a user's first run: every peer is given a folder as well.
            (folder / "cache").mkdir()
            for item in Path(os.environ["DUOKA_CACHE"]).iterdir():
                (folder / "cache" / item.name).symlink_to(item)
            command, logs = duoka_command(case, folder, data, options.steps, options.accumulation)
        else:
            command, logs = peer_command(case, python, folder, data, model, options.steps, options.accumulation)
        load = os.getloadavg()[0]
        # duoka's launcher gives its ranks the machine's better heap by itself; a peer that is tuned has it too.
        is_tuned = case.layout == "packed" and not case.tool.startswith("duoka")
        heap = allocator_environment() if is_tuned else {}
        seen = watch(command, logs, folder, options.steps, options.limit_s, variables=heap)
        return {**asdict(case), **seen.numbers(), "load_at_start": round(load, 1), **stamp()}


def choose_cases(options: argparse.Namespace) -> list[Case]:
    """Tools innermost: cases that are compared lie beside each other in time."""
    pythons = dict.fromkeys(TOOLS, sys.executable) | {"trainer": options.peers, "trl": options.peers}
    pythons |= {name: getattr(options, name) for name in OWN_PYTHON}
    lists = (options.processes, options.precisions, options.methods, options.layouts, options.tools)
    return [
        Case(tool, method, precision, layout, processes, machine_kind(), options.threads)
        for processes, precision, method, layout, tool in itertools.product(*lists)
        if pythons[tool]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--page", type=Path, help="a page whose block of figures is made from --out")
    parser.add_argument("--budget-s", type=float, default=1e9, help="start no case after so many seconds")
    parser.add_argument("--peers", help="interpreter with transformers, trl, peft, datasets")
    parser.add_argument("--llamafactory", help="interpreter with LLaMA-Factory")
    parser.add_argument("--unsloth", help="interpreter with unsloth")
    parser.add_argument("--torchtune", help="interpreter with torchtune, and transformers for the chat template")
    parser.add_argument("--tools", nargs="+", default=list(TOOLS), choices=TOOLS)
    parser.add_argument("--methods", nargs="+", default=["full", "lora"])
    parser.add_argument("--precisions", nargs="+", default=["fp32"])
    parser.add_argument("--layouts", nargs="+", default=["padded", "packed"])
    parser.add_argument("--processes", nargs="+", type=int, default=[1])
    parser.add_argument("--threads", type=int, default=2, help="of each process")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps, the first of which is start-up")
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=400.0, help="of one case")
    options, started = parser.parse_args(), time.monotonic()
    end_like_an_interrupt()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    with tempfile.TemporaryDirectory() as name:
        os.environ.setdefault("DUOKA_CACHE", str(Path(name) / "cache"))
        Path(os.environ["DUOKA_CACHE"]).mkdir(exist_ok=True)
        from duoka.config.schema import ModelConfig
        from duoka.hub.models import model_folder

        model = str(model_folder(ModelConfig(name="demo"), Path()))
        # Kernels are compiled once per machine (some 4 CPU seconds), as the demo's weights are unpacked once.
        subprocess.run([sys.executable, "-c", "from duoka.model import native; native.find()"], check=True)
        data = Path(name) / "chats.jsonl"
        write_chats(data)
        results: list[dict[str, Any]] = []
        write(options, results)  # what cannot be written is said before anything is measured
        for case in choose_cases(options):
            if time.monotonic() - started > options.budget_s:
                print(case.name, "left out: no time", flush=True)
                continue
            python = getattr(options, case.tool) if case.tool in OWN_PYTHON else options.peers
            results.append(measure(case, python or "", data, model, options))
            print(case.name, {k: v for k, v in results[-1].items() if k not in asdict(case)}, flush=True)
            write(options, results)


def write(options: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    """After every case, so that a run that is cut short leaves what it measured."""
    before = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    versions = before.get("versions", {})
    versions["duoka"] = package_versions(sys.executable, ("torch", "transformers", "peft"))
    if options.peers:
        versions["trainer, trl"] = package_versions(options.peers, ("torch", "transformers", "trl", "peft"))
    for name, packages in OWN_PYTHON.items():
        if python := getattr(options, name):
            versions[name] = package_versions(python, packages)
    work = {
        "model": "SmolLM2-135M-Instruct", "conversations": NUM_CHATS, "max_length": MAX_LENGTH,
        "rows_per_process": ROWS, "accumulation": options.accumulation,
        "measured": "CPU of the process tree from the end of the first step to the end of the last; wall likewise",
    }  # fmt: skip
    if before.get("work", work) != work:
        raise SystemExit(f"{options.out} holds rows of other work ({before['work']}): give another --out.")
    rows = {case_of(row): row for row in [*before.get("results", []), *results]}
    found = {"machine": describe_machine(), "versions": versions, "work": work, "results": list(rows.values())}
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.page:
        fill_page(options.page, page_text(found), "figures")


def case_of(row: dict[str, Any]) -> Case:
    return Case(**{field.name: row[field.name] for field in fields(Case) if field.name in row})


if __name__ == "__main__":
    main()
