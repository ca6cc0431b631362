"""Tokens per CPU-second and per second of one process and of two, on the real 135M model, with equal work a process.

    python benchmarks/scaling.py --out benchmarks/scaling.json --page benchmarks/scaling.md [--precisions fp32 bf16]

Each process takes 8 conversations a step (`sft.py`'s, packed), so two processes take steps of twice as many tokens. The
first step (allocation) is left out. CPU seconds are the ranks' own, from their events. Nothing is asserted. Rows that
`--out` has of other machines, precisions, methods and rows a process stay.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sft import write_chats
from watching import end_like_an_interrupt, fill_page, machine_kind, stamp

# name, processes, threads of each, strategy
RUNS = (
    ("one process, one thread", 1, 1, "single"),
    ("one process, two threads", 1, 2, "single"),
    ("ddp", 2, 1, "ddp"),
    ("fsdp", 2, 1, "fsdp"),
    ("zero2", 2, 1, "zero2"),
)
LEFT_OUT = 1
KEY = ("machine", "precision", "method", "rows_per_process", "name")


def write_config(folder: Path, precision: str, method: str) -> None:
    config = {
        "model": "demo", "stage": "sft", "data": {"train": [{"name": "chats.jsonl"}], "max_length": 512},
        "train": {"precision": precision, "recompute": "none", "seed": 0},
        "checkpoint": {"every": 1000}, "log": {"every": 1, "to": []},
    }  # fmt: skip
    if method == "lora":
        config["lora"] = {"rank": 8, "alpha": 16, "dropout": 0}
    (folder / "run.yaml").write_text(json.dumps(config), encoding="utf-8")


def output_name(run: tuple[str, int, int, str]) -> str:
    return f"{run[3]}-{run[2]}"


def measure(run: tuple[str, int, int, str], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    name, num_processes, threads, strategy = run
    output = folder / output_name(run)
    command = [
        sys.executable, "-m", "duoka", "train", "run.yaml", f"parallel.strategy={strategy}", f"output={output}",
        f"train.global_batch={options.rows * num_processes}", f"train.max_steps={options.steps}",
        "--nproc", str(num_processes),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    load = os.getloadavg()[0]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, env=environment)
    events = [json.loads(line) for line in (output / "events" / "run.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["type"] == "step" and event["step"] > LEFT_OUT]
    ranks = [json.loads(line) for path in output.glob("events/rank*.jsonl") for line in path.read_text().splitlines()]
    cpu_s = sum(event["cpu_s"] for event in ranks if event["step"] > LEFT_OUT)
    tokens, seconds = sum(step["num_tokens"] for step in steps), sum(step["step_s"] for step in steps)
    return {
        "name": name, "num_processes": num_processes, "threads": threads, "steps": len(steps), "tokens": tokens,
        "seconds": seconds, "cpu_s": cpu_s, "tokens_per_s": tokens / seconds, "tokens_per_cpu_s": tokens / cpu_s,
        "wait_share": sum(step["wait_s"] for step in steps) / seconds, "loss": steps[-1]["loss"],
        "load_at_start": round(load, 1), **stamp(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--page", type=Path, help="a page whose block of figures is made from --out")
    parser.add_argument("--precisions", nargs="+", default=["fp32"], choices=["fp32", "bf16"])
    parser.add_argument("--methods", nargs="+", default=["full"], choices=["full", "lora"])
    parser.add_argument("--rows", type=int, default=8, help="conversations of a step and process")
    parser.add_argument("--steps", type=int, default=5, help="of which the first is left out")
    options = parser.parse_args()
    before = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    rows = {tuple(row[key] for key in KEY): row for row in before.get("rows", [])}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_chats(folder / "chats.jsonl")
        end_like_an_interrupt()
        for precision in options.precisions:
            for method in options.methods:
                write_config(folder, precision, method)
                for run in RUNS:
                    of = {"machine": machine_kind(), "precision": precision, "method": method}
                    row = of | {"rows_per_process": options.rows} | measure(run, folder, options)
                    rows[tuple(row[key] for key in KEY)] = row
                    print(json.dumps(row), flush=True)
                    write(options, list(rows.values()))
                    shutil.rmtree(folder / output_name(run))


def write(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """After every run, so that a series that is cut short leaves what it measured."""
    options.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")
    if options.page:
        fill_page(options.page, page_text(rows), "figures")


def page_text(rows: list[dict[str, Any]]) -> str:
    """Each row beside one process of one thread on the same machine and work."""
    heads = "machine", "work", "run", "tokens a step", "tokens per CPU-s", "of one process", "per s", "measured, code"
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    alone = {tuple(row[key] for key in KEY[:-1]): row for row in rows if row["name"] == RUNS[0][0]}
    for row in rows:
        beside = alone[tuple(row[key] for key in KEY[:-1])]
        size = round(row["tokens"] / row["steps"])
        lines.append(
            f"| {row['machine']} | {row['method']}, {row['precision']} | {row['name']} | {size:,} "
            f"| {row['tokens_per_cpu_s']:.1f} | {row['tokens_per_cpu_s'] / beside['tokens_per_cpu_s']:.2f} "
            f"| {row['tokens_per_s']:.1f} | {row['measured']}, {row['code']} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
