"""Promise 4: processes are killed at random moments, and the run ends in the weights of one that nobody disturbed."""

import json
import os
import random
import signal
import subprocess
import sys
import threading

import psutil
import pytest
import torch
from safetensors.torch import load_file
from tiny import write_conversations
from worlds import train_all

from duoka.cluster.blows import living_ranks, strike, wait_for_ranks
from duoka.runs.events import read_steps
from duoka.runs.folder import RunFolder

YAML = """
model: {model}
data: {{train: [{data}], max_length: 256}}
lora: {{rank: 4, dropout: 0.2}}
optim: {{lr: 2e-3}}
train: {{epochs: 14, global_batch: 8, precision: fp32}}
checkpoint: {{every: 4}}
output: {output}
"""
STEPS = 70
WITHIN_S = 100


@pytest.fixture(scope="module")
def case(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("crash")
    data = write_conversations(folder / "chats.jsonl", 40, seed=2)
    yaml = folder / "run.yaml"
    yaml.write_text(YAML.format(model=tiny_model, data=data, output=folder / "whole"), encoding="utf-8")
    train_all([(str(yaml), [], str(folder / "whole"))], 2)
    return folder, yaml


def start(yaml, output, *arguments):
    command = [sys.executable, "-m", "duoka", "train", str(yaml), f"output={output}", "--nproc", "2", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process):
    try:
        output, _ = process.communicate(timeout=WITHIN_S * 2)
    finally:
        process.kill()
    return process.returncode, output


def wait_for_step(run, step, strangers=()):
    return wait_for_ranks(run, 2, lambda beat: beat.step >= step, strangers=strangers, within_s=WITHIN_S)


def kill_in_turn(run, dice, victims, done):
    """One blow per world: some steps after it has begun, and some time into a step."""
    old = []
    for victim in victims:
        ranks = wait_for_ranks(run, 2, lambda beat: not beat.is_slow, strangers=old, within_s=WITHIN_S)
        ranks = wait_for_step(run, ranks[1].step + dice.randint(2, 9), strangers=old)
        threading.Event().wait(dice.random() * 0.05)
        old = [beat.pid for beat in ranks.values()]
        strike(ranks.values() if victim == "all" else [ranks[victim]], "SIGKILL")
        done.append(ranks[1].step)


def same_weights(run, whole):
    ours = load_file(run / "final" / "adapter_model.safetensors")
    theirs = load_file(whole / "final" / "adapter_model.safetensors")
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def survive(case, name, dice, victims):
    """Kill the launcher once, and then the victims of the same command with restarts."""
    folder, yaml = case
    run = RunFolder(folder / name)
    process = start(yaml, run.path)
    wait_for_step(run, dice.randint(3, 12))
    process.kill()
    process.communicate()
    _, left = psutil.wait_procs([psutil.Process(b.pid) for b in living_ranks(run).values()], timeout=30)
    assert not left, f"the launcher was killed, and its ranks live on: {left}"

    process = start(yaml, run.path, "--restarts", str(len(victims)))
    done = []
    killer = threading.Thread(target=kill_in_turn, args=(run, dice, victims, done), daemon=True)
    killer.start()
    code, output = finish(process)
    assert code == 0, output
    assert len(done) == len(victims), f"killed after steps {done} of {victims}: {output}"
    assert output.count("was killed by SIGKILL") == len(victims)
    assert f"restart {len(victims)} of {len(victims)}" in output and "Traceback" not in output
    assert same_weights(run.path, folder / "whole"), f"killed after steps {done}"
    assert [event["step"] for event in read_steps(run)] == list(range(1, STEPS + 1))
    left = sorted(path.name for path in run.checkpoints.iterdir())
    assert len(left) == 2, f"two checkpoints are kept, and nothing half-written: {left}"


@pytest.mark.timeout(400)
def test_killed_runs_end_in_the_weights_of_an_undisturbed_one(case):
    survive(case, "killed", random.Random(7), [1, "all", 0, 1])


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(5))
def test_killed_runs_end_in_the_same_weights_many_times(case, seed):
    dice = random.Random(seed)
    survive(case, f"killed-{seed}", dice, [dice.choice([0, 1, "all"]) for _ in range(4)])


def launch(tmp_path, script, *flags):
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    command = [sys.executable, "-m", "duoka", "launch", "--output", str(tmp_path / "out"), *flags, "script.py"]
    return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_the_same_failure_at_the_same_step_is_not_tried_again(tmp_path):
    script = "open('starts', 'a').write('x')\nraise ValueError('the file has 3 rows, not 4')\n"
    code, output = finish(launch(tmp_path, script, "--restarts", "5"))
    assert code == 5 and (tmp_path / "starts").read_text() == "xx", output
    assert "worker failed: rank 0 of 1 raised ValueError: the file has 3 rows, not 4" in output
    assert "the same failure at the same step twice: not started again (4 of 5 restarts left)" in output


def test_a_failure_that_does_not_repeat_costs_one_restart(tmp_path):
    script = (
        "import os, pathlib, sys\nseen = len(list(pathlib.Path().glob('start-*')))\n"
        "pathlib.Path(f'start-{seen}').touch()\n"
        "print('restart', os.environ['DUOKA_NUM_RESTARTS'], flush=True)\n"
        "assert seen > 0, 'the network was away'\n"
    )
    code, output = finish(launch(tmp_path, script, "--restarts", "5"))
    assert code == 0 and "restart 0" in output and "restart 1 of 5 in 1.0 s" in output and "restart 2" not in output
    status = json.loads((tmp_path / "out" / "status.json").read_text())
    assert status["state"] == "done" and status["cause"] == ""
    events = (tmp_path / "out" / "events" / "run.jsonl").read_text()
    assert "the network was away; restart 1 of 5" in events


def test_a_stop_between_two_worlds_ends_the_run(tmp_path):
    process = launch(tmp_path, "raise SystemExit(9)\n", "--restarts", "5")
    os.set_blocking(process.stdout.fileno(), True)
    for line in process.stdout:
        if "restart 1 of 5" in line:
            process.send_signal(signal.SIGTERM)
            break
    code, output = finish(process)
    assert code == 75 and "between two worlds" in output
