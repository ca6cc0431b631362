"""From nothing to a model that answers, the example in one YAML: each stage is better at it than the one before."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(2400)]

EXAMPLES = Path(__file__).parents[2] / "examples"


def events_of(run):
    lines = (run / "events" / "global.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_base_mid_sft_and_rl_each_improve_what_the_next_one_begins_with(tmp_path):
    for name in ("little.yaml", "little_rewards.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "duoka", "run", "little.yaml"],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=2300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    out = tmp_path / "runs" / "little"
    stages = json.loads((out / "pipeline.json").read_text(encoding="utf-8"))["stages"]
    print(json.dumps(stages, indent=1)[:4000])
