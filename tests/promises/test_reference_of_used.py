"""A run computes the reference of the samples that it comes to, and one that comes to more computes the rest."""

from functools import partial

import numpy as np
import pytest
from test_any_split import read_run
from tiny import write_pairs, write_tiny_model
from worlds import fresh_cache, train_all

pytestmark = pytest.mark.timeout(300)
YAML = """
model: {model}
stage: dpo
data: {{train: [{data}], max_length: 128}}
lora: {{rank: 4}}
optim: {{lr: 5e-3, warmup: 0, schedule: constant}}
train: {{epochs: 2, global_batch: 4, micro_batch: "300 tokens", precision: fp32, seed: 11}}
checkpoint: {{every: 1}}
log: {{to: []}}
output: {output}
"""


def test_a_longer_run_completes_what_a_shorter_one_left_out(tmp_path):
    model = write_tiny_model(tmp_path / "model", layers=2)
    data = write_pairs(tmp_path / "pairs.jsonl", 40, seed=4)
    yaml = tmp_path / "run.yaml"
    yaml.write_text(YAML.format(model=model, data=data, output=tmp_path / "out"), encoding="utf-8")
    cache, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    grown = str(tmp_path / "grown"), fresh_cache(cache)
    whole = str(tmp_path / "whole"), fresh_cache(elsewhere)
    other = str(tmp_path / "other"), grown[1]
    jobs = [(["train.max_steps=1"], grown, 4), (["train.max_steps=3"], grown, 12), (["train.max_steps=11"], other, 40)]
    todo = [one for steps, how, count in jobs for one in ((str(yaml), steps, *how), partial(check_known, cache, count))]
    train_all([*todo, (str(yaml), ["train.max_steps=3"], *whole), partial(check_known, elsewhere, 12)], 1)
    ours, want = read_run(tmp_path / "grown"), read_run(tmp_path / "whole")
    assert [step["loss"] for step in ours] == pytest.approx([step["loss"] for step in want], rel=1e-6) and len(
        ours
    ) == 3


def check_known(cache, count):
    (file,) = (cache / "reference").glob("*.npy")
    assert int(np.isfinite(np.load(file)).all(axis=1).sum()) == count
