"""Room on the disk before DeepSpeed writes there: it looks at no answer of a write, and would go on with half a file.

All that a process will keep is reserved once by all ranks together, so that a full disk is seen before the first step;
and each file has its room before its first write, so that a disk that others filled since then is seen there. What is
written later lies in blocks that the file has. For deepspeed_disk.py.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from duoka.comm.world import World
from duoka.errors import StorageError
from duoka.optim.disk_file import disk_fault

WHAT = "what DeepSpeed keeps on the disk"
ELSEWHERE = "free some space, or write   folder:   of another disk"
AGAIN = (
    "the newest checkpoint is intact: free some space, and the same command goes on from it, also with another "
    "offload.folder or without"
)


def reserve_room(folder: Path, num_bytes: int, world: World) -> None:
    """Raises StorageError on every rank where one of them does not find its room. All ranks call it."""
    fault: StorageError | None = None
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, max(1, num_bytes))
        except OSError as error:
            fault = disk_fault(WHAT, "cannot be kept there", error, folder, num_bytes, ELSEWHERE)
        # Only now is it given back: ranks of one disk need their room at once.
        told = world.gather(None if fault is None else (fault.what, fault.where))
    for rank, one in enumerate(told):
        if one is not None:
            raise StorageError(one[0], where=f"rank {rank}: {one[1]}" if world.size > 1 else one[1], fix=ELSEWHERE)


class RoomFirst:
    """DeepSpeed's handle of its files with room taken before a file's first write; for all else, it is that handle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._has_room: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def async_pwrite(self, buffer: torch.Tensor, path: str, offset: int = 0) -> int:
        if path not in self._has_room:
            take_room(Path(path), offset + buffer.nbytes)
            self._has_room.add(path)
        done: int = self._handle.async_pwrite(buffer, path, offset)
        return done


def take_room(path: Path, num_bytes: int) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(handle, 0, num_bytes)
        finally:
            os.close(handle)
    except OSError as error:
        raise disk_fault(WHAT, "cannot be written", error, path.parent, num_bytes, AGAIN) from None


def with_room(module: Any) -> None:
    """From now on, of all handles that DeepSpeed's compiled module makes."""
    make: Callable[..., Any] = module.aio_handle
    if isinstance(make, type):  # it is the module's own still
        module.aio_handle = lambda *arguments, **settings: RoomFirst(make(*arguments, **settings))
