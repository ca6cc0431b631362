"""What a step of GRPO costs, drawing its answers included: duoka beside TRL, on the same prompts with the same reward.

    python benchmarks/rl.py --out benchmarks/rl.json --table benchmarks/rl.md --peers PYTHON

`--peers` is the interpreter of an environment with trl and datasets. The model is drawn from a seed (19M parameters,
the demo's tokenizer), so that answers have the full length in both and figures are of the two programs. Cases run in
turns, one at a time, watched from outside; the first step is start-up and does not count. Then duoka's recorded answers
are learned from once more, a row at a time in place of what it chooses: how far its gradients move by that.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from preferences import write_model
from sft import WORDS
from watching import describe_machine, end_like_an_interrupt, fill_page, package_versions, stamp, watch

PEERS = Path(__file__).with_name("rl_peers.py")
PROMPTS, ANSWERS, ROOM, MAX_LENGTH = 8, 8, 64, 160  # a step's; tokens of an answer, of both
# trl: its defaults, but for what the work is. trl-tuned: all answers drawn at once, no activation computed twice.
TOOLS = ("duoka", "trl", "trl-tuned")
REWARD = '''def vowels(messages, completion, example):
    """The share of letters that are vowels."""
    letters = [one for one in completion.lower() if one.isalpha()]
    return sum(one in "aeiou" for one in letters) / max(1, len(letters))
'''


def write_work(folder: Path) -> tuple[Path, Path]:
    """Prompts of 10 to 40 words, and the reward's file."""
    dice, words = np.random.default_rng(0), WORDS.split()
    data, rewards = folder / "prompts.jsonl", folder / "rewards.py"
    lines = [
        {"prompt": [{"role": "user", "content": " ".join(dice.choice(words, int(dice.integers(10, 40))))}]}
        for _ in range(PROMPTS * 16)
    ]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    rewards.write_text(REWARD, encoding="utf-8")
    return data, rewards


def config_of(folder: Path, model: Path, data: Path, rewards: Path, steps: int, lr: float) -> Path:
    config = {
        "model": str(model), "stage": "rl", "data": {"train": [{"name": str(data)}], "max_length": MAX_LENGTH},
        "rl": {"algorithm": "grpo", "samples": ANSWERS, "max_new_tokens": ROOM, "rewards": [f"{rewards}:vowels"],
               "updates": 1},
        "optim": {"lr": lr, "warmup": 0, "schedule": "constant", "weight_decay": 0},
        "train": {"global_batch": PROMPTS, "precision": "fp32", "seed": 0, "max_steps": steps},
        "checkpoint": {"every": 1000}, "log": {"to": []}, "output": str(folder / "run"),
    }  # fmt: skip
    place = folder / "run.yaml"
    place.write_text(json.dumps(config), encoding="utf-8")
    return place


def measure(tool: str, root: Path, work: tuple[Path, Path, Path], asked: argparse.Namespace) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(dir=root, prefix=f"{tool}-"))
    (folder / "cache").mkdir()
    model, data, rewards = work
    if tool == "duoka":
        yaml = config_of(folder, model, data, rewards, asked.steps, asked.lr)
        command, log = [sys.executable, "-m", "duoka", "train", str(yaml)], folder / "run" / "events" / "run.jsonl"
    else:
        case = {
            "tool": tool, "model": str(model), "data": str(data), "rewards": str(rewards), "steps": asked.steps,
            "prompts": PROMPTS, "answers": ANSWERS, "room": ROOM, "lr": asked.lr, "work": str(folder / "work"),
            "progress": str(folder / "progress"),
        }  # fmt: skip
        (folder / "case.json").write_text(json.dumps(case), encoding="utf-8")
        command, log = [asked.peers, str(PEERS), str(folder / "case.json")], folder / "progress"
    load = os.getloadavg()[0]
    seen = watch(command, [log], folder, asked.steps, asked.limit_s, to_end=True)
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
    steps = [one for one in lines if one.get("type", "step") == "step"]
    rewarded = [round(float(one["reward"]), 4) for one in steps]
    return {"tool": tool, **seen.numbers(), "seconds": step_seconds(seen.steps), "rewards": rewarded,
            "load_at_start": round(load, 1), "folder": str(folder), **stamp()}  # fmt: skip


def step_seconds(steps: list[tuple[float, float, int]]) -> dict[str, float]:
    """Means of the steps behind the first."""
    if len(steps) < 2:
        return {}
    (first_cpu, first_wall, _), (last_cpu, last_wall, _) = steps[0], steps[-1]
    count = len(steps) - 1
    return {"cpu": round((last_cpu - first_cpu) / count, 2), "wall": round((last_wall - first_wall) / count, 2)}


def moved(row: dict[str, Any], work: tuple[Path, Path, Path], asked: argparse.Namespace) -> float:
    """How far gradient norms move when the same answers are laid out one row at a time: the largest of all steps."""
    model, data, rewards = work
    folder = Path(row["folder"])
    again = folder / "again"
    again.mkdir()
    yaml = config_of(again, model, data, rewards, asked.steps, asked.lr)
    words = [f"rl.replay={folder / 'run' / 'rollouts'}", "train.micro_batch=1"]
    subprocess.run([sys.executable, "-m", "duoka", "train", str(yaml), *words], check=True, capture_output=True)
    norms = []
    for place in (folder, again):
        lines = (place / "run" / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines()
        events = [json.loads(line) for line in lines]
        norms.append([one["grad_norm"] for one in events if one["type"] == "step"])
    return max(abs(one / other - 1) for one, other in zip(*norms, strict=True))


def page_text(found: dict[str, Any]) -> str:
    ours = next(row for row in found["results"] if row["tool"] == "duoka")
    head = [
        "tool",
        "seconds a step",
        "CPU-seconds a step",
        "times ours: seconds",
        "CPU-seconds",
        "peak of a process",
    ]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in found["results"]:
        if "error" in row:
            lines.append(f"| {row['tool']} | {row['error']} |" + " |" * (len(head) - 2))
            continue
        one, peak = row["seconds"], f"{row['peak_bytes'] / 2**30:.2f} GiB"
        wall, cpu = (f"{one[kind] / ours['seconds'][kind]:.2f}" for kind in ("wall", "cpu"))
        cells = (row["tool"], f"{one['wall']:.1f}", f"{one['cpu']:.1f}", wall, cpu, peak)
        lines.append(f"| {' | '.join(cells)} |")
    versions, machine = found["versions"], found["machine"]
    same = f"The same answers, learned from a row at a time: gradient norms of duoka move by {found['moved']:.1e}."
    peers = f"TRL {versions['trl']['trl']} with torch {versions['trl']['torch']}"
    where = f"{machine['kind']}, {machine['threads_per_process']} threads; torch {versions['duoka']['torch']}, {peers}"
    return "\n".join([*lines, "", same, "", f"{where}; measured {ours['measured']} (UTC), code {ours['code']}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--peers", required=True, help="interpreter with trl and datasets")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps, the first of which is start-up")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--limit-s", type=float, default=600.0, help="of one case")
    asked = parser.parse_args()
    end_like_an_interrupt()
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        work = (write_model(root / "model"), *write_work(root))
        results = []
        for tool in TOOLS:
            results.append(measure(tool, root, work, asked))
            print(results[-1], flush=True)
        found = {
            "machine": describe_machine(), "moved": moved(results[0], work, asked), "results": results,
            "versions": {"duoka": package_versions(sys.executable, ("torch", "transformers")),
                         "trl": package_versions(asked.peers, ("torch", "transformers", "trl"))},
            "work": {"parameters": "19M", "prompts": PROMPTS, "answers": ANSWERS, "tokens": ROOM},
        }  # fmt: skip
    for row in results:
        row.pop("folder")
    asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    fill_page(asked.table, page_text(found), "rl")


if __name__ == "__main__":
    main()
