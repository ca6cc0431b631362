"""`duoka train` with a tensor axis: the numbers of one process, checkpoints of any layout, stopped and gone on."""

import json
import shutil
import signal

import pytest
from commands import run_duoka
from safetensors.torch import load_file
from struck import finish, start, wait_for_step
from test_any_split import read_run, relative, worst
from tiny import write_conversations
from worlds import train_all

from duoka.runs.folder import RunFolder

YAML = """
model: {model}
data: {{train: [{data}], eval: 0.2, max_length: 256}}
optim: {{lr: 5e-3, warmup: 0.2, clip: 0.5, weight_decay: 0.1}}
train: {{max_steps: 8, global_batch: 6, micro_batch: "200 tokens", precision: fp32, seed: 7, eval_every: 4}}
checkpoint: {{every: 2, keep: 9}}
parallel: {{check_replicas: 2}}
log: {{to: []}}
output: {output}
"""
TENSOR = "parallel.tensor=2"
SHARDED = [TENSOR, "parallel.strategy=fsdp"]


@pytest.fixture(scope="module")
def case(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("tensor-runs")
    data = write_conversations(folder / "chats.jsonl", 60, seed=3)
    yaml = folder / "run.yaml"
    yaml.write_text(YAML.format(model=tiny_model, data=data, output=folder / "out"), encoding="utf-8")
    return folder, yaml


def go_on(folder, before, after, step):
    """The run folder `after`, as `before` was when it had saved that step."""
    name = f"checkpoints/step-{step:08d}"
    shutil.copytree(folder / before / name, folder / after / name)


@pytest.fixture(scope="module")
def runs(case):
    """one process; two of a layer; and a chain of both with four in between, each going on from the one before."""
    folder, yaml = case

    def job(name, settings):
        return str(yaml), settings, str(folder / name)

    train_all([job("one", [])], 1)
    go_on(folder, "one", "two", 2)
    train_all([job("whole", [TENSOR]), job("two", [TENSOR]), job("lamb", [TENSOR, "optim.name=lamb"])], 2)
    go_on(folder, "two", "four", 4)
    train_all([job("four", SHARDED)], 4)
    go_on(folder, "four", "last", 6)
    train_all([job("last", [TENSOR, "train.recompute=full"])], 2)
    train_all([job("one-lamb", ["optim.name=lamb"])], 1)
    return folder


def weights_of(folder):
    return load_file(folder / "final" / "model.safetensors")


def told(folder, kind):
    lines = (folder / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines()
    return [line for line in map(json.loads, lines) if line["type"] == kind]


def check_same(ours, theirs, after=0):
    found, wanted = read_run(ours), [line for line in read_run(theirs) if line["step"] > after]
    assert [line["step"] for line in found] == [line["step"] for line in wanted]
    for key in ("loss", "grad_norm", "lr"):
        assert relative([line[key] for line in found], [line[key] for line in wanted]) < 1e-4, key
    off, name = worst(weights_of(ours), weights_of(theirs))
    assert off < 1e-4, name


def test_a_run_of_two_ranks_a_layer_is_that_of_one_process(runs):
    check_same(runs / "whole", runs / "one")
    evaluated, wanted = told(runs / "whole", "eval"), told(runs / "one", "eval")
    assert len(evaluated) == len(wanted) > 1
    assert relative([line["loss"] for line in evaluated], [line["loss"] for line in wanted]) < 1e-4
    assert [line["accuracy"] for line in evaluated] == [line["accuracy"] for line in wanted]


def test_lamb_looks_at_whole_lengths(runs):
    check_same(runs / "lamb", runs / "one-lamb")


@pytest.mark.parametrize(("name", "step"), [("two", 2), ("four", 4), ("last", 6)])
def test_each_layout_goes_on_from_the_one_before_as_if_never_stopped(runs, name, step):
    check_same(runs / name, runs / "one", after=step)


def test_the_command_stops_and_goes_on(case, runs):
    folder, yaml = case
    process = start(yaml, folder / "cli", TENSOR)
    wait_for_step(RunFolder(folder / "cli"), 1)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 75, output
    code, output = finish(start(yaml, folder / "cli", TENSOR))
    assert code == 0 and "single" in output, output
    check_same(folder / "cli", runs / "one")
    refused = run_duoka("train", yaml, f"output={folder / 'cli'}", "--nproc", "2", "parallel.tensor=4")
    assert refused.returncode == 2 and "parallel.tensor" in refused.stderr, refused.stderr
