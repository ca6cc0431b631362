"""Ranks of one machine that each hold a whole model: its files come from the disk once, however many they are."""

import json
import os
import time
from pathlib import Path

import pytest
import torch
from tiny import write_tiny_model
from worlds import run_world

IO = Path("/proc/self/io")
RANKS = 3


def bytes_from_disk():
    """By this process, what the page cache already held not counted."""
    return next(int(line.split()[1]) for line in IO.read_text().splitlines() if line.startswith("read_bytes"))


def forget(folder):
    """The files' pages leave the page cache."""
    for file in folder.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def load_whole(model, folder):
    """Ranks begin together, and may each be the first that needs a page."""
    import torch.distributed as dist

    from duoka.model.build import load_model
    from duoka.model.request import ModelRequest

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    load_model(ModelRequest(Path(model), dtype=torch.float32))  # imports, and what they read
    dist.barrier()
    if rank == 0:
        forget(Path(model))
    dist.barrier()
    before = bytes_from_disk()
    lm = load_model(ModelRequest(Path(model), dtype=torch.float32))
    total = sum(float(one.double().sum()) for one in lm.parameters())
    Path(folder, f"{rank}.json").write_text(json.dumps([bytes_from_disk() - before, total]))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.skipif(not IO.exists() or not hasattr(os, "posix_fadvise"), reason="reads /proc and empties its cache")
def test_a_model_comes_from_the_disk_once_for_all_ranks_of_a_machine(tmp_path):
    model = write_tiny_model(tmp_path / "model", tied=False, hidden=1024, layers=4, dtype="float32")
    file = model / "model.safetensors"
    size = file.stat().st_size
    forget(model)
    time.sleep(0.2)
    before = bytes_from_disk()
    file.read_bytes()
    if bytes_from_disk() - before < 0.9 * size:
        pytest.skip("this file system has no page cache that can be emptied")
    run_world(RANKS, load_whole, str(model), str(tmp_path))
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    assert len({total for _, total in found}) == 1
    assert 0.9 * size < sum(read for read, _ in found) < 1.3 * size, (size, found)
