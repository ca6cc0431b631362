"""Promise 4, while saving: ranks killed at any moment of a save leave a checkpoint to go on from, and no rubbish."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import write_conversations
from worlds import end_processes, run_world, start_processes

YAML = """
model: {model}
data: {{train: [{data}], max_length: 256}}
optim: {{lr: 2e-3}}
train: {{epochs: 4, global_batch: 8, precision: fp32}}
checkpoint: {{every: 1, keep: 2}}
output: {output}
"""
STEPS = 20
KEEP = 2
SAVE_S = 0.15  # a save is slowed down to about this, so that most kills meet one


def train_slowly(yaml, folder, slow):
    """One run as this process's rank, whose saves take their time in every part."""
    from duoka.comm.world import end_world, start_world
    from duoka.config.load import load_config
    from duoka.runs.folder import RunFolder
    from duoka.store import checkpoint, snapshot
    from duoka.train.main import read_inputs, run_in_world

    if slow:
        snapshot.CHUNK_BYTES = 1 << 18
        for module, name in ((checkpoint, "write_manifest"), (checkpoint, "remove_old"), (checkpoint, "write_file")):
            setattr(module, name, _slowed(getattr(module, name), SAVE_S / 6))
        snapshot.zlib = _SlowChecksum()
    run = RunFolder(Path(folder))
    run.make()
    loaded = load_config(yaml)
    world = start_world(loaded.config.parallel)
    try:
        assert run_in_world(read_inputs(loaded, run), world) == 0
    finally:
        end_world(world)


def _slowed(function, seconds):
    def slow(*arguments, **options):
        time.sleep(seconds)
        return function(*arguments, **options)

    return slow


class _SlowChecksum:
    """zlib for the writer of tensors: one checksum per chunk, 8 to 20 of them a file here."""

    def crc32(self, *arguments):
        import zlib

        time.sleep(SAVE_S / 40)
        return zlib.crc32(*arguments)


@pytest.fixture(scope="module")
def case(tmp_path_factory, deep_model):
    folder = tmp_path_factory.mktemp("crash")
    data = write_conversations(folder / "chats.jsonl", 40, seed=2)
    yaml = folder / "run.yaml"
    yaml.write_text(YAML.format(model=deep_model, data=data, output=folder / "out"), encoding="utf-8")
    run_world(2, train_slowly, str(yaml), str(folder / "whole"), False)
    return folder, yaml


def num_starts(run):
    """How often this run has got to its first step."""
    log = run / "events" / "run.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return sum('"type": "run"' in line or '"type": "resume"' in line for line in lines)


def kill_while_saving(yaml, run, seed):
    """Start the run, kill one rank or both at a moment of a save that the seed chooses; whether the others left.

    In plain loops of torch's collectives too, one in 125 waits for ever: gloo may lose the news that a peer has gone. A
    launcher ends such a rank (test_crash_signals), and here nobody launched it.
    """
    dice = random.Random(seed)
    num_saves = dice.randint(1, 2)
    before = num_starts(run)
    processes = start_processes(2, train_slowly, str(yaml), str(run), True)
    try:
        seen = set()
        deadline = time.monotonic() + 60
        while len(seen) < num_saves and time.monotonic() < deadline and all(p.is_alive() for p in processes):
            if num_starts(run) == before:
                continue  # what lies there is the last trial's
            seen |= {path.name for path in (run / "checkpoints").glob(".step-*.draft")}
            time.sleep(0.001)
        time.sleep(dice.random() * SAVE_S * 1.3)
        victims = dice.choice(([0], [1], [0, 1]))
        for rank in victims:
            if processes[rank].is_alive():
                os.kill(processes[rank].pid, signal.SIGKILL)
        for process in processes:
            process.join(20)
        return not any(process.is_alive() for process in processes)
    finally:
        end_processes(processes)


def check_folder(run, seed):
    """Whatever was killed: what has a final name is whole, and the disk holds no more than it may."""
    from duoka.comm.world import World
    from duoka.runs.manifest import list_checkpoints
    from duoka.store.resume import find_damage

    for folder in list_checkpoints(run / "checkpoints"):
        assert find_damage(folder, World()) == "", f"seed {seed}: {folder.name}"
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert len(names) <= KEEP + 3, f"seed {seed}: {names}"


def survive(case, name, seeds):
    folder, yaml = case
    run = folder / name
    stayed = []
    for seed in seeds:
        if not kill_while_saving(yaml, run, seed):
            stayed.append(seed)
        check_folder(run, seed)
    assert len(stayed) <= 1, f"seeds {stayed}: a rank hangs"
    run_world(2, train_slowly, str(yaml), str(run), False)
    left = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert left == [f"step-{step:08d}" for step in (STEPS - 1, STEPS)], left
    ours, whole = (load_file(path / "final" / "model.safetensors") for path in (run, folder / "whole"))
    for tensor in whole:
        assert torch.equal(ours[tensor], whole[tensor]), tensor
    return (run / "events" / "run.jsonl").read_text(encoding="utf-8")


@pytest.mark.timeout(240)
def test_kills_while_saving_cost_nothing_but_time(case):
    log = survive(case, "killed", range(5))
    assert "left half-written" in log, "what was cleaned is named"


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_25_kills_while_saving(case):
    for start in range(100, 125, 5):
        survive(case, f"killed-{start}", range(start, start + 5))
