"""A save that reads live tensors: what a step, or anybody else, changes while it is being written."""

import os
import time
import zlib

import pytest
import torch
from test_checkpoint import make_contents

from duoka.comm.world import World
from duoka.plan.layout import Layout
from duoka.store import checkpoint, host_live_copy, snapshot
from duoka.store.checkpoint import CheckpointStore, SaveFault
from duoka.store.retention import Keep


class SlowChecksum:
    """zlib for the writer of tensors, which takes a checksum of each part."""

    def crc32(self, *arguments):
        time.sleep(0.005)
        return zlib.crc32(*arguments)


@pytest.mark.parametrize("free_bytes", [1 << 30, 0], ids=["who trains copies", "who trains waits"])
def test_a_step_meets_the_writer_in_the_middle_of_a_file(tmp_path, monkeypatch, free_bytes):
    monkeypatch.setattr(snapshot, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(snapshot, "zlib", SlowChecksum())
    monkeypatch.setattr(checkpoint, "available_memory_bytes", lambda: free_bytes)
    contents, other = make_contents(1, size=40), make_contents(2, size=40)
    store = CheckpointStore(tmp_path, World(), Layout())
    for step in (1, 2):
        before = {name: tensor.clone() for name, tensor in contents.tensors().items()}
        contents.state.step = step
        store.save(contents, Keep())
        time.sleep(0.02)
        contents.optimizer.step()
        ended = store.wait()
        assert 0 < ended.blocked_s < ended.write_s
        assert bool(store._spare) == bool(free_bytes), "the next save finds what this one needed"
        store.load(ended.path, other)
        assert all(torch.equal(other.tensors()[name], tensor) for name, tensor in before.items())
        assert not all(torch.equal(contents.tensors()[name], tensor) for name, tensor in before.items())
    contents.state.step = 3
    assert store.save(contents, Keep()) is None and store.wait() is not None
    assert store._spare == [], "no step met this one"
    store.close()


def test_weights_that_change_without_a_word_are_never_called_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(snapshot, "zlib", SlowChecksum())
    contents = make_contents(1, size=40)
    store = CheckpointStore(tmp_path, World(), Layout())
    store.save(contents, Keep())
    with torch.no_grad():
        contents.engine.bare.lm[0].weight.add_(1.0)
    fault = store.wait()
    assert isinstance(fault, SaveFault) and "changed while they were being saved" in fault.where
    assert os.listdir(tmp_path) == []
    store.close()


def test_without_memory_for_a_copy_the_step_waits_for_the_writer(tmp_path, monkeypatch):
    def nothing_left(num_bytes):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(snapshot, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(snapshot, "zlib", SlowChecksum())
    monkeypatch.setattr(host_live_copy, "HeapBuffer", nothing_left)
    contents = make_contents(1, size=40)
    store = CheckpointStore(tmp_path, World(), Layout())
    store.save(contents, Keep())
    contents.optimizer.step()
    assert store.wait().blocked_s > 0 and store._spare == []
    store.close()
