"""`train.weights: bf16` in stages beyond text and conversations: pairs, scores, drawn answers, a head of values."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file
from tiny import write_pairs
from worlds import train_all

pytestmark = pytest.mark.timeout(300)

STEPS, HALF = 4, "checkpoints/step-00000002"
YAML = """
model: {model}
data: {{train: [{data}], max_length: 96}}
stage: {stage}
optim: {{lr: 1e-3}}
train: {{max_steps: 4, global_batch: 4, seed: 7, weights: bf16}}
parallel: {{check_replicas: 1}}
checkpoint: {{every: 2, keep: 9}}
log: {{to: []}}
output: {output}
"""
RL = "rl: {{samples: 2, max_new_tokens: 6, algorithm: {algorithm}, rewards: [{folder}/rewards.py:letters]}}\n"
REWARDS = """
def letters(messages, completion, example):
    return sum(letter.isascii() for letter in completion) / 10
"""
STAGES = ("dpo", "reward", "grpo")
RARE = ("ppo",)  # whose head of values is fp32 beside narrow weights
ALL = [*STAGES, *(pytest.param(name, marks=pytest.mark.nightly) for name in RARE)]
TWO = ["parallel.strategy=ddp", "train.micro_batch=300 tokens"]
SHARDED = ["parallel.strategy=fsdp", "train.micro_batch=300 tokens", "parallel.check_replicas=0"]


@pytest.fixture(scope="module")
def common(tmp_path_factory, tiny_model):
    return train_stages(tmp_path_factory.mktemp("narrow-stages"), STAGES, tiny_model)


@pytest.fixture(scope="module")
def rare(tmp_path_factory, tiny_model):
    return train_stages(tmp_path_factory.mktemp("narrow-rare"), RARE, tiny_model)


@pytest.fixture
def runs(stage, request):
    """The folder with the runs of that stage."""
    return request.getfixturevalue("rare" if stage in RARE else "common")


def train_stages(folder, stages, tiny_model):
    """Each on one process, on two, and from the middle on."""
    pairs = write_pairs(folder / "pairs.jsonl", 24, seed=4)
    (folder / "rewards.py").write_text(REWARDS, encoding="utf-8")
    alone, together, later = [], [], []
    for stage in stages:
        draws = stage in ("grpo", "ppo")
        text = YAML.format(
            model=tiny_model,
            data="task:sort" if draws else pairs,
            stage="rl" if draws else stage,
            output=folder / "out",
        )
        text += RL.format(algorithm=stage, folder=folder) if draws else ""
        yaml = folder / f"{stage}.yaml"
        yaml.write_text(text, encoding="utf-8")
        alone.append((str(yaml), [], str(folder / stage)))
        together.append((str(yaml), TWO, str(folder / f"{stage} two")))
        if stage == "ppo":
            together.append((str(yaml), SHARDED, str(folder / "ppo sharded")))
        # With another layout, which changes no bit: half of the layers are computed again.
        later.append((str(yaml), ["train.recompute=1/2"], str(folder / f"{stage} resumed")))
    train_all(alone, 1)
    train_all(together, 2)
    for stage in stages:
        shutil.copytree(folder / stage / HALF, folder / f"{stage} resumed" / HALF)
        rollouts = folder / stage / "rollouts"
        if rollouts.is_dir():
            shutil.copytree(rollouts, folder / f"{stage} resumed" / "rollouts")
    train_all(later, 1)
    return folder


def steps_of(run):
    lines = [json.loads(line) for line in (run / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["type"] == "step"]


def saved(run, step=STEPS):
    """Weights and state of a checkpoint, by name."""
    tensors = {}
    for file in (run / "checkpoints" / f"step-{step:08d}").glob("tensors-*.safetensors"):
        tensors |= load_file(file)
    return {name: tensor for name, tensor in tensors.items() if tensor.ndim}


@pytest.mark.parametrize("stage", ALL)
def test_it_learns_in_narrow_weights(runs, stage):
    tensors, steps = saved(runs / stage), steps_of(runs / stage)
    of_layers = {name: tensor for name, tensor in tensors.items() if ".layers." in name}
    assert len(of_layers) >= 54 and {tensor.dtype for tensor in of_layers.values()} == {torch.bfloat16}
    before = saved(runs / stage, 2)
    moved = [name for name in of_layers if not torch.equal(before[name], tensors[name])]
    assert len(moved) > 0.8 * len(of_layers)
    assert len(steps) == STEPS and all(math.isfinite(step["loss"]) and step["grad_norm"] > 0 for step in steps)
    if stage == "dpo":
        assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-3), "the reference is the run's own start"


@pytest.mark.parametrize("stage", ALL)
def test_it_goes_on_bit_for_bit(runs, stage):
    whole, resumed = saved(runs / stage), saved(runs / f"{stage} resumed")
    assert [step["step"] for step in steps_of(runs / f"{stage} resumed")] == [3, 4]
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize("stage", ALL)
def test_two_processes_learn_as_one_does_as_far_as_bf16_goes(runs, stage):
    """Replicas are compared after every step (check_replicas)."""
    one, two = steps_of(runs / stage), steps_of(runs / f"{stage} two")
    # Answers that are drawn from other roundings are other answers.
    for mine, theirs in zip(two, one[:1] if stage in ("grpo", "ppo") else one, strict=False):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=0.02, abs=0.02)
    assert len(two) == STEPS


@pytest.mark.nightly
def test_a_head_of_values_is_sharded_beside_narrow_weights(rare):
    """It stays fp32, and FSDP wants one type of what a unit trains."""
    steps, whole = steps_of(rare / "ppo sharded"), steps_of(rare / "ppo")
    assert len(steps) == STEPS and steps[0]["loss"] == pytest.approx(whole[0]["loss"], rel=0.02, abs=0.02)
    # Of one row: the first rank has all of it.
    head = load_file(rare / "ppo sharded" / HALF / "tensors-00000.safetensors")["model.v_head.summary.weight"]
    assert head.dtype == torch.float32 and head.abs().max() > 0
