"""From nothing to a model that answers, the example in one YAML: each stage is better at it than the one before."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(2400)]

EXAMPLES = Path(__file__).parents[2] / "examples"


def steps_of(run):
    lines = (run / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["type"] == "step"]


def test_base_mid_sft_and_rl_each_improve_what_the_next_one_begins_with(tmp_path):
    for name in ("little.yaml", "little_rewards.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "duoka", "run", "little.yaml"],
        cwd=tmp_path, text=True, capture_output=True, timeout=2300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    out = tmp_path / "runs" / "little"
    stages = json.loads((out / "pipeline.json").read_text(encoding="utf-8"))["stages"]
    folders = {name: out / stages[name]["folder"] for name in stages}
    for name in ("base", "mid", "sft"):
        losses = [step["loss"] for step in steps_of(folders[name])]
        assert sum(losses[-10:]) < sum(losses[:10]), (name, losses)
    rewards = [step["reward"] for step in steps_of(folders["rl"])]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.5, rewards
    scores = json.loads((folders["score"] / "result.json").read_text(encoding="utf-8"))
    found = {name: scores[name]["spelling"]["score"] for name in ("mid", "sft", "rl")}
    assert found["rl"] > found["sft"] >= found["mid"], found
