"""Promise: optimizer state on a disk changes where it lies, and not one bit of what is learned."""

import errno
import json
import os
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tiny import write_conversations
from worlds import end_processes, run_world, start_processes, train_all

pytestmark = pytest.mark.timeout(400)

YAML = """
model: {model}
data: {{train: [{data}], max_length: 256}}
optim: {{lr: 5e-3, warmup: 0.2, clip: 0.5, weight_decay: 0.1}}
train: {{max_steps: 6, global_batch: 4, precision: fp32, seed: 7, micro_batch: "200 tokens"}}
checkpoint: {{every: 2, keep: 9}}
parallel: {{check_replicas: 3}}
log: {{to: []}}
output: {output}
"""
SLICE_BYTES = 16 * 1024  # so that the tiny model's state is many slices, and parameters lie across their edges
DISK = ["parallel.offload={optimizer: disk}"]
LORA = "lora={rank: 3, dropout: 0}"
# name -> (processes, settings)
LAYOUTS = {
    "single": (1, []),
    "single, bf16": (1, ["train.precision=bf16"]),
    "single, LoRA": (1, [LORA]),
    "ddp": (2, ["parallel.strategy=ddp"]),
    "ddp, bf16": (2, ["parallel.strategy=ddp", "train.precision=bf16"]),
    "zero1": (2, ["parallel.strategy=zero1"]),
    "zero2": (2, ["parallel.strategy=zero2"]),
    "fsdp": (2, ["parallel.strategy=fsdp"]),
    "fsdp, bf16": (2, ["parallel.strategy=fsdp", "train.precision=bf16"]),
    "tp": (2, ["parallel.tensor=2"]),
}


def in_small_slices(jobs):
    """`train_jobs` with slices that fit the tiny model; says on stdout what lay on the disk."""
    import duoka.optim.disk
    from worlds import train_jobs

    duoka.optim.disk.SLICE_BYTES = SLICE_BYTES
    train_jobs(jobs)


def read_steps(folder):
    lines = (folder / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines()
    return [one for one in map(json.loads, lines) if one["type"] == "step"]


def learned(folder):
    """Losses and norms of the run, and its weights."""
    steps = read_steps(folder)
    final = folder / "final"
    weights = final / "adapter_model.safetensors"
    weights = weights if weights.is_file() else final / "model.safetensors"
    return [(step["loss"], step["grad_norm"]) for step in steps], load_file(weights)


def assert_same_bits(one, other):
    (numbers, weights), (others, other_weights) = learned(one), learned(other)
    assert numbers == others
    for name, tensor in weights.items():
        assert tensor.equal(other_weights[name]), name


@pytest.fixture(scope="module")
def case(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("disk")
    data = write_conversations(folder / "chats.jsonl", 24, seed=3)
    yaml = folder / "run.yaml"
    yaml.write_text(YAML.format(model=tiny_model, data=data, output=folder / "out"), encoding="utf-8")
    return folder, str(yaml)


@pytest.fixture(scope="module")
def runs(case):
    """Each layout without the disk and with it, and what goes on from checkpoints of either."""
    folder, yaml = case
    for size in (1, 2):
        jobs = []
        for name, (ranks, settings) in LAYOUTS.items():
            if ranks == size:
                jobs += [(yaml, settings, str(folder / name)), (yaml, settings + DISK, str(folder / f"{name}, disk"))]
        run_world(size, in_small_slices, jobs)
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_bit_is_that_of_the_run_without_a_disk(runs, name):
    assert_same_bits(runs / name, runs / f"{name}, disk")


def test_the_state_lay_on_the_disk_and_nothing_is_left_of_it(runs):
    for name, (ranks, _) in LAYOUTS.items():
        events = (runs / f"{name}, disk" / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines()
        held = next(one["ranks"] for one in map(json.loads, events) if one["type"] == "memory")
        assert len(held) == ranks
        for rank in held:
            assert rank["disk_bytes"] > 0.99 * rank["optimizer_bytes"] > 0 or "zero" in name, name
    assert not [path for path in runs.rglob("*") if "offload" in path.name]


def test_checkpoints_are_those_of_a_run_without_a_disk(runs):
    for name in ("single", "zero1", "fsdp"):
        for step in ("step-00000002", "step-00000006"):
            parts = [runs / one / "checkpoints" / step for one in (name, f"{name}, disk")]
            assert parts[0].is_dir(), sorted(path.name for path in parts[0].parent.iterdir())
            for file in parts[0].glob("tensors-*"):
                assert file.read_bytes() == (parts[1] / file.name).read_bytes(), (name, step, file.name)
