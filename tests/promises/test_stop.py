"""A run that is told to stop saves, leaves with the code "resume me", and the same command ends as if never stopped."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from tiny import write_conversations

YAML = """
model: {model}
data: {{train: [{data}], max_length: 256}}
optim: {{lr: 2e-3}}
train: {{epochs: 40, global_batch: 8, precision: fp32}}
checkpoint: {{every: 1000}}
output: {output}
"""
DEADLINE_S = 120


def start(yaml, *arguments):
    """`duoka train` as a user types it, in a session of its own."""
    command = [sys.executable, "-m", "duoka", "train", str(yaml), "--nproc", "2", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip


def finish(process):
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output


def wait_for_step(folder, step):
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        log = folder / "events" / "run.jsonl"
        if log.exists() and log.read_text(encoding="utf-8").count('"type": "step"') >= step:
            return
        time.sleep(0.05)
    raise TimeoutError(f"{folder} never reached step {step}")


@pytest.fixture(scope="module")
def case(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("stop")
    data = write_conversations(folder / "chats.jsonl", 40, seed=2)
    yaml = folder / "run.yaml"
    yaml.write_text(YAML.format(model=tiny_model, data=data, output=folder / "stopped"), encoding="utf-8")
    return folder, yaml


@pytest.mark.timeout(400)
def test_sigterm_saves_and_the_same_command_ends_as_if_never_stopped(case):
    folder, yaml = case
    process = start(yaml)
    wait_for_step(folder / "stopped", 5)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 75, output
    assert "Traceback" not in output
    status = json.loads((folder / "stopped" / "status.json").read_text(encoding="utf-8"))
    assert status["state"] == "stopped" and status["exit_code"] == 75
    saved = [path.name for path in (folder / "stopped" / "checkpoints").iterdir()]
    assert saved == [f"step-{status['step']:08d}"] and 5 <= status["step"] < 200

    code, output = finish(start(yaml))
    assert code == 0, output
    assert f"going on from {saved[0]}" in output
    code, output = finish(start(yaml, f"output={folder / 'whole'}"))
    assert code == 0, output
    ours = load_file(folder / "stopped" / "final" / "model.safetensors")
    whole = load_file(folder / "whole" / "final" / "model.safetensors")
    assert all(torch.equal(ours[name], whole[name]) for name in whole)
    lines = [json.loads(line) for line in (folder / "stopped" / "events" / "run.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if line["type"] == "step"]
    assert steps == list(range(1, 201))
