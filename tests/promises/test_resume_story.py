"""Promise 3, the whole story: any place to go on from, longer runs, allowed changes, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import write_conversations
from worlds import leave_garbage, run_world

# 20 conversations in batches of 8: the third and last batch of an epoch is short.
YAML = """
model: {model}
data: {{train: [{data}], max_length: 256}}
lora: {{rank: 4, dropout: 0.2}}
optim: {{lr: 5e-3, warmup: 2, schedule: constant}}
train: {{epochs: 2, global_batch: 8, micro_batch: "200 tokens", precision: fp32, seed: 11}}
checkpoint: {{every: 1, keep: 100}}
output: {output}
"""
STEPS = 6


def train_jobs(jobs, results):
    """Train every (name, overrides) in turn in one process; what a run refuses is written down."""
    from duoka.comm.world import World
    from duoka.config.load import load_config
    from duoka.errors import DuokaError
    from duoka.runs.folder import RunFolder
    from duoka.train.main import read_inputs, run_in_world

    for name, yaml, overrides in jobs:
        leave_garbage()
        run = RunFolder(Path(results) / name)
        run.make()
        inputs = read_inputs(load_config(yaml, overrides), run)
        try:
            run_in_world(inputs, World())
        except DuokaError as error:
            with (run.path / "refused.txt").open("a", encoding="utf-8") as file:
                file.write(f"{type(error).__name__}: {error}\n")


def place_at(whole, folder, step):
    """A run folder as a run that died right after this checkpoint leaves it."""
    (folder / "checkpoints").mkdir(parents=True)
    name = f"step-{step:08d}"
    shutil.copytree(whole / "checkpoints" / name, folder / "checkpoints" / name)


def events_of(folder):
    return [json.loads(line) for line in (folder / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines()]


def numbers_of(folder, after=0):
    keys = ("loss", "grad_norm", "lr", "num_samples", "epoch")
    steps = {line["step"]: line for line in events_of(folder) if line["type"] == "step"}
    return {step: tuple(line[key] for key in keys) for step, line in steps.items() if step > after}


def assert_same_weights(folder, whole):
    ours, theirs = (load_file(path / "final" / "adapter_model.safetensors") for path in (folder, whole))
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]), name


def refusal(folder):
    return (folder / "refused.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def story(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("story")
    data = write_conversations(folder / "chats.jsonl", 20, seed=5)
    other = write_conversations(folder / "other.jsonl", 20, seed=6)
    yaml = folder / "run.yaml"
    yaml.write_text(YAML.format(model=tiny_model, data=data, output=folder / "out"), encoding="utf-8")
    linear = "optim.schedule=linear"
    first = [
        ("whole", yaml, []),
        ("short", yaml, ["train.epochs=1"]),
        ("linear", yaml, [linear, "train.epochs=1"]),
        ("copied", yaml, []),
    ]
    run_world(1, train_jobs, first, str(folder))
    whole = folder / "whole"
    for step in range(1, STEPS):
        place_at(whole, folder / f"from-{step}", step)
    for name in ("batch", "seed"):
        place_at(whole, folder / name, 4)
    place_at(whole, folder / "batch-at-end", 3)
    second = [(f"from-{step}", yaml, []) for step in range(1, STEPS)]
    second += [
        ("short", yaml, ["train.epochs=2"]),
        ("linear", yaml, [linear, "train.epochs=2"]),
        ("linear", yaml, [linear, "train.epochs=2", "checkpoint.allow_changes=[train.epochs]"]),
        ("batch", yaml, ["train.global_batch=4", "checkpoint.allow_changes=[train.global_batch]"]),
        ("batch-at-end", yaml, ["train.global_batch=4", "checkpoint.allow_changes=[train]"]),
        ("seed", yaml, ["train.seed=12"]),
        ("elsewhere", yaml, [f"checkpoint.resume={whole}/checkpoints/step-00000002/"]),
        ("by-name", yaml, ["checkpoint.resume=whole"]),
        ("copied", yaml, ["checkpoint.resume=2", "train.epochs=1"]),
        ("copied", yaml, ["checkpoint.resume=2"]),
        ("whole", yaml, ["train.epochs=1"]),
    ]
    shutil.rmtree(folder / "copied" / "checkpoints" / "step-00000006")
    shutil.copy(other, folder / "kept.jsonl")
    run_world(1, train_jobs, second, str(folder))
    # Last, because it spoils the data for all: the file has other content than when the checkpoint was written.
    shutil.copy(other, data)
    place_at(whole, folder / "data", 3)
    run_world(1, train_jobs, [("data", yaml, [])], str(folder))
    return folder


@pytest.mark.parametrize("step", range(1, STEPS))
def test_any_step_goes_on_bit_for_bit(story, step):
    folder = story / f"from-{step}"
    assert numbers_of(folder) == numbers_of(story / "whole", after=step)
    assert sorted(numbers_of(folder)) == list(range(step + 1, STEPS + 1))
    assert_same_weights(folder, story / "whole")


def test_the_last_batch_of_an_epoch_is_short(story):
    assert [numbers[3] for numbers in numbers_of(story / "whole").values()] == [8, 8, 4] * 2


def test_more_epochs_of_a_constant_rate_are_the_longer_run(story):
    assert numbers_of(story / "short") == numbers_of(story / "whole")
    assert_same_weights(story / "short", story / "whole")


def test_more_epochs_of_a_falling_rate_want_to_be_allowed_by_name(story):
    said = refusal(story / "linear")
    assert said.startswith("ConfigError") and said.count("Error") == 1
    assert "train.epochs: 1.0 then, 2.0 now" in said or "train.epochs: 1 then, 2 now" in said
    assert "checkpoint.allow_changes=[train.epochs]" in said
    assert sorted(numbers_of(story / "linear")) == list(range(1, STEPS + 1))
    notes = [event["text"] for event in events_of(story / "linear") if event["type"] == "warning"]
    assert any("allowed to change: train.epochs" in note for note in notes)


def test_another_order_of_samples_is_refused_within_an_epoch_and_exact_at_its_end(story):
    assert "lies within epoch 2" in refusal(story / "batch")
    numbers = numbers_of(story / "batch-at-end")
    assert sum(one[3] for one in numbers.values()) == 20 and len(numbers) == 5


def test_a_changed_seed_is_refused_with_both_values(story):
    assert "train.seed: 11 then, 12 now" in refusal(story / "seed")


def test_changed_data_behind_the_same_name_is_refused(story):
    said = refusal(story / "data")
    assert "the training data is not what it was" in said and "allow_changes=[data.train]" in said


def test_a_checkpoint_of_another_run_is_a_place_to_begin(story):
    assert_same_weights(story / "elsewhere", story / "whole")
    assert sorted(numbers_of(story / "elsewhere")) == list(range(3, STEPS + 1))
    # By the other run's name: the newest it has, after which nothing is left to learn.
    assert_same_weights(story / "by-name", story / "whole")


def test_going_back_sets_newer_checkpoints_aside(story):
    names = sorted(path.name for path in (story / "copied" / "checkpoints").iterdir())
    assert [name for name in names if name.endswith(".set-aside")] == [f"step-{n:08d}.set-aside" for n in (3, 4, 5)]
    assert_same_weights(story / "copied", story / "whole")


def test_fewer_epochs_than_were_learned_are_refused(story):
    assert "the run has done 6 steps" in refusal(story / "whole")
