"""What a crash costs: a run whose ranks are killed now and then, with restarts, beside the same run undisturbed.

    python benchmarks/goodput.py --out benchmarks/goodput.json [--kills 2] [--model demo] [--steps 60]

Goodput is the share of the time in which a run learns steps that count. From the two runs' times follows what one kill
costs (noticing, waiting, starting anew, learning again what was not saved), and from that the goodput of a long run
that is killed every two minutes. One machine, one run each; nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from duoka.cluster.blows import strike, wait_for_ranks
from duoka.runs.events import global_log, read_events, read_steps
from duoka.runs.folder import RunFolder

YAML = """
model: {model}
data: {{train: [identity], max_length: 512}}
lora: {{rank: 8, alpha: 16, dropout: 0}}
train: {{epochs: 50, max_steps: {steps}, global_batch: 8, precision: fp32}}
checkpoint: {{every: {every}}}
output: {output}
"""


def train(yaml: Path, output: Path, restarts: int) -> tuple[subprocess.Popen[bytes], float]:
    words = [sys.executable, "-m", "duoka", "train", str(yaml), f"output={output}", "--nproc", "2"]
    log = (output.parent / f"{output.name}.log").open("ab")
    process = subprocess.Popen([*words, "--restarts", str(restarts)], stdout=log, stderr=log)
    return process, time.time()


def finish(process: subprocess.Popen[bytes], started: float) -> float:
    if process.wait(900) != 0:
        raise SystemExit(f"the run failed with exit code {process.returncode}")
    return time.time() - started


def kill_evenly(run: RunFolder, kills: int, steps: int) -> None:
    """One rank at a time, after equal parts of the steps."""
    old: list[int] = []
    for number in range(1, kills + 1):
        # Between two saves on average: half of what lies between them is lost.
        at = steps * number // (kills + 1)
        ranks = wait_for_ranks(run, 2, lambda beat, at=at: beat.step >= at, strangers=old, within_s=900)
        old = [beat.pid for beat in ranks.values()]
        strike([ranks[number % 2]], "SIGKILL")


def measure(folder: Path, model: str, steps: int, every: str, kills: int) -> dict[str, Any]:
    yaml = folder / "run.yaml"
    yaml.write_text(YAML.format(model=model, steps=steps, every=every, output=folder / "out"), encoding="utf-8")
    whole_s = finish(*train(yaml, folder / "whole", 0))
    run = RunFolder(folder / "killed")
    process, started = train(yaml, run.path, kills)
    killer = threading.Thread(target=kill_evenly, args=(run, kills, steps), daemon=True)
    killer.start()
    killed_s = finish(process, started)
    cost_s = (killed_s - whole_s) / kills
    done = sum(event["type"] == "step" for event in read_events(global_log(run)))
    learnt_s = sum(event["step_s"] for event in read_steps(RunFolder(folder / "whole")))
    return {
        "undisturbed_s": round(whole_s, 1),
        "killed_s": round(killed_s, 1),
        "kills": kills,
        "steps": steps,
        "steps_learnt_again": done - steps,
        "step_s": round(learnt_s / steps, 3),
        "saved_every": every,
        "cost_of_a_kill_s": round(cost_s, 1),
        "goodput_when_killed_every_2_min": round(1 - cost_s / 120, 3),
        "goodput_when_killed_every_10_min": round(1 - cost_s / 600, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", default="5", help="checkpoint.every")
    parser.add_argument("--kills", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.model, options.steps, options.every, options.kills)
    machine = {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version(), "model": options.model}
    result = {"machine": machine, **found}
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
