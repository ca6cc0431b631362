"""Promise: with its state on a disk, a run trains in a third of the memory that the state takes, and to the same bits.

A memory cgroup holds the whole run: launcher, fork server, ranks, and what the kernel caches of files for them.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors import safe_open
from tiny import write_conversations, write_tiny_model

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

MIB = 2**20
YAML = """
model: {name: model}
data: {train: [chats.jsonl], max_length: 64}
train: {global_batch: 4, micro_batch: 1, max_steps: 2, precision: fp32, recompute: full}
parallel: {strategy: zero3}
checkpoint: {every: 100}
log: {to: []}
"""
HIDDEN = 768
# processes -> (layers, MiB for all of the run)
CASES = {1: (27, 850), 2: (46, 1350)}


class Group:
    """A memory cgroup of either version, removed at the end."""

    def __init__(self, limit_bytes):
        first, second = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
        self.is_old = (first / "memory.limit_in_bytes").exists()
        self.folder = (first if self.is_old else second) / f"duoka_test_{os.getpid()}"
        try:
            self.folder.mkdir()
            (self.folder / ("memory.limit_in_bytes" if self.is_old else "memory.max")).write_text(str(limit_bytes))
        except OSError as error:
            if self.folder.is_dir():
                self.folder.rmdir()
            pytest.skip(f"NO MEMORY CGROUP CAN BE MADE HERE, so nothing was proven: {error}")

    def enter(self):
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self):
        until = time.monotonic() + 10
        while time.monotonic() < until:
            try:
                return self.folder.rmdir()
            except OSError:
                time.sleep(0.05)
        raise AssertionError(f"processes are left: {(self.folder / 'cgroup.procs').read_text()}")


def train(folder, *words, enter=None):
    """(own bytes of the largest process at their most, what was said, exit code) of one `duoka train`."""
    command = [sys.executable, "-m", "duoka", "train", "run.yaml", *words]
    with (folder / "said").open("w+") as said:
        process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=said, stderr=said, preexec_fn=enter
        )
        most = 0
        while process.poll() is None:
            most = max(most, max(map(own_bytes, family(process.pid)), default=0))
            time.sleep(0.01)
        said.seek(0)
        return most, said.read(), process.returncode


def family(pid):
    try:
        return [one.pid for one in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []


def own_bytes(pid):
    try:
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return 1024 * sum(int(lines[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    except (OSError, KeyError):
        return 0


def losses(run):
    lines = map(json.loads, (run / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines())
    return [(one["loss"], one["grad_norm"]) for one in lines if one["type"] == "step"]


@pytest.mark.parametrize("processes", CASES)
def test_state_of_three_times_the_memory_trains_to_the_same_bits(tmp_path, processes):
    layers, limit = CASES[processes]
    write_conversations(tmp_path / "chats.jsonl", 24, seed=3)
    write_tiny_model(tmp_path / "model", hidden=HIDDEN, layers=layers)
    (tmp_path / "run.yaml").write_text(YAML, encoding="utf-8")
    size = (tmp_path / "model" / "model.safetensors").stat().st_size
    assert 4 * size > 3 * limit * MIB, "weights, gradients and two moments in fp32"

    count = f"--nproc={processes}"
    _, said, code = train(tmp_path, count, "output=plain")
    assert code == 0, said
    group = Group(limit * MIB)
    try:
        own, said, code = train(tmp_path, count, "output=disk", "parallel.offload={params: disk}", enter=group.enter)
    finally:
        group.remove()
    assert code == 0, said

    assert losses(tmp_path / "disk") == losses(tmp_path / "plain")
    files = [safe_open(tmp_path / run / "final" / "model.safetensors", "pt") for run in ("plain", "disk")]
    for name in files[0].keys():  # noqa: SIM118 - not a mapping
        assert files[0].get_tensor(name).equal(files[1].get_tensor(name)), name
    plan = json.loads((tmp_path / "disk" / "plan.json").read_text(encoding="utf-8"))
    print(f"own {own / MIB:.0f} MiB, planned {plan['memory']['peak_bytes'] / MIB:.0f}, state {4 * size / MIB:.0f}")
    assert own < plan["memory"]["peak_bytes"]
