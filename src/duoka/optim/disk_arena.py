"""Bytes of any size in files of an offload folder, for a while: taken when they come, given back when they are read.

Made of DiskFiles, which take their room at once, so that a full disk is seen there. They go through the page cache:
what memory has room for costs no reading. A checksum guards each piece: the page cache reports no fault of a write.
"""

from __future__ import annotations

import threading
import weakref
import zlib
from pathlib import Path

import torch

from duoka.optim.disk_file import PAGE_BYTES, DiskFile, checksum, whole_pages

_FILE_BYTES = 256 * 2**20  # of one file, where a piece is not larger


class Piece:
    """A stretch of a file, until nobody knows it any more."""

    def __init__(self, file: DiskFile, start: int, num_bytes: int) -> None:
        self.file, self.start, self.num_bytes = file, start, num_bytes
        self.sum = 0


class DiskArena:
    """`what` lies there, in users' words."""

    def __init__(self, folder: Path, what: str) -> None:
        self.folder, self.what = folder, what
        self._files: list[DiskFile] = []
        self._free: list[tuple[int, int, int]] = []  # (file, start, bytes), in this order, never side by side
        self._lock = threading.RLock()  # a piece may be given back while another is taken, by the garbage collection

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self._files)

    def put(self, values: torch.Tensor) -> Piece:
        """Bytes in host memory."""
        piece = self._take(values.numel())
        try:
            piece.file.write_tensor(piece.start, values)
        except OSError as error:
            raise piece.file.fault(error) from None
        piece.sum = _checksum(values)
        return piece

    def get(self, piece: Piece) -> torch.Tensor:
        found = torch.empty(piece.num_bytes, dtype=torch.uint8)
        try:
            piece.file.read_tensor(piece.start, found)
        except OSError as error:
            raise piece.file.fault(error) from None
        if _checksum(found) != piece.sum:
            raise piece.file.damaged()
        return found

    def _take(self, num_bytes: int) -> Piece:
        size = whole_pages(max(1, num_bytes))
        with self._lock:
            fits = [one for one in self._free if one[2] >= size]
            if not fits:
                self._files.append(DiskFile(self.folder, max(_FILE_BYTES, size), self.what))
                fits = [(len(self._files) - 1, 0, self._files[-1].size_bytes)]
                self._free += fits
            number, start, room = min(fits, key=lambda one: one[2])
            self._free.remove((number, start, room))
            if room > size:
                self._free.append((number, start + size, room - size))
            piece = Piece(self._files[number], start, num_bytes)
            weakref.finalize(piece, self._give_back, number, start, size).atexit = False
            return piece

    def _give_back(self, number: int, start: int, size: int) -> None:
        with self._lock:
            for other in [one for one in self._free if one[0] == number]:
                if other[1] + other[2] == start or start + size == other[1]:
                    self._free.remove(other)
                    start, size = min(start, other[1]), size + other[2]
            self._free.append((number, start, size))


def _checksum(values: torch.Tensor) -> int:
    whole = values.numel() // PAGE_BYTES * PAGE_BYTES
    data = values.numpy().data
    return zlib.crc32(data[whole:], checksum(data[:whole]) if whole else 0)
