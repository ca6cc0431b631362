"""A batch in which no token has one before it teaches nothing: it is left out in words, on all ranks alike."""

import json
import math
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from oracle_rollouts import write_steps
from safetensors.torch import load_file
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


ANSWERS = """
model: {model}
stage: rl
data: {{train: [task:sort], max_length: 96}}
rl: {{samples: 4, max_new_tokens: 12, algorithm: dapo, updates: 2, replay: {folder}/recorded}}
optim: {{lr: 5e-3, weight_decay: 0.1, schedule: constant}}
train: {{max_steps: 6, global_batch: 3, precision: fp32, seed: 7}}
checkpoint: {{every: 1, keep: 99}}
log: {{to: []}}
output: {folder}/answers
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Of the three steps of answers, each learned from twice, the second has one reward for all of a prompt's."""
    folder = tmp_path_factory.mktemp("answers")
    model = write_tiny_model(folder / "model", tied=False)
    write_steps(folder / "recorded", 3)
    second = folder / "recorded" / "step-00000001.jsonl"
    head, *lines = map(json.loads, second.read_text("utf-8").splitlines())
    equal = [{**one, "reward": 1.0, "rewards": [1.0]} for one in lines]
    second.write_text("".join(json.dumps(one) + "\n" for one in (head, *equal)), "utf-8")
    yaml = folder / "run.yaml"
    yaml.write_text(ANSWERS.format(model=model, folder=folder), "utf-8")
    train_all([(str(yaml), [], str(folder / "one"))], 1)
    begun = folder / "one" / "checkpoints" / "step-00000003"
    shutil.copytree(begun, folder / "again" / "checkpoints" / begun.name)
    shutil.copytree(folder / "one" / "rollouts", folder / "again" / "rollouts")
    train_all([(str(yaml), [], str(folder / "again"))], 1)
    train_all([(str(yaml), ["parallel.strategy=zero2"], str(folder / "two"))], 2)
    return folder


def weights_after(run, step):
    tensors = load_file(run / "checkpoints" / f"step-{step:08d}" / "tensors-00000.safetensors")
    return {name: tensor for name, tensor in tensors.items() if tensor.ndim}


def test_a_step_of_answers_that_are_all_alike_moves_no_weight_and_its_rewards_are_logged(answers):
    for name in ("one", "two"):
        said = [event for event in events_of(answers / name, "warning") if "the weights stay" in event.get("text", "")]
        steps = events_of(answers / name, "step")
        assert [one["step"] for one in said] == [3, 4] and "got one reward" in said[0]["text"]
        assert [one["step"] for one in steps] == [1, 2, 3, 4, 5, 6], "each has its rewards"
        assert [one["reward"] == 1.0 and one["groups_equal"] == 1.0 for one in steps] == [False] * 2 + [True] * 2 + [
            False
        ] * 2
        assert [one["grad_norm"] > 0 for one in steps] == [True] * 2 + [False] * 2 + [True] * 2
    before, after, later = (weights_after(answers / "one", step) for step in (2, 4, 5))
    assert all(torch.equal(before[name], after[name]) for name in before), "momentum and decay stand still too"
    assert not all(torch.equal(before[name], later[name]) for name in before)


def test_after_it_any_split_and_a_resumed_run_learn_the_same(answers):
    want, again, two = (events_of(answers / name, "step") for name in ("one", "again", "two"))
    assert [(one["step"], one["loss"], one["grad_norm"]) for one in again] == [
        (one["step"], one["loss"], one["grad_norm"]) for one in want[3:]
    ]
    for ours, theirs in zip(two, want, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5, abs=1e-7), ours["step"]
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4), ours["step"]
