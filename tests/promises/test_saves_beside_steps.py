"""Promise 3: a save that is written while training goes on holds exactly the step at which it was asked for."""

import os
import signal
import time
from pathlib import Path

import pytest
from tiny import write_conversations
from worlds import run_world

STEPS = 4
LONGEST_STEP_S = 0.4  # how long a writer waits for a step; the run's last save meets none
YAML = """
model: {model}
data: {{train: [{data}], max_length: 256}}
optim: {{lr: 5e-3}}
train: {{max_steps: 4, global_batch: 4, precision: fp32}}
checkpoint: {{every: 1, keep: 9}}
faults: {{nonfinite: rollback}}
output: {output}
"""
NAN = "nan step=3"  # the run goes back to step 2 while that one is being written


def train_beside_slow_saves(jobs):
    """Every (yaml, overrides, folder, orders, step whose save meets a SIGTERM) in turn, and once more after a stop."""
    from duoka.comm.world import end_world, start_world
    from duoka.config.load import load_config
    from duoka.parallel import inject
    from duoka.runs.folder import RunFolder
    from duoka.store import host_live_copy, snapshot
    from duoka.train.main import read_inputs, run_in_world

    snapshot.CHUNK_BYTES = 1 << 16
    copies = Counting(host_live_copy.HeapBuffer)
    host_live_copy.HeapBuffer = copies
    world, real = None, snapshot.zlib
    for yaml, overrides, folder, orders, stop_at in jobs:
        os.environ["DUOKA_INJECT"] = orders
        inject.forget()
        snapshot.zlib = real
        loaded = load_config(yaml, overrides)
        is_beside = loaded.config.checkpoint.is_async
        if is_beside:
            snapshot.zlib = SlowChecksum(copies, stop_at if os.environ.get("RANK", "0") == "0" else None, Path(folder))
        run = RunFolder(Path(folder))
        run.make()
        inputs = read_inputs(loaded, run)
        world = world or start_world(loaded.config.parallel)
        before = copies.number
        codes = [run_in_world(inputs, world)]
        while codes[-1] == 75:
            codes.append(run_in_world(inputs, world))
        assert codes == ([75, 0] if stop_at else [0])
        assert (copies.number > before) == is_beside, "steps did not meet the writer"
    end_world(world)


class Counting:
    """A class whose objects are counted."""

    def __init__(self, kind):
        self.kind, self.number = kind, 0

    def __call__(self, *arguments):
        self.number += 1
        return self.kind(*arguments)


class SlowChecksum:
    """zlib for the writer of tensors: waits until a step has met it in its file, and SIGTERM may come meanwhile."""

    def __init__(self, copies, stop_at, folder):
        self.copies = copies
        self.draft = folder / "checkpoints" / f".step-{stop_at or 0:08d}.draft"

    def crc32(self, part, before):
        import zlib

        if self.draft.exists():
            self.draft = Path("sent")
            os.kill(os.getpid(), signal.SIGTERM)
        number, deadline = self.copies.number, time.monotonic() + LONGEST_STEP_S
        while before == 0 and self.copies.number == number and time.monotonic() < deadline:
            time.sleep(0.002)
        return zlib.crc32(part, before)


def files_of(folder):
    """Tensors and counts of all checkpoints, as bytes."""
    paths = [*folder.glob("checkpoints/step-*/tensors-*"), *folder.glob("checkpoints/step-*/state.json")]
    return {path.relative_to(folder): path.read_bytes() for path in paths}


@pytest.mark.parametrize(
    "size, strategies",
    [(1, ["single"]), (2, ["ddp", "fsdp"]), pytest.param(2, ["zero1"], marks=pytest.mark.nightly)],
)
def test_a_slow_save_holds_its_own_step(tmp_path, deep_model, size, strategies):
    data = write_conversations(tmp_path / "chats.jsonl", 40, seed=3)
    yaml = tmp_path / "run.yaml"
    yaml.write_text(YAML.format(model=deep_model, data=data, output=tmp_path / "out"), encoding="utf-8")
    jobs = []
    for place, strategy in enumerate(strategies):
        given = [f"parallel.strategy={strategy}"]
        jobs.append((str(yaml), [*given, "checkpoint.async=false"], str(tmp_path / strategy / "waits"), "", None))
        stop_at = 3 if place == 0 else None
        jobs.append((str(yaml), given, str(tmp_path / strategy / "beside"), NAN, stop_at))
    run_world(size, train_beside_slow_saves, jobs)
    for strategy in strategies:
        ours, want = (files_of(tmp_path / strategy / name) for name in ("beside", "waits"))
        assert ours.keys() == want.keys() and len({path.parent for path in want}) == STEPS
        assert [str(path) for path in want if ours[path] != want[path]] == []
