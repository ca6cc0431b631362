"""A file that holds a run's tensors in place of memory: read and written in slices, gone when the process is.

It has no name (O_TMPFILE, or unlinked at once), so that a crash leaves nothing behind; all its room is taken at the
start, so that a full disk is seen there. Slices go past the page cache where the file system can. Every fault of the
disk is a StorageError that names the folder.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
import weakref
import zlib
from pathlib import Path

import numpy as np
import torch

from duoka.errors import StorageError
from duoka.runs.disk_room import reserve_disk
from duoka.units import format_bytes

PAGE_BYTES = 4096  # what reads and writes past the page cache want addresses, offsets and lengths to be multiples of
_DIRECT = getattr(os, "O_DIRECT", 0)
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, which Python has no name for
_UNNAMED = getattr(os, "O_TMPFILE", 0)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_AGAIN = (
    "the newest checkpoint is intact: the same command goes on from it, also with another offload.folder or without"
)

OF_ZEROS = zlib.crc32(bytes(PAGE_BYTES))  # the checksum of a file's first content
_FILES: weakref.WeakSet[DiskFile] = weakref.WeakSet()


def whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


class Slot:
    """Page-aligned memory that one slice is read into and written from."""

    def __init__(self, num_bytes: int) -> None:
        # Private: shared memory would not count as this process's own, where that is limited.
        own = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        self.memory = mmap.mmap(-1, max(PAGE_BYTES, whole_pages(num_bytes)), **own)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)

    def part(self, start: int, num_bytes: int) -> memoryview:
        return memoryview(self.memory)[start : start + num_bytes]


class DiskFile:
    """`size_bytes` of zeros in a file without a name under `folder`; `what` lies there, in users' words."""

    def __init__(self, folder: Path, size_bytes: int, what: str) -> None:
        self.folder, self.what = folder, what
        self.size_bytes = max(PAGE_BYTES, whole_pages(size_bytes))
        self._mapped: torch.Tensor | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._handle = _open_unnamed(folder)
        except OSError as error:
            raise self._fault(
                "cannot be kept", error, "write   folder:   of another disk, or offload to the host"
            ) from None
        try:
            reserve_disk(self._handle, self.size_bytes)
        except OSError as error:
            os.close(self._handle)
            del self._handle
            raise self._fault("does not fit", error, "free some space, or write   folder:   of another disk") from None
        # Some file systems take the flag and refuse what it asks for.
        self.is_direct = bool(_DIRECT) and self._try_direct()
        # For bytes that begin and end anywhere: through the page cache.
        self._loose = os.open(f"/proc/self/fd/{self._handle}", os.O_RDWR) if self.is_direct else os.dup(self._handle)
        _FILES.add(self)

    def __del__(self) -> None:
        for name in ("_handle", "_loose"):
            if hasattr(self, name):
                os.close(getattr(self, name))

    def read(self, start: int, into: memoryview, *, cached: bool = False) -> None:
        """Whole pages; `cached`: from the page cache, which was asked for them (`will_need`)."""
        try:
            _read(self._loose if cached else self._handle, start, into)
        except OSError as error:
            raise self._fault("cannot be read", error, _AGAIN) from None

    def write(self, start: int, values: memoryview) -> None:
        """Whole pages."""
        try:
            _write(self._handle, start, values)
        except OSError as error:
            raise self._fault("cannot be written", error, _AGAIN) from None

    def damaged(self) -> StorageError:
        """What was read is not what was written."""
        return StorageError(
            f"{self.what} came back from the disk other than it was written",
            where=f"{self.folder}: the checksum of a slice is wrong; the disk or its cable may be failing",
            fix=_AGAIN,
        )

    def mapped(self) -> torch.Tensor:
        """All of it as bytes, for what wants tensors. Large ones are better read by `read_tensor`: a fault of the disk
        under a mapping kills the process, and its pages count as the process's memory."""
        if self._mapped is None:
            self._mapping = mmap.mmap(self._handle, self.size_bytes)
            self._mapped = torch.frombuffer(self._mapping, dtype=torch.uint8)
        return self._mapped

    def part(self, start: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        """A tensor of the mapping, with a storage of its own."""
        self.mapped()
        if not (count := shape.numel()):
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=start).view(shape)

    def let_go(self) -> None:
        """Unmap what was looked at: it counts as this process's memory until then. The content stays."""
        if self._mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED)

    def will_need(self, start: int, num_bytes: int) -> None:
        """Begin to read a stretch of it into the page cache."""
        start, stop = max(0, start), min(self.size_bytes, start + num_bytes)
        if start < stop and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._loose, start, stop - start, os.POSIX_FADV_WILLNEED)

    def will_write(self, start: int, num_bytes: int) -> None:
        """Map a stretch of it at once, to be written: page by page, by who writes there, it costs twice as much."""
        begin = start // PAGE_BYTES * PAGE_BYTES
        with contextlib.suppress(OSError):  # Linux before 5.14
            self._mapping.madvise(_POPULATE_WRITE, begin, whole_pages(start + num_bytes) - begin)

    def place_of(self, tensor: torch.Tensor) -> int | None:
        """Where a tensor's bytes begin in the file; None for one that lies elsewhere."""
        start = -1 if self._mapped is None else tensor.data_ptr() - self._mapped.data_ptr()
        return start if 0 <= start < self.size_bytes else None

    def read_tensor(self, start: int, into: torch.Tensor) -> None:
        """Any bytes of it into a flat tensor of bytes. Raises OSError, as other files of a checkpoint do."""
        _read(self._loose, start, into.numpy().data)

    def write_tensor(self, start: int, values: torch.Tensor) -> None:
        _write(self._loose, start, values.numpy().data)

    def fault(self, error: OSError) -> StorageError:
        """Of `read_tensor` or `write_tensor`."""
        return self._fault("cannot be read or written", error, _AGAIN)

    def _try_direct(self) -> bool:
        import fcntl

        flags = fcntl.fcntl(self._handle, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._handle, fcntl.F_SETFL, flags | _DIRECT)
            with mmap.mmap(-1, PAGE_BYTES) as page:
                os.preadv(self._handle, [page], 0)
            return True
        except OSError:
            fcntl.fcntl(self._handle, fcntl.F_SETFL, flags)
            return False

    def _fault(self, verb: str, error: OSError, fix: str) -> StorageError:
        return disk_fault(self.what, verb, error, self.folder, self.size_bytes, fix)


def disk_fault(what: str, verb: str, error: OSError, folder: Path, needed_bytes: int, fix: str) -> StorageError:
    """Of what this process keeps in files under `folder`; of a full disk, with what is free and what is needed."""
    where = f"{folder}: {error.strerror or error}"
    if error.errno in _FULL:
        verb = "does not fit on the disk"
        where += f"; {_free_bytes(folder)}, {format_bytes(needed_bytes)} needed by this process"
    return StorageError(f"{what} {verb}", where=where, fix=fix)


def find_on_disk(tensor: torch.Tensor) -> tuple[DiskFile, int] | None:
    """The file that a contiguous tensor is a mapping of, and where it begins there."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return None
    for file in _FILES:
        if (start := file.place_of(tensor)) is not None:
            return file, start
    return None


def checksum(values: memoryview) -> int:
    """A number that the bits decide, at memory's speed: pages are folded into one, and that is summed."""
    words = np.frombuffer(values, dtype=np.uint64)
    rows = len(words) // (PAGE_BYTES // 8)
    folded = np.bitwise_xor.reduce(words.reshape(rows, -1), axis=0)
    return zlib.crc32(folded.tobytes())


def _read(handle: int, start: int, into: memoryview) -> None:
    while into:
        count = os.preadv(handle, [into], start)
        if count == 0:
            raise OSError(errno.EIO, "the file ends early")
        into, start = into[count:], start + count


def _write(handle: int, start: int, values: memoryview) -> None:
    while values:
        count = os.pwritev(handle, [values], start)
        values, start = values[count:], start + count


def _open_unnamed(folder: Path) -> int:
    if _UNNAMED:
        try:
            return os.open(folder, os.O_RDWR | _UNNAMED, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
                raise
    handle, name = tempfile.mkstemp(dir=folder, prefix=".duoka-offload-")
    os.unlink(name)
    return handle


def _free_bytes(folder: Path) -> str:
    try:
        found = os.statvfs(folder)
        return f"{format_bytes(found.f_bavail * found.f_frsize)} are free"
    except OSError:
        return "the free space is unknown"
