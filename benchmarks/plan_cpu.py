"""The plan's memory and speed beside what runs on this machine really take, over strategies.

    duoka bench hardware                          # first, on an idle machine
    python benchmarks/plan_cpu.py OUT.json        # --only WORD: cases with that word

Trains a few steps per case in fresh processes, twice, and reads plan.json and the event log. Memory is the highest
resident size of any rank in a run where each tensor has pages of its own (MALLOC_MMAP_THRESHOLD_), so that resident is
what was allocated: by default glibc keeps freed blocks below 32 MiB, from run to run others. That costs page faults, so
tokens/s is the median step after the first of a second run, which is left alone; its resident size is written too.
Wall times need an idle machine. Prints and writes the rows; asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from tiny import write_conversations, write_tiny_model

if TYPE_CHECKING:
    from duoka.watch.history import History

# As torch's own allocator on a GPU: what is freed is free. Huge pages make up for most of the page faults.
EXACT = {"MALLOC_MMAP_THRESHOLD_": "131072", "THP_MEM_ALLOC_ENABLE": "1"}
# A random Llama of 25M parameters with 4 layers; about 2,200 tokens a step.
YAML = """
model: {name: model}
data: {train: [chats.jsonl], max_length: 256}
train: {global_batch: 16, max_steps: 4, precision: fp32}
checkpoint: {every: 1000}
log: {to: []}
"""
DEMO = """
model: demo
data: {train: [identity], max_length: 512}
train: {global_batch: 8, max_steps: 4, precision: fp32}
lora: {rank: 8, dropout: 0}
checkpoint: {every: 1000}
log: {to: []}
"""
CASES: dict[str, tuple[str, int, list[str]]] = {
    "single": (YAML, 1, []),
    "single, 512 tokens at once": (YAML, 1, ['train.micro_batch="512 tokens"']),
    "single, recompute full": (YAML, 1, ["train.recompute=full"]),
    "single, LoRA": (YAML, 1, ["lora={rank: 8, dropout: 0}"]),
    "ddp2": (YAML, 2, ["parallel.strategy=ddp"]),
    "zero1x2": (YAML, 2, ["parallel.strategy=zero1"]),
    "zero2x2": (YAML, 2, ["parallel.strategy=zero2"]),
    "fsdp2": (YAML, 2, ["parallel.strategy=fsdp"]),
    "135M, LoRA, ddp2": (DEMO, 2, ["parallel.strategy=ddp"]),
    "135M, LoRA, fsdp2": (DEMO, 2, ["parallel.strategy=fsdp"]),
}


def train(folder: Path, title: str, environment: dict[str, str]) -> History:
    from duoka.runs.folder import RunFolder
    from duoka.watch.history import read_history

    yaml, nproc, words = CASES[title]
    (folder / "run.yaml").write_text(yaml, encoding="utf-8")
    kind = "exact" if environment else "plain"
    path = folder / "runs" / f"{title.replace(' ', '-').replace(',', '')}-{kind}"
    command = [sys.executable, "-m", "duoka", "train", str(folder / "run.yaml"), f"output={path}"]
    subprocess.run(
        [*command, "--nproc", str(nproc), *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        timeout=300, env={**os.environ, **environment},
    )  # fmt: skip
    return read_history(RunFolder(path))


def run(folder: Path, title: str) -> dict[str, Any]:
    started = time.perf_counter()
    exact, plain = train(folder, title, EXACT), train(folder, title, {})
    memory, speed = exact.memory_predicted(), plain.speed_predicted()
    assert memory is not None and speed is not None
    return {
        "case": title,
        "layout": str(exact.plan["layout"]["name"]),
        "predicted_bytes": memory["peak"],
        "measured_bytes": exact.memory_measured(),
        "resident_bytes": plain.memory_measured(),
        "parts": exact.plan["memory"]["parts"],
        "held": exact.held,
        "predicted_tokens_per_s": speed["step"],
        "measured_tokens_per_s": statistics.median(
            step.num_tokens / step.step_s for step in plain.steps[1:] if step.num_tokens and step.step_s
        ),
        "is_hardware_measured": plain.plan["speed"]["is_measured"],
        "wall_s": round(time.perf_counter() - started, 1),
    }


def line(row: dict[str, Any]) -> str:
    memory, speed = (row[f"predicted_{key}"] / row[f"measured_{key}"] - 1 for key in ("bytes", "tokens_per_s"))
    sizes = [row[f"{kind}_bytes"] / 2**20 for kind in ("predicted", "measured")]
    held = f"{sizes[0]:>7,.0f} MiB planned{sizes[1]:>7,.0f} held ({memory:+.0%})"
    held += f"{row['resident_bytes'] / 2**20:>7,.0f} with glibc's blocks"
    rates = f"{row['predicted_tokens_per_s']:>9,.0f} tokens/s planned{row['measured_tokens_per_s']:>9,.0f} reached"
    return f"{row['case']:<28}{held}{rates} ({speed:+.0%})  {row['wall_s']:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="cases with this word in their name")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tiny_model(folder / "model", hidden=768)
        write_conversations(folder / "chats.jsonl", 256)
        for title in CASES:
            if options.only in title:
                rows.append(run(folder, title))
                print(line(rows[-1]), flush=True)
    facts = {
        "machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), "torch": version("torch"),
        "rows": rows,
    }  # fmt: skip
    options.out.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
