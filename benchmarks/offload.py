"""What a disk under a run and fewer bits on the wire cost and save: seconds a step, memory, and the plan's figures.

    python benchmarks/offload.py OUT.json --page benchmarks/offload.md   # --layers 12 --steps 5 --folder /fast --peers

Trains one random Llama in fresh processes, tiers in turns, each once a round; a step is the median after the first.
Own memory is the most anonymous and shared pages that a rank had: pages of files are the kernel's. `--peers` trains it
with DeepSpeed's ZeRO-Infinity too (offload_peer.py), on rows of the same mean length; its operators are compiled before
the first round. Wall times need an idle machine: the load at the start is written too. Asserts nothing.
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
parallel: {strategy: zero3, reshard: true}
checkpoint: {every: 100000}
log: {to: []}
"""
ON_DISK = {one: f"parallel.offload={{{one}: disk, folder: FOLDER}}" for one in ("optimizer", "params", "activations")}
# name -> (processes, settings)
TIERS: dict[str, tuple[int, list[str]]] = {
    "memory": (1, []),
    "optimizer: disk": (1, [ON_DISK["optimizer"]]),
    "params: disk": (1, [ON_DISK["params"]]),
    "all activations kept": (1, ["train.recompute=none", "train.micro_batch=8"]),
    "activations: disk": (1, ["train.recompute=none", "train.micro_batch=8", ON_DISK["activations"]]),
    "memory, 2 processes": (2, []),
    "optimizer: disk, 2 processes": (2, [ON_DISK["optimizer"]]),
    "params: disk, 2 processes": (2, [ON_DISK["params"]]),
    "compress: int8, 2 processes": (2, ["parallel.compress={weights: int8, gradients: int8}"]),
}
ENGINE = "parallel.engine=deepspeed"
TIERS |= {
    f"{one}: disk, 2 processes, engine: deepspeed": (2, [ON_DISK[one], ENGINE]) for one in ("optimizer", "params")
}
PEERS = {"DeepSpeed, optimizer on nvme": "optimizer", "DeepSpeed, parameters too": "params"}
HIDDEN = 640
MIB = 2**20


def run(place: Path, tier: str, folder: Path) -> dict[str, Any]:
    """One run in a process of its own: its steps' seconds, memory, and the plan's figures."""
    output = place / f"run-{time.monotonic_ns()}"
    processes, settings = TIERS[tier]
    words = [one.replace("FOLDER", str(folder)) for one in settings]
    command = [sys.executable, "-m", "duoka", "train", str(place / "run.yaml"), f"--nproc={processes}", *words]
    own, _ = watched([*command, f"output={output}"])
    lines = map(json.loads, (output / "events" / "run.jsonl").read_text().splitlines())
    steps = [one for one in lines if one["type"] == "step"]
    seconds = [one["step_s"] for one in steps][1:]
    plan = json.loads((output / "plan.json").read_text())
    return {
        "tier": tier,
        "step_s": statistics.median(seconds),
        "tokens": statistics.mean(one["num_tokens"] for one in steps[1:]),
        "samples": steps[-1]["num_samples"],
        "own_bytes": own,
        "measured_bytes": steps[-1]["memory_bytes"],
        "planned_bytes": plan["memory"]["peak_bytes"],
        "disk_bytes": plan["memory"]["disk_needed_bytes"],
        "planned_step_s": plan["speed"]["step_s"],
        "losses": [one["loss"] for one in steps],
    }


def run_peer(place: Path, name: str, folder: Path, steps: int, length: int) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).with_name("offload_peer.py")), str(place / "model"), str(folder)]
    own, said = watched([*command, str(steps), PEERS[name], str(length)])
    found = json.loads(said.rpartition("RESULT ")[2].splitlines()[0])
    step_s = statistics.median(found["seconds"][1:])
    return {"tier": name, "step_s": step_s, "own_bytes": own, "tokens": found["tokens"], "version": found["version"]}


def watched(command: list[str]) -> tuple[int, str]:
    """(own memory of the largest process at its most, what was said)."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    peak = [0]
    watch = threading.Thread(target=_watch, args=(process, peak))
    watch.start()
    said, _ = process.communicate()
    watch.join()
    if process.returncode:
        raise SystemExit(said)
    return peak[0], said


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
    by_tier = {tier: [row for row in rows if row["tier"] == tier] for tier in (*TIERS, *PEERS)}
    out = [
        "# Offloading to a disk, and fewer bits on the wire: what it costs and saves",
        "",
        f"Written by `python benchmarks/offload.py OUT.json --page benchmarks/offload.md`. A random Llama of "
        f"{facts['num_parameters'] / 1e6:.1f}M parameters, fp32, zero3, recompute, {facts['samples']} samples a step "
        f"in micro-batches of 2; rounds in turns: {facts['rounds']}, medians. Load of the machine at the start: "
        f"{facts['load']:.1f} on {facts['cores']} cores. Own memory: anonymous and shared pages of the largest process "
        "at its most; all memory: its mapped files too, which is what the plan says.",
        "",
        "| tier | s a step | tokens/s | own memory, MiB | all memory, MiB | the plan's, MiB | in files, MiB | losses |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for tier, found in by_tier.items():
        if found:
            out.append(_line(tier, found, by_tier))
    return "\n".join([*out, "", facts["peers"], ""])


def _line(tier: str, found: list[dict[str, Any]], by_tier: dict[str, list[dict[str, Any]]]) -> str:
    def median(name: str) -> float:
        return statistics.median(row[name] for row in found)

    cells = [tier, f"{median('step_s'):.2f}", f"{median('tokens') / median('step_s'):.0f}"]
    cells.append(f"{median('own_bytes') / MIB:,.0f}")
    if tier in PEERS:
        return "| " + " | ".join([*cells, "", "", "", ""]) + " |"
    planned, measured = median("planned_bytes"), median("measured_bytes")
    cells += [f"{measured / MIB:,.0f}", f"{planned / MIB:,.0f} ({planned / measured - 1:+.0%})"]
    cells.append(f"{median('disk_bytes') / MIB:,.0f}")
    plain = by_tier["memory" if TIERS[tier][0] == 1 else "memory, 2 processes"][0]["losses"]
    gap = max(abs(one / other - 1) for row in found for one, other in zip(row["losses"], plain, strict=True))
    cells.append("the same bits" if gap == 0 else f"within {gap:.1e}")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--peers", action="store_true")
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
            "peers": "DeepSpeed's ZeRO-Infinity was not run beside it (`--peers`).",
        }
        rows: list[dict[str, Any]] = []
        folder = asked.folder or place / "files"
        for number in range(asked.rounds):
            for tier in TIERS:
                rows.append(row := run(place, tier, folder))
                print(json.dumps(row), flush=True)
            facts["samples"] = rows[0]["samples"]
            length = round(rows[0]["tokens"] / rows[0]["samples"])
            for name in PEERS if asked.peers else ():
                if not number:
                    run_peer(place, name, folder, 2, length)  # compiles its operators
                rows.append(row := run_peer(place, name, folder, asked.steps, length))
                print(json.dumps(row), flush=True)
                facts["peers"] = (
                    f"DeepSpeed {row['version']}: stage 3, its compiled Adam and async I/O, {row['tokens']} tokens a "
                    f"step in rows of {length}, the mean length of the others' rows."
                )
    asked.out.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    if asked.page:
        asked.page.write_text(page(rows, facts), encoding="utf-8")


if __name__ == "__main__":
    main()
