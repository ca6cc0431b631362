"""This rank's share of a checkpoint: which tensors it writes, their copy in host memory, and the file that holds it.

Files are safetensors with the shards' offsets in their header, as torch's DCP reads them. Written past the page cache
where the file system can: a large checkpoint would otherwise push everything else out of memory, and cost ten times
the processor time, which training wants. Called by checkpoint.py; only `plan_share` communicates.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import mmap
import os
import threading
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan as PlannedSave
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.utils import find_state_dict_object

from duoka.comm.world import World
from duoka.model.dtypes import SAFETENSORS
from duoka.optim.disk_file import find_on_disk
from duoka.runs.manifest import FileRecord
from duoka.store.reader import PIECE

PAGE_BYTES = 4096  # what writing past the page cache wants addresses, offsets and lengths to be multiples of
CHUNK_BYTES = 8 * 2**20  # what the C library takes from its heap, where passes have left as much room
_CUT_BYTES = 4 * 2**20  # large enough for memcpy to write past the caches, small enough to share out
_DIRECT = getattr(os, "O_DIRECT", 0)
_NO_DIRECT = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)

# A part of a file: whole pages of memory, and how many bytes of them count.
Chunk = tuple[memoryview, int]


@dataclass(frozen=True)
class SavedPart:
    """One tensor, or this rank's shard of it, and where its bytes lie in the file."""

    index: MetadataIndex
    start: int
    size_bytes: int


@dataclass(frozen=True)
class SavePlan:
    """What this rank writes of a checkpoint: one file, laid out alike at every save of a run."""

    header: bytes
    pieces: tuple[SavedPart, ...]
    size_bytes: int  # of the file


def plan_share(tensors: Mapping[str, torch.Tensor], world: World) -> SavePlan:
    """Divide what has to be written: shards where they are, replicated tensors in equal parts. All ranks call it."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(tensors), is_coordinator=world.is_main)
    return lay_out(divide(planner, world.gather(planner.create_local_plan()), world.rank))


def divide(planner: DefaultSavePlanner, plans: list[PlannedSave], rank: int) -> PlannedSave:
    """What `rank` writes, of what each rank has: all find the same division by themselves, nothing is sent back."""
    return planner.create_global_plan(plans)[0][rank]


def lay_out(own: PlannedSave) -> SavePlan:
    """The file of one rank."""
    # Widest types first, so that every tensor's bytes are aligned to its type.
    items = sorted(own.items, key=lambda item: (-_dtype(item).itemsize, item.index.fqn, item.index.offset or ()))
    sizes = [item.tensor_data.chunk.sizes.numel() * _dtype(item).itemsize for item in items]  # type: ignore[union-attr]
    starts = [0, *itertools.accumulate(sizes)][: len(sizes)]
    header = _header(items, starts, sizes)
    pieces = tuple(
        SavedPart(item.index, len(header) + start, size) for item, start, size in zip(items, starts, sizes, strict=True)
    )
    return SavePlan(header, pieces, len(header) + sum(sizes))


def _dtype(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None, f"{item.index.fqn} is no tensor"
    return item.tensor_data.properties.dtype


def _header(items: list[WriteItem], starts: list[int], sizes: list[int]) -> bytes:
    """What a safetensors file begins with: the header's length, then JSON, padded to whole pages."""
    entries, offsets, found = {}, {}, Counter[str]()
    for item, start, size in zip(items, starts, sizes, strict=True):
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        # A rank's part of a tensor may be several boxes (parallel/flat_shard.py).
        before = found[item.index.fqn]
        found[item.index.fqn] += 1
        name = f"{item.index.fqn}{PIECE}{before}" if before else item.index.fqn
        entries[name] = {
            "dtype": SAFETENSORS[_dtype(item)], "shape": list(chunk.sizes), "data_offsets": [start, start + size],
        }  # fmt: skip
        offsets[name] = {"saved_offsets": list(chunk.offsets)}
    notes = {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets), "format": "pt"}
    text = json.dumps({"__metadata__": notes, **entries}, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % PAGE_BYTES)
    return len(text).to_bytes(8, "little") + text


class HostBuffer:
    """Page-aligned host memory for a file or a part of one; for a GPU pinned, so that copies run at the bus's speed."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._memory = mmap.mmap(-1, _whole_pages(num_bytes))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.device = device
        self.is_pinned = False

    def touch(self, *, may_pin: bool = True) -> None:
        """Have the memory ready: the first touch of a page costs several times what a copy into it does.

        Pinning takes as long again, tens of seconds for a large share: beside the first steps. Pinned memory cannot be
        swapped; where it would take most of what is free, copies may be slow instead (`may_pin`).
        """
        self.bytes.zero_()
        if self.device.type == "cuda" and may_pin:
            address, size = self.bytes.data_ptr(), self.bytes.numel()
            self.is_pinned = int(torch.cuda.cudart().cudaHostRegister(address, size, 0)) == 0

    def chunks(self, size_bytes: int) -> Iterator[Chunk]:
        """The first `size_bytes`, part by part."""
        return _cut(memoryview(self._memory), size_bytes)

    def close(self) -> None:
        if self.is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())
            self.is_pinned = False


class HeapBuffer:
    """Page-aligned memory from the C library's heap: where passes left room, it is there without a page fault."""

    def __init__(self, num_bytes: int) -> None:
        size = _whole_pages(num_bytes)
        whole = torch.empty(size + PAGE_BYTES, dtype=torch.uint8)
        first = -whole.data_ptr() % PAGE_BYTES
        self.bytes = whole[first : first + size]
        self.is_pinned = False

    def chunks(self, size_bytes: int) -> Iterator[Chunk]:
        """The first `size_bytes`, part by part."""
        return _cut(self.bytes.numpy().data, size_bytes)


def _cut(memory: memoryview, size_bytes: int) -> Iterator[Chunk]:
    for start in range(0, size_bytes, CHUNK_BYTES):
        size = min(CHUNK_BYTES, size_bytes - start)
        yield memory[start : start + _whole_pages(size)], size


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def copy_on_host(parts: Iterable[tuple[torch.Tensor, torch.Tensor]], num_threads: int) -> None:
    """Copy bytes (target, values) by memcpy on so many threads, which torch's own copies of bytes don't reach.

    Threads take what comes next rather than an equal part each: on a busy machine one may get a core late.
    """
    cuts = (
        (target.numpy()[at : at + _CUT_BYTES], values.numpy()[at : at + _CUT_BYTES])
        for target, values in parts
        for at in range(0, values.numel(), _CUT_BYTES)
    )
    todo = deque(cuts)

    def work() -> None:
        with contextlib.suppress(IndexError):
            while True:
                np.copyto(*todo.popleft())

    others = [threading.Thread(target=work, name="duoka-copy") for _ in range(num_threads - 1)]
    for thread in others:
        thread.start()
    work()
    for thread in others:
        thread.join()


class Copier:
    """Puts the file together in host memory, from the live tensors."""

    def __init__(self, share: SavePlan, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self.share = share
        self.device = device
        self._header = torch.frombuffer(bytearray(share.header), dtype=torch.uint8)
        self._live: list[tuple[SavedPart, torch.Tensor]] = [
            (piece, find_state_dict_object(tensors, piece.index).detach())  # type: ignore[arg-type]
            for piece in share.pieces
        ]

    def versions(self) -> list[int]:
        """torch's counts of changes, a tensor each. AdamW's fused kernel counts none, but for its numbers of steps."""
        return [0 if values.is_inference() else values._version for _, values in self._live]

    def fill(self, buffer: HostBuffer | HeapBuffer, start: int, stop: int, num_threads: int | None = None) -> None:
        """Bytes `start` to `stop` of the file to the beginning of the buffer; returns when they are there."""
        copies = [(self._header, 0)]
        for piece, values in self._live:
            if piece.start < stop and start < piece.start + piece.size_bytes:
                copies.append((values.reshape(-1).view(torch.uint8), piece.start))
        parts = []
        for values, at in copies:
            first, last = max(start, at), min(stop, at + values.numel())
            if first < last:
                parts.append((buffer.bytes[first - start : last - start], values[first - at : last - at]))
        parts = [(target, values) for target, values in parts if not _read_from_disk(target, values)]
        if self.device.type == "cpu":
            return copy_on_host(parts, num_threads or torch.get_num_threads())
        for target, values in parts:
            target.copy_(values, non_blocking=buffer.is_pinned)
        if buffer.is_pinned:
            torch.cuda.synchronize(self.device)

    def chunks(self, buffer: HostBuffer) -> Iterator[Chunk]:
        """The whole file through a buffer of CHUNK_BYTES, where there is no memory for a copy."""
        for start in range(0, self.share.size_bytes, CHUNK_BYTES):
            stop = min(start + CHUNK_BYTES, self.share.size_bytes)
            self.fill(buffer, start, stop)
            yield from buffer.chunks(stop - start)


def _read_from_disk(target: torch.Tensor, values: torch.Tensor) -> bool:
    """Copy what lies on a disk past its mapping, whose faults no one could report; False: it lies in memory."""
    place = find_on_disk(values)
    if place is not None:
        place[0].read_tensor(place[1], target)
    return place is not None


def write_share(path: Path, chunks: Callable[[], Iterator[Chunk]]) -> FileRecord:
    """Write the file and have it on the disk, past the page cache where the file system can."""
    handle = _open(path)
    checksum = size_bytes = 0
    try:
        for pages, size in chunks():
            checksum = zlib.crc32(pages[:size], checksum)
            size_bytes += size
            _write(handle, pages)
        os.ftruncate(handle, size_bytes)  # what only filled the last page
        os.fsync(handle)
    finally:
        os.close(handle)
    return FileRecord(size_bytes, f"{checksum:08x}")


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        return os.open(path, flags | _DIRECT, 0o666)
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
        return os.open(path, flags, 0o666)


def _write(handle: int, left: memoryview) -> None:
    while left:
        try:
            left = left[os.write(handle, left) :]
        except OSError as error:
            if not _DIRECT or error.errno not in _NO_DIRECT:
                raise
            import fcntl

            # Some file systems say so only now: the rest of the file goes through the page cache.
            flags = fcntl.fcntl(handle, fcntl.F_GETFL)
            if not flags & _DIRECT:
                raise
            fcntl.fcntl(handle, fcntl.F_SETFL, flags & ~_DIRECT)
