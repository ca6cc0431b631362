"""Stage rl with a distance from its start puts those weights in place between steps; saves that go on are whole."""

import json
import time
import zlib
from pathlib import Path

import pytest
from tiny import write_tiny_model
from worlds import run_world, train_jobs

pytestmark = pytest.mark.timeout(300)

YAML = """
model: {model}
stage: rl
data: {{train: [task:sort], max_length: 96}}
rl: {{samples: 2, max_new_tokens: 4, kl: 0.5, rewards: ["{rewards}:letters"]}}
optim: {{lr: 5e-3}}
train: {{max_steps: 4, global_batch: 2, precision: fp32, seed: 7}}
checkpoint: {{every: 1, keep: 9}}
log: {{to: []}}
output: {output}
"""
REWARDS = "def letters(messages, completion, example):\n    return sum(one.isascii() for one in completion) / 10\n"


class Slowly:
    """zlib for the writer of tensors, who is still at the file's first parts when the next answers are drawn."""

    def __init__(self):
        self.number = 0

    def crc32(self, part, before):
        self.number += 1
        time.sleep(0.02)
        return zlib.crc32(part, before)


def train_with_slow_saves(jobs, folder):
    from duoka.store import snapshot

    snapshot.CHUNK_BYTES, snapshot.zlib = 1 << 14, Slowly()
    train_jobs(jobs)
    Path(folder, "parts.json").write_text(json.dumps(snapshot.zlib.number))


def files_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.glob("checkpoints/step-*/tensors-*")}


def test_saves_between_steps_are_whole_while_the_start_s_weights_stand_in(tmp_path):
    model = write_tiny_model(tmp_path / "model", layers=2)
    (tmp_path / "rewards.py").write_text(REWARDS, encoding="utf-8")
    yaml = tmp_path / "run.yaml"
    yaml.write_text(YAML.format(model=model, rewards=tmp_path / "rewards.py", output=tmp_path / "out"))
    jobs = [(str(yaml), [f"checkpoint.async={value}"], str(tmp_path / value)) for value in ("false", "true")]
    run_world(1, train_with_slow_saves, jobs, str(tmp_path))
    assert json.loads((tmp_path / "parts.json").read_text()) > 40, "a save takes as long as a step"
    waits, beside = files_of(tmp_path / "false"), files_of(tmp_path / "true")
    assert len(waits) == 4 and waits == beside
