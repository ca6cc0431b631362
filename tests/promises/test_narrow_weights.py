"""`train.weights: bf16`: promises where weights, gradients and moments are bf16, and steps are rounded at random."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file
from tiny import write_conversations
from worlds import train_all

pytestmark = pytest.mark.timeout(900)

SAVED = "checkpoints/step-00000012"
NARROW, WIDE = "train.weights=bf16", "train.precision=bf16"
CUT = "train.micro_batch=300 tokens"
YAML = """
model: {model}
data: {{train: [{data}], max_length: 256}}
optim: {{lr: 1e-3, warmup: 0.1}}
train: {{epochs: 9, max_steps: 24, global_batch: 8, seed: 7}}
parallel: {{check_replicas: 5}}
log: {{to: []}}
checkpoint: {{every: 12, keep: 9}}
output: {output}
"""
# name -> (processes, settings)
SPLITS = {
    "one at a time": (1, [CUT]),
    "recomputing": (1, ["train.recompute=full"]),
    "ddp": (2, ["parallel.strategy=ddp"]),
    "zero1": (2, ["parallel.strategy=zero1", CUT]),
    "zero2": (2, ["parallel.strategy=zero2", CUT]),
    "fsdp": (2, ["parallel.strategy=fsdp", CUT]),
    "pipeline": (2, ["parallel.pipeline=2", CUT]),
    "sequence": (2, ["parallel.sequence=2"]),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("narrow")
    data = write_conversations(folder / "chats.jsonl", 60, seed=3)
    yaml = folder / "run.yaml"
    yaml.write_text(YAML.format(model=tiny_model, data=data, output=folder / "out"), encoding="utf-8")

    def job(name, *settings):
        return str(yaml), list(settings), str(folder / name)

    alone = [job(name, NARROW, *settings) for name, (size, settings) in SPLITS.items() if size == 1]
    train_all([job("whole", NARROW), job("wide", WIDE), *alone], 1)
    train_all([job(name, NARROW, *settings) for name, (size, settings) in SPLITS.items() if size == 2], 2)
    for name in ("whole", "fsdp"):
        shutil.copytree(folder / name / SAVED, folder / f"{name} resumed" / SAVED)
    shutil.copytree(folder / "fsdp" / SAVED, folder / "fsdp, then one" / SAVED)
    train_all([job("whole resumed", NARROW), job("fsdp, then one", NARROW, CUT)], 1)
    train_all([job("fsdp resumed", NARROW, *SPLITS["fsdp"][1])], 2)
    return folder


def steps_of(run):
    lines = [json.loads(line) for line in (run / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["type"] == "step"]


def losses_of(run):
    return [step["loss"] for step in steps_of(run)]


def weights_of(run):
    return load_file(run / "final" / "model.safetensors")


def test_weights_state_and_checkpoints_are_narrow(runs):
    stored = {}
    for file in (runs / "fsdp" / SAVED).glob("*.safetensors"):
        stored |= {name: tensor.dtype for name, tensor in load_file(file).items() if tensor.ndim}
    kinds = {dtype for name, dtype in stored.items() if name.startswith(("model.", "optimizer.exp_avg"))}
    assert len(stored) > 30 and kinds == {torch.bfloat16}, stored


def test_it_learns_as_with_masters(runs):
    """Measured: see docs/decisions.md."""
    narrow, wide = losses_of(runs / "whole"), losses_of(runs / "wide")
    assert wide[-1] < 0.8 * wide[0]
    assert abs(narrow[-1] - wide[-1]) / wide[-1] < 0.02
    assert max(abs(a - b) / b for a, b in zip(narrow, wide, strict=True)) < 0.04


@pytest.mark.parametrize("name", SPLITS)
def test_any_split_agrees_as_far_as_bf16_goes(runs, name):
    ours, theirs = steps_of(runs / name), steps_of(runs / "whole")
    assert math.isclose(ours[0]["loss"], theirs[0]["loss"], rel_tol=1e-3)
    assert math.isclose(ours[0]["grad_norm"], theirs[0]["grad_norm"], rel_tol=2e-2)
    assert max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(ours, theirs, strict=True)) < 0.02


@pytest.mark.parametrize("name", ("whole", "fsdp"))
def test_it_goes_on_bit_for_bit(runs, name):
    whole, resumed = weights_of(runs / name), weights_of(runs / f"{name} resumed")
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)
    assert [step["step"] for step in steps_of(runs / f"{name} resumed")] == list(range(13, 25))


def test_it_goes_on_at_another_layout(runs):
    """Each number is rounded by its place in the whole tensor, so one process takes the chances of two."""
    ours, theirs = losses_of(runs / "fsdp, then one"), losses_of(runs / "fsdp")[12:]
    assert max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True)) < 0.02
