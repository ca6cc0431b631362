"""The plan's memory and speed beside what runs on this machine really take, over strategies.

    duoka bench hardware                          # first, on an idle machine
    python benchmarks/plan_cpu.py OUT.json        # --only WORD: cases with that word; --page FILE.md: a table too

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
    memory, speed = off(row, "bytes"), off(row, "tokens_per_s")
    sizes = [row[f"{kind}_bytes"] / 2**20 for kind in ("predicted", "measured")]
    held = f"{sizes[0]:>7,.0f} MiB planned{sizes[1]:>7,.0f} held ({memory:+.0%})"
    held += f"{row['resident_bytes'] / 2**20:>7,.0f} with glibc's blocks"
    rates = f"{row['predicted_tokens_per_s']:>9,.0f} tokens/s planned{row['measured_tokens_per_s']:>9,.0f} reached"
    return f"{row['case']:<28}{held}{rates} ({speed:+.0%})  {row['wall_s']:.0f} s"


PAGE = """# The plan beside what runs take, on a CPU

`duoka bench hardware`, then `python benchmarks/plan_cpu.py benchmarks/plan_cpu.json --page benchmarks/plan_cpu.md`: a
Llama of 25M parameters (about 2,200 tokens a step) and the 135M demo model, {cores} cores ({machine}), nothing else
running. Memory is of runs in which each tensor has pages of its own; tokens/s of runs left alone
([plan_cpu.json](plan_cpu.json) has the parts). What `duoka bench hardware` measured before: {measured}.

| case | planned MiB | held | | planned tokens/s | reached | |
|---|---|---|---|---|---|---|
{rows}

The aim is {memory:.0%} for memory and {speed:.0%} for tokens/s. Memory: {memory_words}. Tokens/s: {speed_words}.
Two measurements of this virtual machine's products on one afternoon gave 169 and 130 GFLOP/s: a plan of tokens/s can
be no surer than that.

Sharded runs of few tokens are planned too fast: beside the wire, gathers cost copies between flat buffers and weights,
and threads that send and receive on cores that should compute ([scaling.md](scaling.md), "Where fsdp's time goes");
the plan counts neither. A LoRA run gathers as much as a full one and computes less beside it: there it shows most.
"""
AIMS = {"bytes": 0.05, "tokens_per_s": 0.25}


def off(row: dict[str, Any], what: str) -> float:
    return float(row[f"predicted_{what}"] / row[f"measured_{what}"] - 1)


def page(facts: dict[str, Any]) -> str:
    """All rows as a table, and which of them miss the aim."""
    lines, words = [], {}
    for row in facts["rows"]:
        sizes = [f"{row[f'{kind}_bytes'] / 2**20:,.0f}" for kind in ("predicted", "measured")]
        rates = [f"{row[f'{kind}_tokens_per_s']:,.0f}" for kind in ("predicted", "measured")]
        cells = [row["case"], *sizes, f"{off(row, 'bytes'):+.0%}", *rates, f"{off(row, 'tokens_per_s'):+.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
    for what, aim in AIMS.items():
        missed = [f"{row['case']} {off(row, what):+.1%}" for row in facts["rows"] if abs(off(row, what)) > aim]
        within = f"{len(lines) - len(missed)} of {len(lines)} rows are within it"
        words[what] = f"{within}; not {'; '.join(missed)}" if missed else within
    return PAGE.format(
        cores=facts["cores"], machine=facts["machine"], measured=facts["hardware"], rows="\n".join(lines),
        memory=AIMS["bytes"], speed=AIMS["tokens_per_s"], memory_words=words["bytes"],
        speed_words=words["tokens_per_s"],
    )  # fmt: skip


def hardware() -> str:
    """What the plans counted with."""
    from duoka.plan.catalog import local_cluster
    from duoka.plan.hardware import read_machine

    cluster = local_cluster(read_machine(), 2, 2)
    if not cluster.is_measured:
        return "none, so that its speeds are guesses"
    device = cluster.device
    memory, link = device.memory_bytes_per_s / 1e9, cluster.link.bytes_per_s / 1e9
    return f"{device.fp32_flops / 1e9:.0f} GFLOP/s in fp32, memory at {memory:.0f} GB/s, all-reduces at {link:.2f} GB/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="cases with this word in their name")
    parser.add_argument("--page", type=Path, help="a Markdown table of them")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    facts = {
        "machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), "torch": version("torch"),
        "hardware": hardware(), "rows": rows,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tiny_model(folder / "model", hidden=768)
        write_conversations(folder / "chats.jsonl", 256)
        for title in CASES:
            if options.only in title:
                rows.append(run(folder, title))
                print(line(rows[-1]), flush=True)
                # After each, so that a run that is ended early leaves what it measured.
                options.out.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
                if options.page:
                    options.page.write_text(page(facts), encoding="utf-8")


if __name__ == "__main__":
    main()
