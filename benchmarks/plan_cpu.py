"""The plan's memory and speed beside what runs on this machine really take, over strategies.

    python benchmarks/plan_cpu.py OUT.json        # first: duoka bench hardware

Trains a small random model a few steps per case, each in fresh processes, and reads plan.json and the event log.
Wall times need an idle machine. Writes the rows and prints them.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from tiny import write_conversations, write_tiny_model

YAML = """
model: {name: model}
data: {train: [chats.jsonl], max_length: 256}
train: {global_batch: 32, max_steps: 4, precision: fp32}
checkpoint: {every: 1000}
log: {to: []}
"""
CASES = {
    "single": (1, []),
    "single, small micro-batch": (1, ['train.micro_batch="512 tokens"']),
    "single, recompute full": (1, ["train.recompute=full"]),
    "single, lora": (1, ["lora={rank: 8}"]),
    "ddp2": (2, ["parallel.strategy=ddp"]),
    "zero1x2": (2, ["parallel.strategy=zero1"]),
    "zero2x2": (2, ["parallel.strategy=zero2"]),
    "fsdp2": (2, ["parallel.strategy=fsdp"]),
}


def main(out: Path) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tiny_model(folder / "model", hidden=512)
        write_conversations(folder / "chats.jsonl", 256)
        (folder / "run.yaml").write_text(YAML, encoding="utf-8")
        for title, (nproc, words) in CASES.items():
            rows.append({"case": title, **run(folder, title, nproc, words)})
            print(line(rows[-1]), flush=True)
    facts = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), "rows": rows}
    out.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def run(folder: Path, title: str, nproc: int, words: list[str]) -> dict[str, float | str]:
    from duoka.runs.folder import RunFolder
    from duoka.watch.history import read_history

    path = folder / "runs" / title.replace(" ", "-").replace(",", "")
    command = [
        sys.executable,
        "-m",
        "duoka",
        "train",
        str(folder / "run.yaml"),
        f"output={path}",
        "--nproc",
        str(nproc),
    ]
    subprocess.run([*command, *words], check=True, stdout=subprocess.DEVNULL, timeout=600)
    history = read_history(RunFolder(path))
    rates = sorted(step.num_tokens / step.step_s for step in history.steps[1:])
    return {
        "layout": str(history.plan["layout"]["name"]),
        "predicted_bytes": history.memory_predicted()["peak"],
        "measured_bytes": history.memory_measured(),
        "predicted_tokens_per_s": history.speed_predicted()["step"],
        "measured_tokens_per_s": rates[len(rates) // 2],
        "is_hardware_measured": history.plan["speed"]["is_measured"],
    }


def line(row: dict) -> str:
    memory, speed = (row[f"predicted_{key}"] / row[f"measured_{key}"] - 1 for key in ("bytes", "tokens_per_s"))
    sizes = [row[f"{kind}_bytes"] / 2**20 for kind in ("predicted", "measured")]
    held = f"{sizes[0]:>7,.0f} MiB planned{sizes[1]:>7,.0f} held ({memory:+.0%})"
    rates = f"{row['predicted_tokens_per_s']:>9,.0f} tokens/s planned{row['measured_tokens_per_s']:>9,.0f} reached"
    return f"{row['case']:<28}{held}{rates} ({speed:+.0%})"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
