"""A batch in which no token has one before it teaches nothing: it is left out in words, on all ranks alike."""

import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny import write_tiny_model
from worlds import train_all

pytestmark = pytest.mark.timeout(300)

YAML = """
model: {model}
stage: pretrain
data: {{train: [{folder}/parquet], max_length: 8, stream: true}}
optim: {{lr: 5e-3}}
train: {{max_steps: 8, global_batch: 1, precision: fp32, seed: 7}}
checkpoint: {{every: 100}}
log: {{to: []}}
output: {folder}/out
"""
TWO = ["train.global_batch=2", "data.streams=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nothing")
    model = write_tiny_model(folder / "model", tied=False)
    names = model / "tokenizer_config.json"
    facts = json.loads(names.read_text("utf-8"))
    names.write_text(json.dumps({**facts, "bos_token": None, "eos_token": None}), "utf-8")
    (folder / "parquet").mkdir()
    schema = pa.schema([("text", pa.string())])
    with pq.ParquetWriter(folder / "parquet" / "0.parquet", schema) as writer:
        for texts in (["a", "b"] * 20, ["some more than a letter"] * 4):
            writer.write_table(pa.table({"text": texts}, schema=schema))
    yaml = folder / "run.yaml"
    yaml.write_text(YAML.format(model=model, folder=folder), "utf-8")
    train_all(
        [(str(yaml), more, str(folder / name)) for name, more in (("one", ["train.max_steps=18"]), ("both", TWO))], 1
    )
    train_all([(str(yaml), TWO, str(folder / "shared"))], 2)
    return folder


def events_of(run, kind):
    lines = (run / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for line in lines if (event := json.loads(line))["type"] == kind]


def test_a_batch_without_targets_is_left_out_and_the_run_goes_on(folder):
    said = {
        event["step"] for event in events_of(folder / "one", "warning") if "no token to learn" in event.get("text", "")
    }
    steps = {event["step"]: event for event in events_of(folder / "one", "step")}
    assert len(said) >= 4 and said | steps.keys() == set(range(1, 19)) and not said & steps.keys()
    assert all(math.isfinite(one["loss"]) and one["loss"] > 1 and one["grad_norm"] > 0 for one in steps.values())
    assert not (folder / "one" / "nonfinite.jsonl").exists()


def test_where_one_rank_has_no_targets_the_other_ones_count(folder):
    alone, shared = (events_of(folder / name, "step") for name in ("both", "shared"))
    assert len(alone) == len(shared) == 8 and any(one["num_targets"] == 7 for one in alone), alone
    for ours, theirs in zip(shared, alone, strict=True):
        for name in ("loss", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5), (ours["step"], name)
        assert ours["num_targets"] == theirs["num_targets"]
