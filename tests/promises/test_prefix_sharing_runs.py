"""Runs whose samples begin alike learn the same whether that is computed once or in each, under every layout."""

import json

import pytest
from test_any_split import read_run
from tiny import write_tiny_model
from worlds import train_all

pytestmark = pytest.mark.timeout(300)

YAML = """
model: {model}
data: {{train: [{data}], eval: 0.2, max_length: 256}}
optim: {{lr: 5e-3, warmup: 0.2}}
train: {{max_steps: 4, global_batch: 8, precision: fp32, seed: 7, micro_batch: "700 tokens", eval_every: 2}}
checkpoint: {{every: 100}}
log: {{to: []}}
output: {output}
"""
OFF = ["data.prefix_sharing=false"]
ONE = {
    "whole": OFF,
    "shared": [],
    "recomputed": ["train.recompute=full"],
    "selective": ["train.recompute=selective"],
    "padded": ["data.packing=false"],
    "lora whole": [*OFF, "lora={rank: 3}"],
    "lora": ["lora={rank: 3}"],
    "dropped whole": [*OFF, "lora={rank: 3, dropout: 0.2}"],
    "dropped": ["lora={rank: 3, dropout: 0.2}"],
}
TWO = {
    "ddp": ["parallel.strategy=ddp"],
    "zero2": ["parallel.strategy=zero2", "parallel.offload=optimizer"],
    "fsdp": ["parallel.strategy=fsdp"],
    "tensor": ["parallel.tensor=2"],
}
SHARED = {"shared", "recomputed", "selective", "lora", "ddp", "zero2", "fsdp", "tensor"}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prefixes")
    model = write_tiny_model(folder / "model", layers=2)
    system = "you are the one who answers every question that is asked here in one short sentence and no more"
    records = [
        {"messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": f"what is {place % 5} and {place}"},
            {"role": "assistant", "content": f"it is {place % 5 + place}" + " indeed" * (place % 4)},
        ]}
        for place in range(40)
    ]  # fmt: skip
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    yaml = folder / "run.yaml"
    yaml.write_text(YAML.format(model=model, data=data, output=folder / "out"), encoding="utf-8")
    for size, runs in ((1, ONE), (2, TWO)):
        train_all([(str(yaml), settings, str(folder / name)) for name, settings in runs.items()], size)
    return folder


@pytest.mark.parametrize("name", [name for name in (*ONE, *TWO) if "whole" not in name])
def test_losses_and_norms_are_those_of_whole_samples(case, name):
    base = name if name in ("lora", "dropped") else ""
    whole, ours = (read_run(case / one) for one in (f"{base} whole".strip(), name))
    assert len(whole) == len(ours) == 4
    for want, got in zip(whole, ours, strict=True):
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-5)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=3e-5)
        assert got["num_tokens"] == want["num_tokens"]
        assert (got.get("shared_tokens", 0) > 0.3 * got["num_tokens"]) == (name in SHARED)


def test_evaluations_are_those_of_whole_samples(case):
    def evaluated(name):
        lines = (case / name / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines()
        return [event["loss"] for line in lines if (event := json.loads(line))["type"] == "eval"]

    assert len(evaluated("whole")) == 2
    for name in ("shared", "fsdp"):
        assert evaluated(name) == pytest.approx(evaluated("whole"), rel=1e-5)
