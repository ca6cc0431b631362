"""A bad step of stages that learn from answers: short memory changes no number, nor does going back from a NaN."""

import json

import pytest
import torch
from oracle_rollouts import write_steps
from tiny import write_labeled, write_pairs, write_tiny_model
from worlds import train_all

from duoka.data.feed.loader import IGNORED, Batch
from duoka.parallel.engine import EngineSpec
from duoka.parallel.out_of_memory import smallest_batch
from duoka.parallel.single import Single
from duoka.plan.layout import Layout

pytestmark = pytest.mark.timeout(300)

YAML = """
model: {model}
stage: {stage}
data: {{train: [{data}], max_length: 128}}
optim: {{lr: 2e-3, eps: 1.0e-4}}
train: {{max_steps: {steps}, global_batch: 4, precision: fp32, seed: 7}}
checkpoint: {{every: 4}}
parallel: {{strategy: ddp, check_replicas: 1}}
faults: {{nonfinite: rollback}}
log: {{to: []}}
output: {folder}/out
"""
RL = "rl: {{algorithm: grpo, samples: 4, max_new_tokens: 12, updates: 2, replay: {folder}/recorded}}\n"
SHORT, BACK = "oom step=2 rank=1", "nan step=7 rank=0"
STAGES = ("dpo", "kto", "reward", "rl")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Of each stage a run in which nothing happens, and one in which memory is short on one of two ranks."""
    folder = tmp_path_factory.mktemp("bad-steps")
    model = write_tiny_model(folder / "model", tied=False)
    data = {"kto": write_labeled(folder / "labeled.jsonl", 11, seed=3), "rl": "task:sort"}
    pairs, jobs = write_pairs(folder / "pairs.jsonl", 11, seed=3), []
    write_steps(folder / "recorded", 4, seed=5)
    for stage in STAGES:
        yaml, steps = folder / f"{stage}.yaml", 8 if stage == "rl" else 3
        text = YAML.format(model=model, stage=stage, data=data.get(stage, pairs), steps=steps, folder=folder)
        yaml.write_text(text + (RL.format(folder=folder) if stage == "rl" else ""), encoding="utf-8")
        for name, faults in (("whole", ""), ("short", SHORT), ("back", BACK)):
            if name != "back" or stage == "rl":
                jobs.append((str(yaml), [], str(folder / stage / name), {"DUOKA_INJECT": faults}))
    train_all(jobs, 2)
    return folder


def steps_of(run):
    lines = [json.loads(line) for line in (run / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["type"] == "step"]


def assert_same(ours, theirs):
    assert [one["step"] for one in ours] == [one["step"] for one in theirs]
    for mine, want in zip(ours, theirs, strict=True):
        for key in ("loss", "grad_norm"):
            assert mine[key] == pytest.approx(want[key], rel=1e-5, abs=1e-7), f"{key} of step {mine['step']}"


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_is_done_again_with_less_at_once_is_the_same(runs, stage):
    log = (runs / stage / "short" / "events" / "run.jsonl").read_text(encoding="utf-8")
    assert "memory was short for" in log
    assert_same(steps_of(runs / stage / "short"), steps_of(runs / stage / "whole"))


def test_updates_after_going_back_take_the_log_probabilities_of_their_own_answers(runs):
    """Step 7 is not finite, the checkpoint is of step 4: other answers are learned in between, by other ranks."""
    back, whole = (steps_of(runs / "rl" / name) for name in ("back", "whole"))
    assert [one["step"] for one in back] == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8]
    assert_same(back[:6] + back[8:], whole)
    assert_same(back[4:6], back[6:8])


def test_the_pass_that_stands_in_knows_nothing_of_the_documents_that_did_not_fit():
    ids = torch.arange(6)[None]
    micro = Batch(
        input_ids=ids, labels=ids.clone(), position_ids=ids, boundaries=torch.tensor([0, 3, 6], dtype=torch.int32),
        attention_mask=None, num_targets=6, num_tokens=6, num_samples=1, target_places=torch.arange(6),
        sides=torch.tensor([0, 1]), reference=torch.zeros(2), margins=torch.zeros(1),
    )  # fmt: skip
    one = smallest_batch(micro)
    assert one.input_ids.shape == one.labels.shape == (1, 1) and one.labels.item() == IGNORED
    assert one.boundaries.tolist() == [0, 1] and one.num_tokens == 0
    assert one.sides is one.reference is one.margins is one.mismatched is one.target_places is None


def test_fp16_has_its_loss_scale_before_the_first_pass_that_may_be_short_of_memory():
    engine = Single(EngineSpec(torch.nn.Linear(2, 2), Layout(precision="fp16")))
    scale = engine.numerics.scaler.get_scale()
    engine.discard_exchange(optimizer_of(engine), is_short=True, overflowed=False)
    assert engine.numerics.scaler.get_scale() == scale > 1


def test_a_step_left_out_for_another_rank_s_overflow_halves_the_scale_here_too():
    engine = Single(EngineSpec(torch.nn.Linear(2, 2), Layout(precision="fp16")))
    optimizer, scaler = optimizer_of(engine), engine.numerics.scaler
    scale = scaler.get_scale()
    engine.backward(scaler.scale(engine.bare(torch.ones(1, 2)).sum()))
    engine.clip(optimizer, 0.0)  # finite, here
    engine.discard_exchange(optimizer, is_short=False, overflowed=True)
    assert scaler.get_scale() == scale / 2


def optimizer_of(engine):
    return torch.optim.SGD(engine.bare.parameters(), lr=1.0)
