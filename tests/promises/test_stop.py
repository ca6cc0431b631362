"""A run whose launcher is told to stop saves, leaves with 75, and the same command ends as if never stopped."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from commands import start_duoka
from safetensors.torch import load_file
from tiny import write_conversations
from worlds import train_all

from duoka.cluster.fault_injection import strike, wait_for_ranks
from duoka.runs.folder import RunFolder
from duoka.runs.status import read_status

YAML = """
model: {model}
data: {{train: [{data}], eval: 0.5, max_length: 256}}
optim: {{lr: 2e-3}}
train: {{epochs: 6, global_batch: 4, precision: fp32, eval_every: 5, micro_batch: "256 tokens"}}
checkpoint: {{every: 1000}}
output: {output}
"""
STEPS = 30
DEADLINE_S = 120


# As `nohup duoka train ... &` in a script starts it: without job control, shells start such jobs with SIGINT ignored.
IN_BACKGROUND = ("sh", "-c", 'trap "" INT QUIT; exec nohup "$@"', "sh")


def start_in_background(yaml, *arguments):
    """In a session of its own, and nothing of it forked."""
    command = [*IN_BACKGROUND, sys.executable, "-m", "duoka", "train", str(yaml), "--nproc", "2", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip


def finish(process):
    output, _ = process.communicate(timeout=DEADLINE_S)
    return process.returncode, output


def stop_in(phase, number, yaml, run, *arguments):
    """Start, send the signal to the launcher while a rank is in `phase`; returns what the command said."""
    process = start_duoka("train", yaml, "--nproc", "2", f"output={run.path}", *arguments)
    try:
        wait_for_ranks(run, 2, lambda beat: beat.step >= 5 and beat.phase == phase, within_s=DEADLINE_S)
        process.send_signal(number)
        code, output = finish(process)
    finally:
        process.kill()
    assert code == 75 and "Traceback" not in output, output
    status = read_status(run)
    assert status.state == "stopped" and status.exit_code == 75
    assert (run.checkpoints / f"step-{status.step:08d}").is_dir() and 5 <= status.step < STEPS
    return output, status.step


def events_of(folder):
    return [json.loads(line) for line in (folder / "events" / "run.jsonl").read_text().splitlines()]


@pytest.mark.timeout(400)
def test_a_stopped_launcher_leaves_a_run_that_ends_as_if_never_stopped(tmp_path, deep_model):
    data = write_conversations(tmp_path / "chats.jsonl", 40, seed=2)
    yaml = tmp_path / "run.yaml"
    yaml.write_text(YAML.format(model=deep_model, data=data, output=tmp_path / "whole"), encoding="utf-8")
    train_all([(str(yaml), [], str(tmp_path / "whole"))], 2)
    for attempt in range(6):  # an evaluation may be over before the signal has gone from the launcher to its ranks
        run = RunFolder(tmp_path / f"stopped-{attempt}")
        output, first = stop_in("evaluate", signal.SIGUSR2, yaml, run)
        if first % 5 == 0:
            break
    assert "stopped by SIGUSR2 after step" in output
    often = ("checkpoint.every=1", "checkpoint.async=false")  # most of its time goes into saving
    output, second = stop_in("save", signal.SIGINT, yaml, run, *often)
    assert f"going on from step-{first:08d}" in output and second > first
    assert "stopped by SIGINT after step" in output, "what was asked for, and not what the launcher passes on"
    train_all([(str(yaml), [], str(run.path))], 2)
    assert [line["step"] for line in events_of(run.path) if line["type"] == "resume"] == [first, second]
    ours, whole = (load_file(path / "final" / "model.safetensors") for path in (run.path, tmp_path / "whole"))
    assert all(torch.equal(ours[name], whole[name]) for name in whole)
    lines, undisturbed = (events_of(path) for path in (run.path, tmp_path / "whole"))
    assert [line["step"] for line in lines if line["type"] == "step"] == list(range(1, STEPS + 1))
    assert first % 5 == 0, "it was stopped in the middle of an evaluation"
    ours, theirs = ([(e["step"], e["loss"]) for e in each if e["type"] == "eval"] for each in (lines, undisturbed))
    assert ours == theirs, "each is made, that one too, and once"
    best = [json.loads((path / "checkpoints" / f"step-{STEPS:08d}" / "state.json").read_text())["progress"]
            for path in (run.path, tmp_path / "whole")]  # fmt: skip
    assert best[0]["best_step"] == best[1]["best_step"]


def test_what_a_script_put_into_the_background_stops_by_sigterm_alone(tmp_path, tiny_model):
    data = write_conversations(tmp_path / "chats.jsonl", 40, seed=2)
    run = RunFolder(tmp_path / "run")
    yaml = tmp_path / "run.yaml"
    yaml.write_text(YAML.format(model=tiny_model, data=data, output=run.path), encoding="utf-8")
    process = start_in_background(yaml, "train.epochs=200")
    try:
        ranks = wait_for_ranks(run, 2, lambda beat: beat.step >= 2, within_s=DEADLINE_S)
        for name in ("SIGINT", "SIGHUP", "SIGINT"):  # a terminal sends them to all of a session
            os.killpg(process.pid, getattr(signal, name))
            strike(ranks.values(), name)
        later = max(beat.step for beat in ranks.values()) + 5
        wait_for_ranks(run, 2, lambda beat: beat.step >= later, within_s=DEADLINE_S)
        assert process.poll() is None and read_status(run).state == "running"
        process.send_signal(signal.SIGTERM)
        code, output = finish(process)
    finally:
        process.kill()
    assert code == 75 and "stopped by SIGTERM" in output and "Traceback" not in output, output
    step = read_status(run).step
    assert (run.checkpoints / f"step-{step:08d}").is_dir() and step >= later
