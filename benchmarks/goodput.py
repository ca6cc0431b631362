"""What crashes cost: a run of two processes of which one is killed every two minutes, and that restarts by itself.

    python benchmarks/goodput.py --out benchmarks/goodput.json --page benchmarks/goodput.md \
        [--kills 4] [--period 120] [--every 10s] [--model demo]

Goodput is the share of the time in which the run gets further: from the first kill to one period after the last, the
steps won (learned again does not count), each at the median time of a step, over the time that passed. Noticing,
waiting, starting anew and learning again are what is missing to 1. One machine, one run; nothing is asserted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from watching import fill_page, stamp

from duoka.cluster.fault_injection import living_ranks, strike
from duoka.runs.events import global_log, read_events
from duoka.runs.folder import RunFolder

YAML = """
model: {model}
data: {{train: [identity], max_length: 512}}
lora: {{rank: 8, alpha: 16, dropout: 0}}
train: {{epochs: 100000, global_batch: 8, precision: fp32}}
checkpoint: {{every: {every}, keep: 2}}
output: {output}
"""
FIRST_S = 15.0  # from the first step to the first kill
STARTS_WITHIN_S = 120.0


def steps_of(run: RunFolder) -> list[dict[str, Any]]:
    """Every step as it happened, those that were learned again too."""
    return [event for event in read_events(global_log(run)) if event["type"] == "step"]


def wait_until(moment: float, process: subprocess.Popen[bytes], log: Path) -> None:
    while time.time() < moment:
        if process.poll() is not None:
            raise SystemExit(f"the run has ended with {process.returncode}:\n{log.read_text()[-2000:]}")
        time.sleep(0.05)


def kill_in_turn(run: RunFolder, process: subprocess.Popen[bytes], log: Path, kills: int, period_s: float) -> float:
    """One rank each time, at a moment of a step that nobody chose; returns when the first one was killed."""
    by = time.time() + STARTS_WITHIN_S
    while not steps_of(run):
        wait_until(time.time() + 0.2, process, log)
        if time.time() > by:
            raise SystemExit(f"no step within {STARTS_WITHIN_S:g} s:\n{log.read_text()[-2000:]}")
    first = time.time() + FIRST_S
    for number in range(kills):
        wait_until(first + number * period_s + random.Random(number).random(), process, log)
        ranks = living_ranks(run)
        if len(ranks) < 2:
            raise SystemExit("the period is too short: the run had not come back")
        strike([ranks[number % 2]], "SIGKILL")
        print(f"kill {number + 1} of {kills} after step {steps_of(run)[-1]['step']}", file=sys.stderr, flush=True)
    wait_until(first + kills * period_s, process, log)
    return first


def measure(folder: Path, model: str, every: str, kills: int, period_s: float) -> dict[str, Any]:
    yaml, run, log = folder / "run.yaml", RunFolder(folder / "killed"), folder / "log"
    yaml.write_text(YAML.format(model=model, every=every, output=run.path), encoding="utf-8")
    words = [sys.executable, "-m", "duoka", "train", str(yaml), "--nproc", "2", "--restarts", str(kills)]
    with log.open("wb") as file:
        process = subprocess.Popen(words, stdout=file, stderr=file)
    try:
        first = kill_in_turn(run, process, log, kills, period_s)
        process.terminate()
        if process.wait(90) != 75:
            raise SystemExit(f"asked to stop, it ended with {process.returncode}:\n{log.read_text()[-2000:]}")
    finally:
        if process.poll() is None:
            process.kill()  # its ranks end with it
            process.wait()
    return summarize(steps_of(run), first, kills, period_s, every)


def summarize(steps: list[dict[str, Any]], first: float, kills: int, period_s: float, every: str) -> dict[str, Any]:
    end = first + kills * period_s
    times = [event["t"] for event in steps]
    # A world's first step is long: what is done once per start is part of what a kill costs.
    gaps = [after - before for before, after in itertools.pairwise(times) if after < end]
    step_s = statistics.median(event["step_s"] for event in steps)
    before = max(event["step"] for event in steps if event["t"] < first)
    won = max(event["step"] for event in steps if event["t"] < end) - before
    silent_s = sorted(gaps, reverse=True)[:kills]
    again = sum(first <= event["t"] < end for event in steps) - won
    goodput = won * step_s / (end - first)
    return {
        "kills": kills, "period_s": period_s, "saved_every": every, "step_s": round(step_s, 3), "steps_won": won,
        "steps_learned_again": again, "from_last_step_to_next_s": [round(one, 1) for one in silent_s],
        "cost_of_a_kill_s": round((1 - goodput) * period_s, 1), "goodput": round(goodput, 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", type=Path, help="a page whose block of figures is made from the same")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--every", default="10s", help="checkpoint.every")
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--period", type=float, default=120.0, help="seconds from one kill to the next")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.model, options.every, options.kills, options.period)
    machine = {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version(), "model": options.model}
    found = {"machine": machine, **found, **stamp()}
    text = json.dumps(found, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    if options.page:
        fill_page(options.page, page_text(found), "figures")


def page_text(found: dict[str, Any]) -> str:
    silent = found["from_last_step_to_next_s"]
    return f"""| {found["kills"]} kills, one every {found["period_s"]:g} s, saved every {found["saved_every"]} | |
|---|---|
| goodput: steps won, each at the median step's time, over the time that passed | {found["goodput"]:.1%} |
| what one kill costs | {found["cost_of_a_kill_s"]} s |
| of which from the last step to the next one | {min(silent)} to {max(silent)} s (a step: {found["step_s"]:.1f} s) |
| steps learned again, over all kills | {found["steps_learned_again"]} |

Measured {found["measured"]} UTC, code {found["code"]}."""


if __name__ == "__main__":
    main()
