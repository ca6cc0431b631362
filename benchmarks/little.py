"""What `make little` takes, and what its rewards teach: each stage of examples/little.yaml, then stage rl many times.

    python benchmarks/little.py --out benchmarks/little.json --table benchmarks/little.md [--seeds 1 2 3]
        [--work FOLDER]

First the pipeline as it stands; pipeline.json says what each stage took (CPU-seconds of all its processes). Then its
stage rl from the same SFT model, with other seeds: with its own rewards, and as controls with rewards that are given to
other prompts' answers, with one that is always the same, and with negated ones. What an answer really earned is worked
out again from the recorded answers. Under the constant reward nothing is learned: that run is the SFT model, asked the
same questions, and a rise is the difference to it over the last steps. Runs that FOLDER holds are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from little_controls import earned
from watching import fill_page, package_versions, stamp

from duoka.tasks.find import find_tasks

HERE = Path(__file__).parent
EXAMPLE = HERE.parent / "examples" / "little.yaml"
REWARDS = HERE / "little_controls.py"
ARMS = ("rewards", "constant", "permuted", "negated")
LAST = 8  # steps that a rise is the mean over
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/little-benchmark"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--page-only", action="store_true", help="Make the page of what --out holds.")
    asked = parser.parse_args()
    if not asked.page_only:
        measure(asked.work.resolve(), asked.seeds, asked.out)
        found = json.loads(asked.out.read_text(encoding="utf-8"))
    else:
        found = json.loads(asked.out.read_text(encoding="utf-8"))
    fill_page(asked.table, page_text(found), "little")


def measure(root: Path, seeds: list[int], out: Path) -> None:
    """Written after each seed, so that what was measured before an interruption is there."""
    run_duoka("run", str(EXAMPLE), f"output={root}", "--until=rl")
    yaml = root / "stages" / f"{read_stages(root)['rl']['folder']}.yaml"
    found: Row = {"arms": []}
    for place, seed in enumerate(seeds):
        with ThreadPoolExecutor(len(ARMS)) as pool:  # their results do not hang on what runs beside them
            found["arms"] += pool.map(lambda arm, seed=seed: measure_arm(yaml, root / "arms", seed, arm), ARMS)
        write(found, root, out)
        if place == 0:
            run_duoka("run", str(EXAMPLE), f"output={root}")
            write(found, root, out)


def write(found: Row, root: Path, out: Path) -> None:
    card = root / "card.md"
    found["card"] = card.read_text(encoding="utf-8") if card.is_file() else ""
    found["stages"] = [
        {"stage": name, "cpu_s": one.get("cpu_seconds"), "wall_s": one["seconds"]}
        for name, one in read_stages(root).items()
        if one["state"] == "done"
    ]
    found |= stamp() | {"cores": os.cpu_count(), "versions": package_versions(sys.executable, ("torch", "duoka"))}
    out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_stages(root: Path) -> Row:
    return json.loads((root / "pipeline.json").read_text(encoding="utf-8"))["stages"]


def run_duoka(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "duoka", *words], check=False, text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(f"duoka {' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}")


def measure_arm(yaml: Path, place: Path, seed: int, arm: str) -> Row:
    folder = place / f"{arm}-{seed}"
    if not (folder / "final").is_dir():
        rewards = [] if arm == "rewards" else [f"rl.rewards=[{REWARDS}:{arm}]"]
        run_duoka("train", str(yaml), f"output={folder}", f"train.seed={seed}", *rewards)
    earned = [mean_earned(file) for file in sorted((folder / "rollouts").glob("step-*.jsonl"))]
    return {"seed": seed, "arm": arm, "earned": earned}


def mean_earned(file: Path) -> float:
    """What a step's answers earn by their task, whatever they were given."""
    answers = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()][1:]
    total = sum(earned([], one["text"], {"answer": wanted(one["question"])}) for one in answers)
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
    total: Row = {"wall_s": sum(row["wall_s"] for row in found["stages"])}
    is_known = all(row["cpu_s"] is not None for row in found["stages"])  # not of stages that an older duoka ran
    total["cpu_s"] = sum(row["cpu_s"] for row in found["stages"]) if is_known else None
    lines = ["| stage | CPU-seconds | seconds, on a machine with other work |", "|---|---|---|"]
    for row in [*found["stages"], {"stage": "all", **total}]:
        cpu = "" if row["cpu_s"] is None else f"{row['cpu_s']:.0f}"
        lines.append(f"| {row['stage']} | {cpu} | {row['wall_s']:.0f} |")
    lines.append("")
    lines += ["The report card:", "", found["card"].strip(), ""] if found["card"] else []
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
