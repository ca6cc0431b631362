"""Machines leave a run and come back: the others go on at the same global batch, and each sample is learned once."""

import json
import random
import signal
import time

import pytest
from commands import PACE, start_duoka
from safetensors.torch import load_file
from tiny import write_conversations
from worlds import free_port, train_all

from duoka.cluster.fault_injection import strike, wait_for_ranks
from duoka.cluster.listing import list_runs
from duoka.runs.events import global_log, read_events, read_steps
from duoka.runs.folder import RunFolder

YAML = """
model: {model}
data: {{train: [{data}], max_length: 256}}
optim: {{lr: 2e-3}}
train: {{epochs: 60, global_batch: {batch}, micro_batch: {micro}, precision: fp32}}
parallel: {{strategy: ddp}}
checkpoint: {{every: 5}}
output: {output}
"""
STEPS = 120
LONG = "train.epochs=25"  # 50 steps
WITHIN_S = 200  # for a world to begin, on a machine that others use too


def start(yaml, run, port, *flags):
    return start_duoka(
        "train", yaml, f"output={run.path}", "--nproc", "1", "--nodes", "1:2", "--meet", f"127.0.0.1:{port}", *flags,
        env={"DUOKA_ALLOW_LOOPBACK": "1", PACE: str(run.path.parent / "pace")},
    )  # fmt: skip


def worlds_of(run):
    """(the step that it began after, machines) of every world."""
    return [(event["step"], event["world_size"]) for event in read_events(global_log(run)) if "world_size" in event]


def wait_for_world(run, number, num_machines, *machines, step=0):
    """Until world `number` has learned something new, and come past `step`."""
    deadline = time.monotonic() + WITHIN_S
    while True:
        worlds, steps = worlds_of(run), [event["step"] for event in read_steps(run)]
        if len(worlds) == number and steps and steps[-1] > max(step, worlds[-1][0] + 2):
            assert worlds[-1][1] == num_machines, worlds
            return
        assert time.monotonic() < deadline, f"no world {number}: {worlds}, last steps {steps[-3:]}"
        assert all(machine.poll() is None for machine in machines), [machine.said() for machine in machines]
        assert not steps or list_runs(run.path)[0].state in ("starting", "running"), "also between two worlds"
        time.sleep(0.2)


@pytest.mark.timeout(900)
def test_a_machine_is_lost_comes_back_and_leaves_in_good_order(tmp_path, tiny_model):
    data = write_conversations(tmp_path / "chats.jsonl", 16, seed=2, longest=8)
    yaml = tmp_path / "run.yaml"
    yaml.write_text(
        YAML.format(batch=8, micro=2, model=tiny_model, data=data, output=tmp_path / "out"), encoding="utf-8"
    )
    train_all([(str(yaml), ["train.micro_batch=8"], str(tmp_path / "whole"))], 1)
    (pace := tmp_path / "pace").touch()  # steps give machines time to come
    run, port = RunFolder(tmp_path / "elastic"), free_port()
    host = start(yaml, run, port)
    machines = [host]
    try:
        while f"owns the rendezvous at 127.0.0.1:{port}" not in host.said():
            assert host.poll() is None, host.said()
            time.sleep(0.05)
        machines.append(start(yaml, run, port))
        wait_for_world(run, 1, 2, *machines, step=6)
        machines[1].kill()
        machines[1].wait()
        wait_for_world(run, 2, 1, host)
        machines.append(start(yaml, run, port))
        wait_for_world(run, 3, 2, host, machines[2])
        machines[2].send_signal(signal.SIGTERM)
        assert machines[2].wait(WITHIN_S) == 75
        pace.unlink()
        assert host.wait(WITHIN_S) == 0
    finally:
        for machine in machines:
            machine.kill()
            machine.wait()
    begun, sizes = zip(*worlds_of(run), strict=True)
    assert sizes == (2, 1, 2, 1) and begun[1] >= 5, f"each goes on from a checkpoint: {worlds_of(run)}"
    said, guest = host.said(), machines[2].said()
    assert (
        " left after step " in said
        and " has joined" in said
        and " leaves on request" in said
        and "Traceback" not in said
    ), said
    assert "this machine has left; the same command joins again" in guest and "Traceback" not in guest, guest
    steps = read_steps(run)
    assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
    assert {event["num_samples"] for event in steps} == {8}, "the same global batch in every world"
    state = json.loads((sorted(run.checkpoints.iterdir())[-1] / "state.json").read_text())["progress"]
    assert state["num_samples"] == 16 * 60, "each sample once an epoch, over the whole story"
    whole = {event["step"]: event["loss"] for event in read_steps(RunFolder(tmp_path / "whole"))}
    assert max(abs(event["loss"] / whole[event["step"]] - 1) for event in steps) < 1e-4
    ours, theirs = (load_file(path / "final" / "model.safetensors") for path in (run.path, tmp_path / "whole"))
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) < 1e-4


@pytest.mark.nightly
@pytest.mark.timeout(290)
@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_are_killed_while_their_machines_stay_cost_a_restart_each(tmp_path, tiny_model, seed):
    data = write_conversations(tmp_path / "chats.jsonl", 40, seed=2)
    yaml = tmp_path / "run.yaml"
    yaml.write_text(
        YAML.format(batch=20, micro=1, model=tiny_model, data=data, output=tmp_path / "out"), encoding="utf-8"
    )
    train_all([(str(yaml), [LONG], str(tmp_path / "whole"))], 2)
    dice, run, port, old = random.Random(seed), RunFolder(tmp_path / "elastic"), free_port(), []
    machines = [start(yaml, run, port, LONG, "--nodes", "2", "--restarts", "4") for _ in range(2)]
    try:
        for step in (6, 20, 34):
            ranks = wait_for_ranks(
                run, 2, lambda beat, step=step: beat.step >= step + dice.randint(0, 5), old_pids=old, within_s=WITHIN_S
            )
            time.sleep(dice.random() * 0.1)
            old = [beat.pid for beat in ranks.values()]
            strike(dice.choice([[ranks[0]], [ranks[1]], ranks.values()]), "SIGKILL")
        codes = [machine.wait(WITHIN_S) for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
            machine.wait()
    said = "\n".join(machine.said() for machine in machines)
    assert codes == [0, 0] and "Traceback" not in said, said
    assert said.count("restart 3 of 4 in") == 2 and "restart 4" not in said, said
    assert [event["step"] for event in read_steps(run)] == list(range(1, 51))
    ours, theirs = (load_file(path / "final" / "model.safetensors") for path in (run.path, tmp_path / "whole"))
    assert all(bool((ours[name] == theirs[name]).all()) for name in theirs), "the same layout: the same bits"
