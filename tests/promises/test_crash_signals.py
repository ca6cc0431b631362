"""A signal to one rank or to all, in training, evaluation and saving: all stop at one step, saved, and can go on."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import write_conversations
from worlds import leave_garbage, run_world, train_all

YAML = """
model: {model}
data: {{train: [{data}], eval: 0.3, max_length: 256}}
optim: {{lr: 2e-3}}
train: {{epochs: 2, global_batch: 8, precision: fp32, eval_every: 3, micro_batch: "256 tokens"}}
checkpoint: {{every: 2}}
output: {output}
"""
# name: (phase, in which step, signal, to whom, strategy)
CASES = {
    "train-one": ("backward", 4, "SIGHUP", [1], "ddp"),
    "train-all": ("forward", 5, "SIGTERM", [0, 1], "fsdp"),
    "eval-one": ("evaluate", 3, "SIGINT", [0], "ddp"),
    "eval-last": ("evaluate", 8, "SIGTERM", [0, 1], "ddp"),
    "save-all": ("save", 6, "SIGUSR2", [0, 1], "fsdp"),
}
STEPS = 8
# One world stops and goes on with all of them, and whichever test comes first waits for it.
pytestmark = pytest.mark.timeout(600)


def strike_itself(world, phase, step, number):
    """This rank sends itself the signal in that phase of that step; the list says whether it has."""
    sent, tell = [], type(world.heart).tell

    def tell_and_strike(new_phase, new_step=None, **more):
        tell(world.heart, new_phase, new_step, **more)
        here = world.heart.beat.step + (new_phase in ("forward", "backward"))
        if number and not sent and (new_phase, here) == (phase, step):
            sent.append(here)
            os.kill(os.getpid(), getattr(signal, number))

    world.heart.tell = tell_and_strike
    return sent


def stop_and_go_on(yaml, folder):
    """Each case: a run that signals itself and must leave with 75, and then the same run once more, to its end."""
    from duoka.comm.world import end_world, start_world
    from duoka.config.load import load_config
    from duoka.runs.folder import RunFolder
    from duoka.runs.status import read_status
    from duoka.train.main import read_inputs, run_in_world

    world = None
    for name, (phase, step, number, ranks, strategy) in CASES.items():
        leave_garbage()
        run = RunFolder(Path(folder) / name)
        run.make()
        loaded = load_config(yaml, [f"parallel.strategy={strategy}"])
        inputs = read_inputs(loaded, run)
        world = world or start_world(loaded.config.parallel)
        sent = strike_itself(world, phase, step, number if world.rank in ranks else "")
        code = run_in_world(inputs, world)
        del world.heart.tell
        assert code == 75 and (bool(sent) == (world.rank in ranks)), f"{name}: {code}, {sent}"
        ended_at = world.gather(read_status(run).step if world.is_main else None)[0]
        saved = sorted(path.name for path in run.checkpoints.iterdir())[-1]
        assert saved == f"step-{ended_at:08d}" and step <= ended_at <= step + 1, f"{name}: {saved}, {ended_at}"
        assert run_in_world(inputs, world) == 0, name
    end_world(world)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("signals")
    data = write_conversations(folder / "chats.jsonl", 43, seed=2)
    yaml = folder / "run.yaml"
    yaml.write_text(YAML.format(model=tiny_model, data=data, output=folder / "out"), encoding="utf-8")
    train_all([(str(yaml), [f"parallel.strategy={s}"], str(folder / f"whole-{s}")) for s in ("ddp", "fsdp")], 2)
    run_world(2, stop_and_go_on, str(yaml), str(folder))
    return folder


def events_of(folder, kind):
    lines = [json.loads(line) for line in (folder / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line["step"] for line in lines if line["type"] == kind]


@pytest.mark.parametrize("name", CASES)
def test_a_stopped_run_goes_on_as_if_never_stopped(runs, name):
    whole = runs / f"whole-{CASES[name][4]}"
    ours, theirs = (load_file(path / "final" / "model.safetensors") for path in (runs / name, whole))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert events_of(runs / name, "step") == list(range(1, STEPS + 1))
    assert events_of(runs / name, "eval") == events_of(whole, "eval") == [3, 6, 8], "none is left out"


@pytest.mark.parametrize("name", ["train-one", "eval-last", "save-all"])
def test_tensorboard_is_closed_and_readable(runs, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(runs / name / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("train/loss")] == list(range(1, STEPS + 1))
