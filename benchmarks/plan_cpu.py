"""The plan's memory and speed beside what runs on this machine really take, over strategies.

    duoka bench hardware                          # first, on an idle machine
    python benchmarks/plan_cpu.py OUT.json        # --only WORD: cases with that word; --page FILE.md: a table too

Trains a few steps per case in fresh processes, twice, and reads plan.json and the event log. "Held" is the highest
resident size of any rank in a run where each tensor has pages of its own (MALLOC_MMAP_THRESHOLD_, the C library's
heap), so that resident is what was allocated. That costs page faults, so tokens/s is the median step after the first
of a second run, which is left alone, with the heap that duoka gives its ranks; "resident" is of that run. Wall times
need an idle machine. Rows of other machines that OUT.json has stay. Prints and writes the rows; asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
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
from watching import end_like_an_interrupt, fill_page, machine_kind, stamp

if TYPE_CHECKING:
    from duoka.watch.history import History

# As torch's own allocator on a GPU: what is freed is free. Huge pages make up for most of the page faults.
EXACT = {"DUOKA_MALLOC": "0", "MALLOC_MMAP_THRESHOLD_": "131072", "THP_MEM_ALLOC_ENABLE": "1"}
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
checkpoint: {every: 1000}
log: {to: []}
"""
LORA = "lora={rank: 8, dropout: 0}"
QUANTIZED = "model={name: demo, quantization: nf4}"
BF16 = "train.precision=bf16"
CASES: dict[str, tuple[str, int, list[str]]] = {
    "single": (YAML, 1, []),
    "single, 512 tokens at once": (YAML, 1, ['train.micro_batch="512 tokens"']),
    "single, recompute full": (YAML, 1, ["train.recompute=full"]),
    "single, LoRA": (YAML, 1, [LORA]),
    "ddp2": (YAML, 2, ["parallel.strategy=ddp"]),
    "zero1x2": (YAML, 2, ["parallel.strategy=zero1"]),
    "zero2x2": (YAML, 2, ["parallel.strategy=zero2"]),
    "fsdp2": (YAML, 2, ["parallel.strategy=fsdp"]),
    "135M": (DEMO, 1, []),
    "135M, LoRA": (DEMO, 1, [LORA]),
    "135M, bf16": (DEMO, 1, [BF16]),
    "135M, bf16, recompute full": (DEMO, 1, [BF16, "train.recompute=full"]),
    "135M, LoRA, bf16": (DEMO, 1, [BF16, LORA]),
    "135M, QLoRA": (DEMO, 1, [LORA, QUANTIZED]),
    "135M, QLoRA, bf16": (DEMO, 1, [BF16, LORA, QUANTIZED]),
    "135M, bf16 weights": (DEMO, 1, [BF16, "train.weights=bf16"]),
    "135M, LoRA, ddp2": (DEMO, 2, ["parallel.strategy=ddp", LORA]),
    "135M, LoRA, fsdp2": (DEMO, 2, ["parallel.strategy=fsdp", LORA]),
    "135M, bf16, ddp2": (DEMO, 2, ["parallel.strategy=ddp", BF16]),
    "135M, bf16, fsdp2": (DEMO, 2, ["parallel.strategy=fsdp", BF16]),
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
    memory, speed = plain.memory_predicted(), plain.speed_predicted()  # for the heap that duoka gives it
    assert memory is not None and speed is not None
    return {
        "machine": machine_kind(),
        "case": title,
        "layout": str(plain.plan["layout"]["name"]),
        "predicted_bytes": memory["peak"],
        "measured_bytes": exact.memory_measured(),
        "resident_bytes": plain.memory_measured(),
        "parts": plain.plan["memory"]["parts"],
        "held": exact.held,
        "predicted_tokens_per_s": speed["step"],
        "measured_tokens_per_s": statistics.median(
            step.num_tokens / step.step_s for step in plain.steps[1:] if step.num_tokens and step.step_s
        ),
        "is_hardware_measured": plain.plan["speed"]["is_measured"],
        "wall_s": round(time.perf_counter() - started, 1),
        **stamp(),
    }


def line(row: dict[str, Any]) -> str:
    sizes = [row[f"{kind}_bytes"] / 2**20 for kind in ("predicted", "measured", "resident")]
    held = f"{sizes[0]:>7,.0f} MiB planned{sizes[1]:>7,.0f} held{sizes[2]:>7,.0f} resident ({off(row, 'bytes'):+.0%})"
    rates = f"{row['predicted_tokens_per_s']:>9,.0f} tokens/s planned{row['measured_tokens_per_s']:>9,.0f} reached"
    return f"{row['case']:<28}{held}{rates} ({off(row, 'tokens_per_s'):+.0%})  {row['wall_s']:.0f} s"


AIMS = {"bytes": 0.10, "tokens_per_s": 0.20}
HEADS = (
    "machine", "case", "planned MiB", "held", "resident", "planned to resident", "planned tokens/s", "reached", "",
    "measured, code",
)  # fmt: skip


def off(row: dict[str, Any], what: str) -> float:
    """How far the plan is off: of memory, from what the run took with the heap that duoka gives it."""
    measured = row["resident_bytes"] if what == "bytes" else row[f"measured_{what}"]
    return float(row[f"predicted_{what}"] / measured - 1)


def page(facts: dict[str, Any]) -> str:
    """All rows as a table, and per machine which of them miss the aim."""
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    for row in facts["rows"]:
        sizes = [f"{row[f'{kind}_bytes'] / 2**20:,.0f}" for kind in ("predicted", "measured", "resident")]
        rates = [f"{row[f'{kind}_tokens_per_s']:,.0f}" for kind in ("predicted", "measured")]
        cells = [row["machine"], row["case"], *sizes, f"{off(row, 'bytes'):+.0%}", *rates]
        cells += [f"{off(row, 'tokens_per_s'):+.0%}", f"{row['measured']}, {row['code']}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    for machine, speeds in facts["hardware"].items():
        rows = [row for row in facts["rows"] if row["machine"] == machine]
        lines.append(f"{machine} (`duoka bench hardware`: {speeds}):")
        for what, words in (("bytes", "memory"), ("tokens_per_s", "tokens/s")):
            missed = [f"{row['case']} {off(row, what):+.0%}" for row in rows if abs(off(row, what)) > AIMS[what]]
            within = f"{len(rows) - len(missed)} of {len(rows)} rows are within {AIMS[what]:.0%} in {words}"
            lines.append(f"{within}; not {'; '.join(missed)}." if missed else f"{within}.")
        lines.append("")
    return "\n".join(lines).rstrip()


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
    parser.add_argument("--page", type=Path, help="a page whose block of figures is made from OUT.json")
    options = parser.parse_args()
    end_like_an_interrupt()
    facts = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    facts |= {"torch": version("torch"), "hardware": {**facts.get("hardware", {}), machine_kind(): hardware()}}
    rows = {(row["machine"], row["case"]): row for row in facts.get("rows", [])}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tiny_model(folder / "model", hidden=768)
        write_conversations(folder / "chats.jsonl", 256)
        for title in CASES:
            if options.only not in title:
                continue
            row = run(folder, title)
            print(line(row), flush=True)
            rows[row["machine"], title] = row
            # After each, so that a run that is ended early leaves what it measured.
            facts["rows"] = list(rows.values())
            options.out.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
            if options.page:
                fill_page(options.page, page(facts), "figures")


if __name__ == "__main__":
    main()
