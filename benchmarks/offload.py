"""What a disk under a run costs and saves: seconds a step and memory of one's own, for each tier of parallel.offload.

    python benchmarks/offload.py OUT.json --page benchmarks/offload.md   # --layers 12 --steps 5 --folder /fast

Trains one random Llama in fresh processes, tiers in turns, each once a round; a step is the median after the first.
Memory is the most anonymous and shared pages that the training process had: pages of files are the kernel's. Wall times
need an idle machine: the load at the start is written too. Prints and writes rows; asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from tiny import write_conversations, write_tiny_model

YAML = """
model: {name: model}
data: {train: [chats.jsonl], max_length: 256}
train: {global_batch: 8, micro_batch: 2, max_steps: STEPS, precision: fp32, recompute: full}
parallel: {strategy: zero3}
checkpoint: {every: 100000}
log: {to: []}
"""
TIERS = {
    "memory": "none",
    "optimizer: disk": "{optimizer: disk, folder: FOLDER}",
    "params: disk": "{params: disk, folder: FOLDER}",
}
HIDDEN = 640


def run(place: Path, tier: str, folder: Path) -> dict[str, Any]:
    """One run in a process of its own: its steps' seconds, memory, and the plan's figures."""
    output = place / f"run-{time.monotonic_ns()}"
    offload = TIERS[tier].replace("FOLDER", str(folder))
    command = [
        sys.executable, "-m", "duoka", "train", str(place / "run.yaml"), f"parallel.offload={offload}",
        f"output={output}",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    peak = [0]
    watch = threading.Thread(target=_watch, args=(process, peak))
    watch.start()
    said, _ = process.communicate()
    watch.join()
    if process.returncode:
        raise SystemExit(said)
    lines = map(json.loads, (output / "events" / "run.jsonl").read_text().splitlines())
    steps = [one for one in lines if one["type"] == "step"]
    seconds = [one["step_s"] for one in steps][1:]
    plan = json.loads((output / "plan.json").read_text())
    return {
        "tier": tier,
        "step_s": statistics.median(seconds),
        "own_bytes": peak[0],
        "planned_bytes": plan["memory"]["peak_bytes"],
        "disk_bytes": plan["memory"]["disk_needed_bytes"],
        "planned_step_s": plan["speed"]["step_s"],
        "losses": [one["loss"] for one in steps],
    }


def _watch(process: subprocess.Popen[str], peak: list[int]) -> None:
    """The largest process among this one's descendants: the rank."""
    while process.poll() is None:
        peak[0] = max([peak[0], *(_own_bytes(pid) for pid in _family(process.pid))])
        time.sleep(0.02)


def _family(root: int) -> list[int]:
    found, left = [root], [root]
    while left:
        pid = left.pop()
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            continue
        found += (more := [int(one) for one in children])
        left += more
    return found


def _own_bytes(pid: int) -> int:
    try:
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return 1024 * sum(int(lines[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    except (OSError, KeyError):
        return 0


def page(rows: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    by_tier = {tier: [row for row in rows if row["tier"] == tier] for tier in TIERS}
    base = statistics.median(row["step_s"] for row in by_tier["memory"])
    out = [
        "# Offloading to a disk: what it costs and saves",
        "",
        f"Written by `python benchmarks/offload.py OUT.json --page benchmarks/offload.md`. A random Llama of "
        f"{facts['num_parameters'] / 1e6:.1f}M parameters, fp32, zero3 on one process, recompute, 4 micro-batches a "
        f"step; {facts['rounds']} rounds in turns, medians. Load of the machine at the start: {facts['load']:.1f} on "
        f"{facts['cores']} cores.",
        "",
        "| offload | s a step | beside memory | own memory, MiB | the plan's, MiB | in files, MiB | same losses |",
        "|---|---|---|---|---|---|---|",
    ]
    losses = by_tier["memory"][0]["losses"]
    for tier, found in by_tier.items():
        step = statistics.median(row["step_s"] for row in found)
        own = statistics.median(row["own_bytes"] for row in found) / 2**20
        same = "yes" if all(row["losses"] == losses for row in found) else "NO"
        row = found[0]
        out.append(
            f"| {tier} | {step:.2f} | {step / base:.2f} | {own:,.0f} | {row['planned_bytes'] / 2**20:,.0f} "
            f"| {row['disk_bytes'] / 2**20:,.0f} | {same} |"
        )
    return "\n".join([*out, "", facts["deepspeed"], ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        place = Path(text)
        write_conversations(place / "chats.jsonl", 48, seed=3)
        model = write_tiny_model(place / "model", hidden=HIDDEN, layers=asked.layers)
        (place / "run.yaml").write_text(YAML.replace("STEPS", str(asked.steps)), encoding="utf-8")
        facts = {
            "num_parameters": (model / "model.safetensors").stat().st_size // 4,
            "rounds": asked.rounds,
            "load": os.getloadavg()[0],
            "cores": len(os.sched_getaffinity(0)),
            "deepspeed": "DeepSpeed's ZeRO-Infinity was not run beside it: it compiles its async I/O first.",
        }
        rows = []
        for _ in range(asked.rounds):
            for tier in TIERS:
                rows.append(row := run(place, tier, asked.folder or place / "files"))
                print(json.dumps(row))
    asked.out.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    if asked.page:
        asked.page.write_text(page(rows, facts), encoding="utf-8")


if __name__ == "__main__":
    main()
