"""Promise 1: the same config gives the same losses, norms, rates and weights, however the work is split."""

import json

import pytest
from oracle import train as oracle_train
from safetensors.torch import load_file
from tiny import write_conversations
from worlds import train_all

TOLERANCE = 1e-5
RECIPE = {"lr": 5e-3, "warmup": 0.2, "clip": 0.5, "weight_decay": 0.1}
NUM_SAMPLES, GLOBAL_BATCH = 34, 8  # the last batch of an epoch is short

YAML = """
model: {model}
data: {{train: [{data}], max_length: 512}}
optim: {{lr: 5e-3, warmup: 0.2, clip: 0.5, weight_decay: 0.1}}
train: {{epochs: 2, global_batch: 8, precision: fp32, seed: 7}}
checkpoint: {{every: 100}}
parallel: {{check_replicas: 2}}
log: {{to: []}}
output: {output}
"""

# Two packed samples need not fit a micro-batch of 200 tokens: accumulation differs from step to step.
SPLITS = {
    "1 process": (1, ["train.micro_batch=100000 tokens"]),
    "1 process, accumulating": (1, ["train.micro_batch=200 tokens"]),
    "1 process, one sample at a time": (1, ["train.micro_batch=1"]),
    "1 process, padded": (1, ["data.packing=false", "train.micro_batch=3"]),
    "1 process, recomputing": (1, ["train.recompute=full"]),
    "2 processes": (2, ["train.micro_batch=100000 tokens"]),
    "2 processes, accumulating": (2, ["train.micro_batch=200 tokens"]),
    "2 processes, padded": (2, ["data.packing=false", "train.micro_batch=2"]),
    "3 processes": (3, ["train.micro_batch=200 tokens"]),
}


def read_run(folder):
    lines = [json.loads(line) for line in (folder / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["type"] == "step"]


def relative(ours, theirs):
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture(scope="module")
def case(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("split")
    data = write_conversations(folder / "chats.jsonl", NUM_SAMPLES, seed=3)
    yaml = folder / "run.yaml"
    yaml.write_text(YAML.format(model=tiny_model, data=data, output=folder / "out"), encoding="utf-8")
    return folder, yaml, data


@pytest.fixture(scope="module")
def runs(case):
    folder, yaml, _ = case
    for size in sorted({size for size, _ in SPLITS.values()}):
        jobs = [
            (str(yaml), overrides, str(folder / name)) for name, (world, overrides) in SPLITS.items() if world == size
        ]
        train_all(jobs, size)
    return {name: folder / name for name in SPLITS}


@pytest.fixture(scope="module")
def batches(case, tiny_model):
    """The order of samples, which the oracle takes as given."""
    from duoka.config.load import load_config
    from duoka.data.epoch_plan import EpochPlan
    from duoka.data.prepare import prepare_data
    from duoka.units import parse_amount

    yaml = case[1]
    config = load_config(yaml).config
    store = prepare_data(config, yaml.parent, tiny_model).train
    plan = EpochPlan(
        store.lengths, store.num_targets, fingerprint=store.fingerprint, seed=7, global_batch=parse_amount(GLOBAL_BATCH)
    )
    return [plan.batch(epoch, i).tolist() for epoch in (0, 1) for i in range(plan.num_batches(epoch))]


@pytest.fixture(scope="module")
def oracle(case, tiny_model, batches):
    return oracle_train(case[2], tiny_model, batches, **RECIPE)


def test_lengths_differ_widely_and_the_last_batch_is_short(runs):
    steps = read_run(runs["1 process"])
    assert len(steps) == 10
    assert steps[4]["num_samples"] == NUM_SAMPLES % GLOBAL_BATCH
    targets = [step["num_targets"] for step in steps]
    assert max(targets) > 1.5 * min(targets)


@pytest.mark.parametrize("name", SPLITS)
def test_every_split_equals_the_oracle(runs, oracle, name):
    losses, norms, rates, weights = oracle
    steps = read_run(runs[name])
    assert max(norms) > RECIPE["clip"], "clipping must have been active"
    for key, want in (("loss", losses), ("grad_norm", norms), ("lr", rates)):
        error = relative([step[key] for step in steps], want)
        assert error < TOLERANCE, f"{key} of {name} is off by {error}"
    ours = load_file(runs[name] / "final" / "model.safetensors")
    for key, theirs in weights.items():
        if key in ours:
            error = float((ours[key] - theirs).norm() / theirs.norm())
            assert error < TOLERANCE, f"{key} of {name} is off by {error}"


def test_the_tolerance_would_catch_a_mean_of_means(case, tiny_model, batches, oracle):
    """The check has teeth: averaging two halves' means, as many loops do, is off by far more than the tolerance."""
    wrong = oracle_train(case[2], tiny_model, batches, **RECIPE, mean_of_halves=True)
    assert relative(wrong[0], oracle[0]) > 100 * TOLERANCE
    error = max(float((wrong[3][key] - theirs).norm() / theirs.norm()) for key, theirs in oracle[3].items())
    assert error > 100 * TOLERANCE
