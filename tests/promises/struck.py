"""Runs of `duoka train` that are struck, as a user starts them: shared by the tests of crashes, hangs and signals."""

import os
import subprocess
import sys

import torch
from commands import start_duoka
from safetensors.torch import load_file
from tiny import write_conversations
from worlds import train_all

from duoka.cluster.fault_injection import wait_for_ranks

YAML = """
model: {model}
data: {{train: [{data}], max_length: 256}}
lora: {{rank: 4, dropout: 0.2}}
optim: {{lr: 2e-3}}
train: {{epochs: {epochs}, global_batch: 8, precision: fp32}}
checkpoint: {{every: 4}}
output: {output}
"""
STEPS = 70  # of 14 epochs
WITHIN_S = 100


def make_case(folder, tiny_model, epochs=14):
    """(folder, yaml), and in folder/whole the run of two processes that nobody disturbs."""
    data = write_conversations(folder / "chats.jsonl", 40, seed=2)
    yaml = folder / "run.yaml"
    yaml.write_text(YAML.format(model=tiny_model, data=data, epochs=epochs, output=folder / "whole"), encoding="utf-8")
    train_all([(str(yaml), [], str(folder / "whole"))], 2)
    return folder, yaml


def start(yaml, output, *arguments, **env):
    """`duoka train` on two processes, forked."""
    return start_duoka("train", yaml, f"output={output}", "--nproc", "2", *arguments, env=env)


def start_really(yaml, output, *arguments, **env):
    """The same as a process that imports everything itself."""
    command = [sys.executable, "-m", "duoka", "train", str(yaml), f"output={output}", "--nproc", "2", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **env}
    )


def finish(process):
    try:
        output, _ = process.communicate(timeout=WITHIN_S * 4)  # of several worlds, on a machine that others use
    finally:
        process.kill()
    return process.returncode, output


def wait_for_step(run, step, old_pids=()):
    return wait_for_ranks(run, 2, lambda beat: beat.step >= step, old_pids=old_pids, within_s=WITHIN_S)


def same_weights(run, whole):
    ours = load_file(run / "final" / "adapter_model.safetensors")
    theirs = load_file(whole / "final" / "adapter_model.safetensors")
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
