"""A machine leaves, the rest goes on at the same global batch; it comes back, the world grows; each sample once."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from safetensors.torch import load_file
from tiny import write_conversations
from worlds import free_port, train_all

from duoka import cli
from duoka.runs.events import global_log, read_events, read_steps
from duoka.runs.folder import RunFolder

YAML = """
model: {model}
data: {{train: [{data}], max_length: 256}}
optim: {{lr: 2e-3}}
train: {{epochs: 30, global_batch: 20, micro_batch: 1, precision: fp32}}
checkpoint: {{every: 5}}
output: {output}
"""
STEPS = 60


def start(yaml, run, port, name):
    command = [sys.executable, "-m", "duoka", "train", str(yaml), f"output={run.path}", "--nproc", "1"]
    with (yaml.parent / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [*command, "--nodes", "1:2", "--meet", f"127.0.0.1:{port}"], stdout=log, stderr=log,
            start_new_session=True, env=dict(os.environ),
        )  # fmt: skip


def worlds_of(run):
    """(first step, ranks) of every world, from the event log."""
    return [
        (event["step"], event["world_size"])
        for event in read_events(global_log(run))
        if event["type"] in ("run", "resume") and "world_size" in event
    ]


def wait_for(what, *processes):
    deadline = time.monotonic() + 150
    while not what():
        assert time.monotonic() < deadline, "waited in vain; see the logs beside the run"
        assert all(process.poll() is None for process in processes), "it has ended; see the logs beside the run"
        time.sleep(0.1)


@pytest.mark.nightly
@pytest.mark.timeout(500)
def test_a_machine_leaves_and_comes_back(tmp_path, tiny_model):
    data = write_conversations(tmp_path / "chats.jsonl", 40, seed=2)
    yaml = tmp_path / "run.yaml"
    yaml.write_text(YAML.format(model=tiny_model, data=data, output=tmp_path / "out"), encoding="utf-8")
    train_all([(str(yaml), [], str(tmp_path / "whole"))], 1)
    run, port = RunFolder(tmp_path / "elastic"), free_port()
    host = start(yaml, run, port, "host")
    machines = [host]
    try:
        wait_for(lambda: worlds_of(run), host)  # the one that stays is the meeting place
        guest = start(yaml, run, port, "guest")
        machines.append(guest)
        wait_for(lambda: worlds_of(run)[-1][1] == 2 and len(read_steps(run)) > worlds_of(run)[-1][0] + 2, host, guest)
        os.kill(guest.pid, signal.SIGKILL)
        guest.wait()
        wait_for(lambda: worlds_of(run)[-1][1] == 1, host)
        back = start(yaml, run, port, "back")
        machines.append(back)
        wait_for(lambda: worlds_of(run)[-1][1] == 2, host, back)
        assert host.wait(150) == 0 and back.wait(60) == 0
    finally:
        for machine in machines:
            machine.kill()
            machine.wait()
    sizes = [size for _, size in worlds_of(run)]
    assert sizes == [1, 2, 1, 2], f"{worlds_of(run)}"
    steps = read_steps(run)
    assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
    assert {event["num_samples"] for event in steps} == {20}, "the same global batch in every world"
    state = json.loads((sorted(run.checkpoints.iterdir())[-1] / "state.json").read_text())["progress"]
    assert state["num_samples"] == 40 * 30, "each sample once an epoch, over the whole story"
    whole = {event["step"]: event["loss"] for event in read_steps(RunFolder(tmp_path / "whole"))}
    assert max(abs(event["loss"] / whole[event["step"]] - 1) for event in steps) < 1e-4
    ours, theirs = (load_file(path / "final" / "model.safetensors") for path in (run.path, tmp_path / "whole"))
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) < 1e-4


def test_half_a_meeting_is_refused(tmp_path, capsys):
    for flags, words in (
        (["--nodes", "1:2"], "--meet HOST:PORT"),
        (["--nodes", "2:1", "--meet", "a:1"], "--nodes is '2:1'"),
        (["--nodes", "1:2", "--meet", "here"], "--meet is 'here'"),
        (["--meet", "a:29400"], "--nodes is not given"),
    ):
        assert cli.run(["train", str(tmp_path / "none.yaml"), *flags]) == 2
        assert words in capsys.readouterr().err
