"""A full disk under DeepSpeed's files: seen before the first step on every rank, and at a file's first write."""

import errno
import os
from pathlib import Path

import pytest
import torch

from duoka.comm.world import World
from duoka.errors import StorageError
from duoka.parallel.deepspeed_disk import needed_bytes
from duoka.parallel.deepspeed_room import RoomFirst, reserve_room, with_room


class Handle:
    """DeepSpeed's, which says that all is well whatever the disk says."""

    def __init__(self, block_size: int = 0) -> None:
        self.block_size, self.written = block_size, list[str]()

    def async_pwrite(self, buffer: torch.Tensor, path: str, offset: int) -> int:
        self.written.append(path)
        return 0

    def wait(self) -> int:
        return len(self.written)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)


def test_a_full_disk_is_seen_before_the_first_step_with_the_need(tmp_path: Path, full: None) -> None:
    with pytest.raises(StorageError) as refused:
        reserve_room(tmp_path, 3 << 30, World())
    words = str(refused.value)
    assert refused.value.exit_code == 6 and "what DeepSpeed keeps on the disk does not fit on the disk" in words
    assert "are free" in words and "3 GiB needed by this process" in words and "folder:" in words
    assert not list(tmp_path.iterdir())


def test_ranks_that_found_room_hear_of_one_that_did_not(tmp_path: Path) -> None:
    class Two(World):
        def gather(self, value: object) -> list[object]:
            return [value, ("what DeepSpeed keeps on the disk does not fit on the disk", "/fast: full")]

    with pytest.raises(StorageError, match="rank 1: /fast: full"):
        reserve_room(tmp_path, 4096, Two(size=2))


def test_the_room_is_given_back_for_the_files_themselves(tmp_path: Path) -> None:
    reserve_room(tmp_path, 1 << 20, World())
    assert not list(tmp_path.iterdir())


def test_each_file_has_its_room_before_its_first_write_and_a_full_disk_is_no_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Module:
        aio_handle = Handle

    with_room(Module)
    with_room(Module)  # another engine of the same process
    handle = Module.aio_handle(block_size=7)
    assert isinstance(handle, RoomFirst) and handle.block_size == 7
    one, two = str(tmp_path / "1.tensor.swp"), str(tmp_path / "2.tensor.swp")
    values = torch.zeros(5000)
    assert handle.async_pwrite(values, one, 0) == 0 and handle.wait() == 1
    assert os.path.getsize(one) == 20000 <= os.stat(one).st_blocks * 512

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert handle.async_pwrite(values, one, 0) == 0, "it has its room"
    with pytest.raises(StorageError, match="does not fit on the disk") as refused:
        handle.async_pwrite(values, two, 0)
    assert "newest checkpoint is intact" in str(refused.value) and two not in handle.written


def test_the_need_is_of_a_ranks_parts() -> None:
    model = torch.nn.Linear(10, 5, bias=False)
    assert needed_bytes(model, 2, weights_too=False) == 25 * 16  # weights, two moments, gradients
    assert needed_bytes(model, 2, weights_too=True) == 25 * 20
    model.weight.requires_grad_(False)
    assert needed_bytes(model, 2, weights_too=True) == 25 * 4
