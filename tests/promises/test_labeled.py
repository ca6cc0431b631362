"""Stage kto: the float64 oracle's losses, norms, z0 and weights, however the work is split; what would be wrong."""

import json
from functools import partial

import pytest
from oracle_labeled import train as oracle_train
from safetensors.torch import load_file
from test_any_split import TOLERANCE, read_run, relative, worst
from tiny import write_labeled, write_tiny_model
from worlds import train_all

pytestmark = pytest.mark.timeout(400)

MOST = 56  # some mismatched pairs are longer, and are cut
RECIPE = {"lr": 2e-3, "warmup": 0.2, "clip": 0.5, "weight_decay": 0.1, "most": MOST, "beta": 0.3, "good": 1.2}
NUM_ANSWERS = 11  # of which a batch takes 4: the last of an epoch is short
YAML = """
model: {model}
stage: {{name: kto, beta: 0.3, desirable_weight: 1.2}}
data: {{train: [{data}], max_length: 56}}
optim: {{lr: 2e-3, warmup: 0.2, clip: 0.5, weight_decay: 0.1}}
train: {{epochs: 2, global_batch: 4, precision: fp32, seed: 7}}
checkpoint: {{every: 100}}
log: {{to: []}}
output: {output}
"""
LORA = "lora={rank: 3, dropout: 0}"
WHOLE, CUT, ONE = "train.micro_batch=100000 tokens", "train.micro_batch=120 tokens", "train.micro_batch=1"
PADDED = "data.packing=false"
# name -> (processes, settings)
SPLITS = {
    "auto": (1, []),
    "cut": (1, [CUT]),
    "one at a time, padded": (1, [ONE, PADDED]),
    "whole, padded": (1, [WHOLE, PADDED]),
    "LoRA": (1, [CUT, LORA]),
    "fixed rows": (1, ["data.fixed_rows=true", "train.micro_batch=112 tokens"]),
    "2, ddp": (2, ["parallel.strategy=ddp", ONE]),
    "2, zero1, padded": (2, ["parallel.strategy=zero1", WHOLE, PADDED]),
    "2, zero2, recomputing": (2, ["parallel.strategy=zero2", CUT, "train.recompute=full"]),
    "2, fsdp": (2, ["parallel.strategy=fsdp", "train.micro_batch=2"]),
    "2, fsdp, LoRA": (2, ["parallel.strategy=fsdp", ONE, LORA]),
}
NIGHTLY = {
    "3, ddp": (3, ["parallel.strategy=ddp", WHOLE]),
    "4, ddp, padded": (4, ["parallel.strategy=ddp", ONE, PADDED]),  # one rank has no answer of the short batch
    "4, fsdp, LoRA, padded": (4, ["parallel.strategy=fsdp", "train.micro_batch=2", PADDED, LORA]),
}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("labeled")
    model = write_tiny_model(folder / "model", tied=False, odd=True, layers=2)
    data = write_labeled(folder / "labeled.jsonl", NUM_ANSWERS, seed=3)
    yaml = folder / "run.yaml"
    yaml.write_text(YAML.format(model=model, data=data, output=folder / "out"), encoding="utf-8")
    return folder, yaml, model, data


def run_all(case, splits):
    folder, yaml, _, _ = case
    worlds = {}
    for name, (size, overrides) in splits.items():
        worlds.setdefault(size, []).append((str(yaml), overrides, str(folder / name)))
    for size, jobs in sorted(worlds.items()):
        train_all(jobs, size)


@pytest.fixture(scope="module")
def runs(case):
    run_all(case, SPLITS)


@pytest.fixture(scope="module")
def oracle(case):
    """By (with adapters, wrong ways), each made once."""
    from duoka.config.load import load_config
    from duoka.config.schema import LoraConfig
    from duoka.data.feed.epoch_plan import plan_epochs
    from duoka.data.prepare import prepare_data
    from duoka.model.lora import apply_lora

    _, yaml, model, data = case
    config = load_config(yaml).config
    plan = plan_epochs(prepare_data(config, yaml.parent, model).train, config.train)
    batches = [plan.batch(epoch, i).tolist() for epoch in (0, 1) for i in range(plan.num_batches(epoch))]
    adapt = partial(apply_lora, lora=LoraConfig(rank=3, dropout=0.0), seed=7)
    known = {}

    def ask(lora=False, **wrong):
        name = (lora, *wrong.items())
        if name not in known:
            known[name] = oracle_train(data, model, batches, **RECIPE, adapt=adapt if lora else None, **wrong)
        return known[name]

    return ask


def compare(case, oracle, name, overrides):
    has_lora = LORA in overrides
    losses, norms, baselines, weights = oracle(has_lora)
    steps = read_run(case[0] / name)
    assert len(steps) == 6 and [step["num_samples"] for step in steps[:3]] == [4, 4, 3]
    for key, want in (("loss", losses), ("grad_norm", norms)):
        error = relative([step[key] for step in steps], want)
        assert error < TOLERANCE, f"{key} of {name} is off by {error}"
    off = max(abs(step["kl"] - want) for step, want in zip(steps, baselines, strict=True))
    assert off < 1e-5 * max(1.0, *baselines), f"z0 of {name} is off by {off}"
    assert steps[0]["drift"] < 1e-6 and steps[0]["kl"] < 1e-5 and steps[-1]["drift"] > 1e-3
    file = "adapter_model.safetensors" if has_lora else "model.safetensors"
    weights = {key.replace(".default.", "."): value for key, value in weights.items()}
    error, tensor = worst(load_file(case[0] / name / "final" / file), weights)
    assert error < TOLERANCE, f"{tensor} of {name} is off by {error}"


@pytest.mark.parametrize("name", SPLITS)
def test_every_split_equals_the_oracle(case, runs, oracle, name):
    compare(case, oracle, name, SPLITS[name][1])


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_more_processes_equal_the_oracle(case, oracle):
    run_all(case, NIGHTLY)
    for name, (_, overrides) in NIGHTLY.items():
        compare(case, oracle, name, overrides)


def test_the_tolerance_would_catch_a_baseline_of_parts_and_one_with_a_gradient(oracle):
    losses, norms, baselines, _ = oracle()
    assert max(baselines) > 0.1, "z0 has a part in the loss"
    by_parts, _, _, _ = oracle(group=1)
    assert relative(by_parts, losses) > 100 * TOLERANCE
    _, wrong, _, _ = oracle(through=True)
    assert relative(wrong, norms) > 100 * TOLERANCE


def test_the_first_step_is_half_of_each_weight_and_metrics_are_of_the_whole_batch(case, runs):
    first = read_run(case[0] / "cut")[0]
    records = [json.loads(line) for line in case[3].read_text(encoding="utf-8").splitlines()]
    assert first["num_samples"] == 4 and len(records) == NUM_ANSWERS
    assert abs(first["loss"] - (0.5 + 0.1 * round((first["loss"] - 0.5) / 0.025) / 4)) < 1e-6
    one, two = (read_run(case[0] / name) for name in ("auto", "2, fsdp"))
    for ours, theirs in zip(one, two, strict=True):
        assert ours.keys() == theirs.keys() - {"sent_bytes", "exchanged_s"}
        for key in ("reward_chosen", "reward_rejected", "logp_chosen", "logp_rejected", "kl", "accuracy"):
            assert (key in ours) == (key in theirs)
            assert key not in ours or abs(ours[key] - theirs[key]) < 1e-4 * max(1, abs(theirs[key])), key
