"""Tokens per CPU-second and per second of one process and of two, one thread each, on the real 135M model.

    python benchmarks/scaling.py --out benchmarks/scaling.json --page benchmarks/scaling.md [--tokens 4096 --steps 2]

Same data, same global batches; the first step (allocation) is left out. Nothing is asserted. What `--out` has of other
sizes of step stays.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from watching import end_like_an_interrupt, fill_page, stamp

CONFIG = """model: demo
data: {{train: [./demo.jsonl], max_length: 512}}
train:
  {{global_batch: "{tokens} tokens", micro_batch: "512 tokens", precision: fp32, max_steps: {steps}, recompute: none}}
checkpoint: {{every: 1000}}
log: {{every: 1, to: []}}
"""
RUNS = (("one process", 1, "single"), ("ddp", 2, "ddp"), ("fsdp", 2, "fsdp"))
LEFT_OUT = 1


def write_data(folder: Path) -> None:
    """Conversations of about 60 to 500 tokens."""
    lines = []
    for place in range(200):
        answer = "one two three four five six seven eight nine ten " * (1 + place * 7 % 40)
        turns = [{"role": "user", "content": f"Count, please ({place})."}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": turns}))
    (folder / "demo.jsonl").write_text("\n".join(lines) + "\n")


def measure(name: str, num_processes: int, strategy: str, folder: Path) -> dict[str, Any]:
    output = folder / strategy
    command = [
        sys.executable, "-m", "duoka", "train", "run.yaml", f"parallel.strategy={strategy}", f"output={output}",
        "--nproc", str(num_processes),
    ]  # fmt: skip
    subprocess.run(
        command, cwd=folder, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    events = [json.loads(line) for line in (output / "events" / "run.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["type"] == "step" and event["step"] > LEFT_OUT]
    ranks = [json.loads(line) for path in output.glob("events/rank*.jsonl") for line in path.read_text().splitlines()]
    cpu_s = sum(event["cpu_s"] for event in ranks if event["step"] > LEFT_OUT)
    tokens, seconds = sum(step["num_tokens"] for step in steps), sum(step["step_s"] for step in steps)
    return {
        "name": name, "num_processes": num_processes, "tokens": tokens, "seconds": seconds, "cpu_s": cpu_s,
        "tokens_per_s": tokens / seconds, "tokens_per_cpu_s": tokens / cpu_s,
        "wait_share": sum(step["wait_s"] for step in steps) / seconds, "loss": steps[-1]["loss"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--page", type=Path, help="a page whose block of figures is made from --out")
    parser.add_argument("--tokens", type=int, default=1024, help="of a step of all processes")
    parser.add_argument("--steps", type=int, default=4, help="of which the first is left out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.yaml").write_text(CONFIG.format(tokens=options.tokens, steps=options.steps))
        write_data(folder)
        end_like_an_interrupt()
        rows = [measure(*run, folder) for run in RUNS]
    for row in rows:
        row["of_ideal_per_cpu_s"] = row["tokens_per_cpu_s"] / rows[0]["tokens_per_cpu_s"]
        row["of_ideal_per_s"] = row["tokens_per_s"] / rows[0]["tokens_per_s"] / row["num_processes"]
    before = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {version('torch')}"
    sizes = before.get("tokens_a_step", {}) | {str(options.tokens): {"rows": rows, "machine": machine, **stamp()}}
    options.out.write_text(json.dumps({"tokens_a_step": sizes}, indent=1) + "\n", encoding="utf-8")
    if options.page:
        fill_page(options.page, page_text(sizes), "figures")
    for row in rows:
        print(
            f"{row['name']:<12} {row['tokens_per_s']:>8.1f} tokens/s ({row['of_ideal_per_s']:.2f} of ideal) "
            f"{row['tokens_per_cpu_s']:>8.1f} per CPU-second ({row['of_ideal_per_cpu_s']:.2f}), loss {row['loss']:.5f}"
        )


def page_text(sizes: dict[str, Any]) -> str:
    lines = ["| tokens a step | run | tokens per CPU-s | of one process | tokens per s | of ideal | measured, code |"]
    lines.append("|---|---|---|---|---|---|---|")
    for tokens, found in sorted(sizes.items(), key=lambda item: int(item[0])):
        for row in found["rows"]:
            lines.append(
                f"| {int(tokens):,} | {row['name']} | {row['tokens_per_cpu_s']:.1f} | {row['of_ideal_per_cpu_s']:.2f} "
                f"| {row['tokens_per_s']:.1f} | {row['of_ideal_per_s']:.2f} | {found['measured']}, {found['code']} |"
            )
    return "\n".join([*lines, "", f"{found['machine']}."])


if __name__ == "__main__":
    main()
