"""One rank's file of a checkpoint, read from the live tensors while the next passes run.

Weights and the optimizer's state rest between two of its steps. The writing thread reads them part by part, from the
file's beginning; before they change, the training thread copies the unread tail, back to front, until it meets the
writer. Made by checkpoint.py for saves on CPUs. The caller that changes the tensors calls `release` before it does.
"""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Iterator

from duoka.store import snapshot
from duoka.store.snapshot import Chunk, Copier, HeapBuffer, HostBuffer


class LiveFile:
    """Its parts are each read once from the live tensors, by the writer or by the training thread.

    `spare` is memory for copies: what this save needed of it is there for the next one, the rest is let go.
    """

    def __init__(self, copier: Copier, spare: list[HeapBuffer]) -> None:
        self._copier = copier
        self._spare = spare
        self._used: list[HeapBuffer] = []
        size = copier.share.size_bytes
        starts = range(0, size, snapshot.CHUNK_BYTES)
        self._stop_of = {start: min(start + snapshot.CHUNK_BYTES, size) for start in starts}
        self._unread = deque(starts)
        self._copied: dict[int, HeapBuffer] = {}
        self._is_writer_reading = False
        self._versions = copier.versions()
        self._is_torn = False
        self._turn = threading.Condition()

    def unread_bytes(self) -> int:
        """Roughly, what the tensors are still needed for; 0: they may change."""
        with self._turn:
            return snapshot.CHUNK_BYTES * (len(self._unread) + self._is_writer_reading)

    def chunks(self, buffer: HostBuffer) -> Iterator[Chunk]:
        """The whole file in order, through `buffer`; for the writing thread."""
        for start, stop in self._stop_of.items():
            if self._reads(start, stop, buffer):
                yield from buffer.chunks(stop - start)
            else:
                self._used.append(copy := self._wait_for(start))
                yield from copy.chunks(stop - start)
            if self._is_torn:
                raise OSError(errno.EBUSY, "weights or the optimizer's state changed while they were being saved")

    def release(self, *, may_copy: bool) -> None:
        """Returns when no tensor will be read any more; without memory for copies the writer does all of it."""
        while may_copy and (copy := self._memory_for_a_copy()) is not None:
            with self._turn:
                if not self._unread:
                    self._spare.append(copy)
                    break
                start = self._unread.pop()
            self._read(copy, start, self._stop_of[start])
            with self._turn:
                self._copied[start] = copy
                self._turn.notify_all()
        with self._turn:
            self._turn.wait_for(lambda: not self._unread and not self._is_writer_reading)

    def _memory_for_a_copy(self) -> HeapBuffer | None:
        """Asked for before a part is taken: the writer waits for parts that were."""
        with self._turn:
            if self._spare:
                return self._spare.pop()
        try:
            return HeapBuffer(snapshot.CHUNK_BYTES)
        except (MemoryError, RuntimeError):
            return None

    def close(self) -> None:
        """The writer has ended, perhaps early: a training thread that waits for it may go on."""
        with self._turn:
            self._unread.clear()
            self._is_writer_reading = False
            self._spare[:] = self._used
            self._turn.notify_all()

    def _reads(self, start: int, stop: int, buffer: HostBuffer) -> bool:
        """Read a part into the writer's buffer; False when the training thread has it."""
        with self._turn:
            if not self._unread or self._unread[0] != start:
                return False
            self._unread.popleft()
            self._is_writer_reading = True
        self._read(buffer, start, stop)
        with self._turn:
            self._is_writer_reading = False
            self._turn.notify_all()
        return True

    def _wait_for(self, start: int) -> HeapBuffer:
        with self._turn:
            self._turn.wait_for(lambda: start in self._copied)
            return self._copied.pop(start)

    def _read(self, buffer: HostBuffer | HeapBuffer, start: int, stop: int) -> None:
        self._copier.fill(buffer, start, stop, num_threads=1)
        # A tensor changed without a call of `release`: such a torn checkpoint must never get its name.
        self._is_torn |= self._copier.versions() != self._versions
