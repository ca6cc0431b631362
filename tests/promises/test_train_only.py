"""Some layers only: they learn what a plain loop with the rest frozen learns, on any split, and nothing else moves."""

import json

import pytest
from oracle import train as oracle_train
from safetensors.torch import load_file
from tiny import write_conversations
from worlds import train_all

from duoka.config.load import load_config
from duoka.data.feed.epoch_plan import EpochPlan
from duoka.data.prepare import prepare_data
from duoka.units import parse_amount

TOLERANCE = 1e-5
# Of a tensor after four steps of AdamW, which makes whole steps of gradients that are little but rounding: 1.1e-5 where
# the CPU multiplies in another order than ours did (AVX-512), and 5.8e-5 of an oracle in float64.
TENSOR_TOLERANCE = 3e-5
YAML = """
model: {model}
data: {{train: [{data}], max_length: 512}}
train_only: {{layers: [1], modules: [mlp], extra: [norm]}}
optim: {{lr: 5e-3, warmup: 0.2, clip: 0.5, weight_decay: 0.1}}
train: {{epochs: 1, global_batch: 8, micro_batch: 2, precision: fp32, seed: 7}}
checkpoint: {{every: 100}}
parallel: {{check_replicas: 2}}
log: {{to: []}}
output: {output}
"""
SPLITS = {"single": 1, "ddp": 2, "zero2": 2, "fsdp": 2}


def freeze_by_hand(model):
    """What is written in the YAML above, by the parameters' names alone."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("model.layers.1.mlp.") or name == "model.norm.weight")
    return model


@pytest.fixture(scope="module")
def case(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("some-layers")
    data = write_conversations(folder / "chats.jsonl", 26, seed=3)
    yaml = folder / "x.yaml"
    yaml.write_text(YAML.format(model=tiny_model, data=data, output=folder / "out"), encoding="utf-8")
    for size in (1, 2):
        jobs = [
            (str(yaml), [f"parallel.strategy={name}"], str(folder / name)) for name, n in SPLITS.items() if n == size
        ]
        train_all(jobs, size)
    store = prepare_data(load_config(yaml).config, folder, tiny_model).train
    plan = EpochPlan(
        store.lengths, store.num_targets, fingerprint=store.fingerprint, seed=7, global_batch=parse_amount(8)
    )
    batches = [plan.batch(0, index).tolist() for index in range(plan.num_batches(0))]
    recipe = {"lr": 5e-3, "warmup": 0.2, "clip": 0.5, "weight_decay": 0.1}
    return folder, oracle_train(data, tiny_model, batches, **recipe, adapt=freeze_by_hand)


@pytest.mark.parametrize("name", SPLITS)
def test_some_layers_learn_as_in_a_plain_loop_and_the_rest_stays_to_the_bit(case, tiny_model, name):
    folder, (losses, norms, _, weights) = case
    lines = (folder / name / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [event for line in lines if (event := json.loads(line))["type"] == "step"]
    for key, want in (("loss", losses), ("grad_norm", norms)):
        error = max(abs(step[key] - value) / value for step, value in zip(steps, want, strict=True))
        assert error < TOLERANCE, f"{key} of {name} is off by {error}"
    before, after = load_file(tiny_model / "model.safetensors"), load_file(folder / name / "final/model.safetensors")
    assert len(weights) == 4 and before.keys() == after.keys()
    for key, value in after.items():
        if key in weights:
            error = float((value - weights[key]).norm() / weights[key].norm())
            assert error < TENSOR_TOLERANCE and not value.equal(before[key]), f"{key} of {name} is off by {error}"
        else:
            assert value.equal(before[key]), f"{key} of {name} was frozen, and moved"
