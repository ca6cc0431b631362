"""The modes that DeepSpeed gave names to: each trains, equals one process within its bound, and leaves a trace that no
other leaves. ZeRO-Offload, a part of it (Twin-Flow), ZeRO-Infinity's two, and the three parts of ZeRO++."""

import json
import os
from pathlib import Path

import pytest
from tiny import write_conversations, write_tiny_model
from worlds import run_world, train_all, train_jobs

pytestmark = pytest.mark.timeout(300)

YAML = """
model: {model}
data: {{train: [{data}], max_length: 256, packing: false}}
optim: {{lr: 2e-3, clip: 1.0}}
train: {{max_steps: 4, global_batch: 8, micro_batch: 1, precision: fp32, seed: 7}}
checkpoint: {{every: 1000}}
parallel: {{check_replicas: 1}}
log: {{to: []}}
output: {output}
"""
# name -> (bound on losses, setting)
MODES = {
    "ZeRO-3": (1e-5, "parallel.strategy=zero3"),
    "Offload": (1e-5, "parallel.offload={optimizer: host}"),
    "Offload, half": (1e-5, "parallel.offload={optimizer: host, share: 0.5}"),
    "Infinity, optimizer": (1e-5, "parallel.offload={optimizer: disk}"),
    "Infinity, parameters": (1e-5, "parallel.offload={params: disk}"),
    "ZeRO++, weights": (2e-2, "parallel.compress={weights: int8}"),
    "ZeRO++, gradients": (2e-2, "parallel.compress={gradients: int8}"),
    "ZeRO++, copies": (1e-5, "parallel.reshard=node"),
}
NUM_RANKS = 4


def train_and_count(jobs):
    """In nodes of two; how many numbers each run's optimizer updated at a distance lies in its folder afterwards."""
    from duoka.optim.host import HostAdamW, local_part

    rank = int(os.environ["RANK"])
    os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank % 2))
    moments, counted = HostAdamW.moments, [0]

    def count(self, part):
        counted[0] += part.of(local_part(part.parameter)).numel()
        return moments(self, part)

    HostAdamW.moments = count
    for job in jobs:
        counted[0] = 0
        train_jobs([job])
        (Path(job[2]) / f"updated-{rank}.json").write_text(str(counted[0]))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modes")
    model = write_tiny_model(folder / "model")
    data = write_conversations(folder / "chats.jsonl", 40, seed=3)
    yaml = folder / "run.yaml"
    yaml.write_text(YAML.format(model=model, data=data, output=folder / "out"))
    train_all([(str(yaml), [], str(folder / "one"))], 1)
    jobs = [(str(yaml), ["parallel.strategy=zero3", how], str(folder / name)) for name, (_, how) in MODES.items()]
    run_world(NUM_RANKS, train_and_count, jobs)
    return folder


def events(run, kind):
    lines = [json.loads(line) for line in (run / "events" / "run.jsonl").read_text().splitlines()]
    return [line for line in lines if line["type"] == kind]


@pytest.mark.parametrize("name", MODES)
def test_each_learns_what_one_process_learns(runs, name):
    ours, theirs = ([step["loss"] for step in events(runs / place, "step")] for place in (name, "one"))
    assert len(ours) == 4 and ours == pytest.approx(theirs, rel=MODES[name][0])


def trace(run):
    """What was exchanged by kind, what lay in files, and what was updated at a distance."""
    kinds = events(run, "traffic")[0]["kinds"]
    sent = sorted((kind, one["num_calls"], one["sent_bytes"]) for kind, one in kinds.items())
    held = events(run, "memory")[0]["ranks"][0]
    updated = sum(int((run / f"updated-{rank}.json").read_text()) for rank in range(NUM_RANKS))
    return str((sent, held["disk_bytes"], updated))


def test_no_two_leave_the_same_trace(runs):
    traces = {name: trace(runs / name) for name in MODES}
    assert len(set(traces.values())) == len(MODES), "\n".join(f"{name}: {one}" for name, one in traces.items())


def test_half_of_the_state_is_updated_at_a_distance(runs):
    whole, half = (
        sum(int((runs / name / f"updated-{rank}.json").read_text()) for rank in range(NUM_RANKS))
        for name in ("Offload", "Offload, half")
    )
    assert whole > 0 and 0.25 < half / whole <= 0.5
