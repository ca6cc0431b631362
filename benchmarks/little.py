"""What `make little` takes, and what its rewards teach: each stage of examples/little.yaml, then stage rl many times.

    python benchmarks/little.py --out benchmarks/little.json --table benchmarks/little.md [--seeds 1 2 3]
        [--work FOLDER]

First the pipeline as it stands, stage by stage, each timed from outside (CPU-seconds of all its processes). Then its
stage rl from the same SFT model, with other seeds: with its own rewards, and as controls with rewards that are given to
other prompts' answers, with one that is always the same, and with negated ones. What an answer really earned is worked
out again from the recorded answers. Under the constant reward nothing is learned: that run is the SFT model, asked the
same questions, and a rise is the difference to it over the last steps. Runs that FOLDER holds are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from little_rewards import right
from watching import fill_page, package_versions, stamp

from duoka.tasks.find import find_tasks

HERE = Path(__file__).parent
EXAMPLE = HERE.parent / "examples" / "little.yaml"
REWARDS = HERE / "little_rewards.py"
ARMS = ("rewards", "constant", "permuted", "negated")
LAST = 10  # steps that a rise is the mean over
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/little-benchmark"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--page-only", action="store_true", help="Make the page of what --out holds.")
    asked = parser.parse_args()
    found = json.loads(asked.out.read_text(encoding="utf-8")) if asked.out.is_file() else {"stages": [], "arms": []}
    if not asked.page_only:
        root = asked.work.resolve()
        measure_stages(root, found)
        stages = json.loads((root / "pipeline.json").read_text(encoding="utf-8"))["stages"]
        found["card"] = (root / "card.md").read_text(encoding="utf-8")
        yaml = root / "stages" / f"{stages['rl']['folder']}.yaml"
        found["arms"] = [measure_arm(yaml, root / "arms", seed, arm) for seed in asked.seeds for arm in ARMS]
        found |= stamp() | {"cores": os.cpu_count(), "versions": package_versions(sys.executable, ("torch", "duoka"))}
        asked.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    fill_page(asked.table, page_text(found), "little")


def timed(*words: str) -> Row:
    """A command of duoka: what it took, with all processes that it waited for."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run([sys.executable, "-m", "duoka", *words], check=False, text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(f"duoka {' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_s": round(cpu, 1), "wall_s": round(time.monotonic() - started, 1)}


def measure_stages(root: Path, found: Row) -> None:
    """Each stage once; a stage that is there already keeps its row."""
    known = {row["stage"]: row for row in found["stages"]}
    for stage in ("tok", "base", "mid", "sft", "rl", "score", "ask"):
        manifest = root / "pipeline.json"
        stages = json.loads(manifest.read_text(encoding="utf-8"))["stages"] if manifest.is_file() else {}
        is_done = stages.get(stage, {}).get("state") == "done"
        taken = timed("run", str(EXAMPLE), f"output={root}", f"--until={stage}")
        if not is_done or stage not in known:
            known[stage] = {"stage": stage, **taken}
        found["stages"] = list(known.values())


def measure_arm(yaml: Path, place: Path, seed: int, arm: str) -> Row:
    folder = place / f"{arm}-{seed}"
    if not (folder / "final").is_dir():
        rewards = [] if arm == "rewards" else [f"rl.rewards=[{REWARDS}:{arm}]"]
        timed("train", str(yaml), f"output={folder}", f"train.seed={seed}", *rewards)
    earned = [mean_earned(file) for file in sorted((folder / "rollouts").glob("step-*.jsonl"))]
    return {"seed": seed, "arm": arm, "earned": earned}


def mean_earned(file: Path) -> float:
    """What a step's answers earn by their task, whatever they were given."""
    answers = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()][1:]
    total = sum(right(one["question"], wanted(one["question"]), one["text"]) for one in answers)
    return round(total / len(answers), 6)


def wanted(question: str, known: dict[str, dict[str, str]] = {}) -> str:  # noqa: B006  (read once a task)
    name, _, item = question.partition("/")
    if name not in known:
        (task,) = find_tasks(name)
        known[name] = {one.id: one.answer for one in task.items("train")}
    return known[name][item]


def rises(found: Row) -> list[Row]:
    """By seed: the mean of the last steps under each arm, less that of the SFT model on the same questions."""
    out = []
    for seed in sorted({row["seed"] for row in found["arms"]}):
        ends = {row["arm"]: sum(row["earned"][-LAST:]) / LAST for row in found["arms"] if row["seed"] == seed}
        before = ends["constant"]
        out.append({"seed": seed, "sft": before, **{arm: ends[arm] - before for arm in ARMS if arm != "constant"}})
    return out


def page_text(found: Row) -> str:
    total = {key: sum(row[key] for row in found["stages"]) for key in ("cpu_s", "wall_s")}
    lines = ["| stage | CPU-seconds | seconds, on a machine with other work |", "|---|---|---|"]
    lines += [f"| {row['stage']} | {row['cpu_s']:.0f} | {row['wall_s']:.0f} |" for row in found["stages"]]
    minutes = total["cpu_s"] / 60
    lines += [f"| all | {total['cpu_s']:.0f} | {total['wall_s']:.0f} |", ""]
    lines += [f"{minutes:.1f} CPU-minutes in all: two idle cores that are half used need as many minutes.", ""]
    lines += ["The report card:", "", found["card"].strip(), ""]
    steps = len(found["arms"][0]["earned"])
    lines += [f"Mean reward of the last {LAST} of {steps} steps, and how far it is above the SFT model's:", ""]
    lines += ["| seed | SFT model | its rewards | permuted | constant | negated |", "|---|---|---|---|---|---|"]
    for row in rises(found):
        others = [f"{row[arm]:+.3f}" for arm in ("rewards", "permuted")]
        lines.append(f"| {row['seed']} | {row['sft']:.3f} | {' | '.join(others)} | +0.000 | {row['negated']:+.3f} |")
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    lines += ["", f"{found['cores']} cores, {versions}; measured {found['measured']} (UTC), code {found['code']}."]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
