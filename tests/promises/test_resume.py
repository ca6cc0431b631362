"""Promise 3: a resumed run is the uninterrupted run. Same layout: bit for bit, dropout on. Other world size: 1e-5."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from tiny import write_conversations
from worlds import train_all

STEPS, RESUMED_FROM = 12, 4  # 1/3 of the steps, in the middle of an epoch of 6

YAML = """
model: {model}
data: {{train: [{data}], eval: 0.1, max_length: 256}}
lora: {{rank: 4, dropout: {dropout}}}
optim: {{lr: 5e-3, warmup: 2}}
train: {{epochs: 2, global_batch: 8, micro_batch: "200 tokens", precision: fp32, seed: 11}}
checkpoint: {{every: 4, keep: 10}}
output: {output}
"""


def steps_of(folder):
    lines = [json.loads(line) for line in (folder / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines()]
    return {line["step"]: line for line in lines if line["type"] == "step"}


def numbers_of(folder, after=0):
    keys = ("loss", "grad_norm", "lr", "num_targets", "num_samples", "epoch")
    return {step: tuple(line[key] for key in keys) for step, line in steps_of(folder).items() if step > after}


def weights_of(folder):
    return load_file(folder / "final" / "adapter_model.safetensors")


def start_from(whole, resumed, step=RESUMED_FROM):
    """A run folder as a run that died right after that checkpoint leaves it."""
    (resumed / "checkpoints").mkdir(parents=True)
    name = f"step-{step:08d}"
    shutil.copytree(whole / "checkpoints" / name, resumed / "checkpoints" / name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("resume")
    data = write_conversations(folder / "chats.jsonl", 50, seed=5)
    yamls = {}
    for name, dropout in (("dropout", 0.2), ("plain", 0.0)):
        yamls[name] = folder / f"{name}.yaml"
        text = YAML.format(model=tiny_model, data=data, dropout=dropout, output=folder / "out")
        yamls[name].write_text(text, encoding="utf-8")

    def job(yaml, name):
        return (str(yamls[yaml]), [], str(folder / name))

    train_all([job("dropout", "whole-1"), job("plain", "plain-1")], 1)
    start_from(folder / "whole-1", folder / "resumed-1")
    train_all([job("dropout", "resumed-1")], 1)
    train_all([job("dropout", "whole-2")], 2)
    start_from(folder / "whole-2", folder / "resumed-2")
    start_from(folder / "plain-1", folder / "grown")
    train_all([job("dropout", "resumed-2"), job("plain", "grown")], 2)
    return folder


def test_the_runs_are_what_the_test_means(runs):
    assert len(steps_of(runs / "whole-1")) == STEPS
    assert sorted(steps_of(runs / "resumed-1")) == list(range(RESUMED_FROM + 1, STEPS + 1))
    # Dropout is really on: without it, other numbers come out.
    assert numbers_of(runs / "whole-1") != numbers_of(runs / "plain-1")


@pytest.mark.parametrize("size", [1, 2])
def test_same_layout_goes_on_bit_for_bit(runs, size):
    whole, resumed = runs / f"whole-{size}", runs / f"resumed-{size}"
    assert numbers_of(resumed) == numbers_of(whole, after=RESUMED_FROM)
    mine, theirs = weights_of(resumed), weights_of(whole)
    assert mine.keys() == theirs.keys()
    for name in theirs:
        assert torch.equal(mine[name], theirs[name]), name
    # Not only dropout's generator: people's own code for samples may draw from Python's and NumPy's.
    last = f"checkpoints/step-{STEPS:08d}"
    for rank in range(size):
        mine, theirs = (load_file(run / last / f"random-{rank:05d}.safetensors") for run in (resumed, whole))
        assert [name for name in theirs if not torch.equal(mine[name].nan_to_num(7), theirs[name].nan_to_num(7))] == []


def test_another_world_size_goes_on_within_the_promise(runs):
    ours, want = numbers_of(runs / "grown"), numbers_of(runs / "plain-1", after=RESUMED_FROM)
    for step in want:
        for mine, theirs in zip(ours[step], want[step], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5), f"step {step}"
    theirs = weights_of(runs / "plain-1")
    for name, mine in weights_of(runs / "grown").items():
        assert float((mine - theirs[name]).norm() / theirs[name].norm()) < 1e-5, name


def test_three_worlds_after_each_other_end_where_one_process_does(tmp_path, tiny_model):
    """All weights under AdamW. A single one whose gradient is noise may be further off (decisions.md)."""
    data = write_conversations(tmp_path / "chats.jsonl", 50, seed=5)
    text = YAML.format(model=tiny_model, data=data, dropout=0, output=tmp_path / "out")
    (tmp_path / "full.yaml").write_text(text.replace("lora: {rank: 4, dropout: 0}\n", ""), encoding="utf-8")

    def job(name, strategy):
        return (str(tmp_path / "full.yaml"), [f"parallel.strategy={strategy}"], str(tmp_path / name))

    train_all([job("one", "single")], 1)
    train_all([job("four", "zero3")], 4)
    start_from(tmp_path / "four", tmp_path / "then-one", 4)
    train_all([job("then-one", "single")], 1)
    start_from(tmp_path / "then-one", tmp_path / "then-two", 8)
    train_all([job("then-two", "fsdp")], 2)
    want, got = numbers_of(tmp_path / "one"), numbers_of(tmp_path / "four")
    got |= numbers_of(tmp_path / "then-one") | numbers_of(tmp_path / "then-two")
    assert got.keys() == want.keys() and len(want) == STEPS
    furthest = {place: max(abs(got[step][place] / want[step][place] - 1) for step in want) for place in (0, 1)}
    assert furthest[0] < 1e-5 and furthest[1] < 3e-5, furthest
    mine, theirs = (load_file(tmp_path / name / "final/model.safetensors") for name in ("then-two", "one"))
    apart = max(float((mine[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs)
    assert apart < 1e-5, apart
    print(furthest, apart, max(float(((mine[n] - theirs[n]).abs() / theirs[n].abs().max()).max()) for n in theirs))


def test_every_sample_once_over_the_whole_story(runs):
    first = sum(line["num_samples"] for step, line in steps_of(runs / "plain-1").items() if step <= RESUMED_FROM)
    rest = sum(line["num_samples"] for line in steps_of(runs / "grown").values())
    assert first + rest == 2 * 45  # 2 epochs; 5 of 50 are held out


def test_the_event_log_and_tensorboard_say_resumed(runs):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = runs / "resumed-1"
    types = [json.loads(line)["type"] for line in (folder / "events" / "run.jsonl").read_text().splitlines()]
    assert types[0] == "resume" and types[-1] == "end"
    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    assert {"train/loss", "train/lr", "train/grad_norm", "train/tokens_per_s", "eval/loss"} <= set(
        board.Tags()["scalars"]
    )
    steps = [event.step for event in board.Scalars("train/loss")]
    assert steps == sorted(set(steps)) and steps[0] == RESUMED_FROM + 1
    wanted = steps_of(folder)
    assert board.Scalars("train/loss")[0].value == pytest.approx(wanted[RESUMED_FROM + 1]["loss"], rel=1e-6)
