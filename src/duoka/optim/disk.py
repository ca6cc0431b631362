"""AdamW with its moments in a file: 8 bytes per parameter less in memory, read ahead and written behind in slices.

Both moments of all that a rank trains lie there end to end, cut into slices. While one slice is updated the next two
are read and the one before is written, by a thread each; the last ones are written beside the next forward pass, and
then the page cache is asked for what the next update reads, as far as memory is free. The numbers are those of torch's
own AdamW. Checkpoints read and fill the same file through its mapping.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from duoka.optim.disk_file import OF_ZEROS, DiskFile, Slot, checksum, whole_pages
from duoka.optim.host import HostAdamW, Part, local_part, state_of
from duoka.plan.offload import NUM_SLOTS, READ_AHEAD, SLICE_BYTES

_ALIGNED = 16  # numbers: a vector's, so that a stretch is computed as it is inside the whole


@dataclass(frozen=True)
class DiskPart(Part):
    """A part, and where its numbers begin in which slice."""

    place: int = 0
    inside: int = 0


@dataclass
class Slice:
    """A stretch of both moments in the file, and what lies in it."""

    start_bytes: int  # in each moment's half of the file
    parts: list[DiskPart] = field(default_factory=list)
    length_bytes: int = 0  # of one moment, in whole pages
    sums: tuple[int, int] | None = (OF_ZEROS, OF_ZEROS)  # as both were written last; None: by another hand
    written: Future[None] | None = None
    is_cached: bool = False  # the page cache has been asked for it: a hint, the content is the same either way


class DiskAdamW(HostAdamW):
    """torch's AdamW. Its `state` is the mapping of a file, which it reads and writes past that mapping."""

    def __init__(self, groups: Any, *, folder: Path, **settings: Any) -> None:
        super().__init__(groups, **settings)
        self._slices: list[Slice] = []
        self._nothing: list[Part] = []  # parameters of which this rank has no numbers
        begins, length = self._lay_out()
        self._half_bytes = whole_pages(4 * length)
        self.file = DiskFile(folder, 2 * self._half_bytes, "the optimizer's state")
        halves = self.file.mapped().view(torch.float32)
        for parameter, begin in begins:
            local = local_part(parameter)
            both = (halves[at : at + local.numel()].view(local.shape) for at in (begin, self._half_bytes // 4 + begin))
            self.state[parameter] = state_of(parameter, *both)
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        self.buffer_bytes = 0
        for _ in range(min(NUM_SLOTS, len(self._slices))):
            self._free.put(slot := Slot(2 * max(one.length_bytes for one in self._slices)))
            self.buffer_bytes += len(slot.memory)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="duoka-read-ahead")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="duoka-write-behind")
        self._due: list[Slice] = []  # in the last step
        self._todo: deque[Slice] = deque()
        self._reading: deque[tuple[Slice, Future[Slot]]] = deque()
        self._current: tuple[Slice, Slot] | None = None
        # For who maps the weights that are updated: before those of a part, and after those of a slice.
        self.before_part: Callable[[torch.Tensor], None] | None = None
        self.after_slice: Callable[[], None] | None = None

    def load_state_dict(self, state_dict: Any) -> None:
        """Refused: it would put other tensors, and other groups, in the place of those that lie in the file."""
        raise TypeError("fill the tensors of `state` in place: they are a file's (engine.optimizer_tensors)")

    def _lay_out(self) -> tuple[list[tuple[torch.nn.Parameter, int]], int]:
        """Where each parameter's numbers begin in a moment's half, and how long that is; cuts it into slices."""
        begins, end = [], 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if self.is_near(parameter):
                    continue
                local = local_part(parameter)
                assert local.dtype == torch.float32 and local.is_contiguous(), "trained weights are fp32 masters"
                begins.append((parameter, end))
                if not local.numel():
                    self._nothing.append(Part(parameter, group, 0, 0))
                self._cut(parameter, group, end)
                end += -(-local.numel() // _ALIGNED) * _ALIGNED
        for one in self._slices:
            one.length_bytes = whole_pages(min(SLICE_BYTES, 4 * end - one.start_bytes))
        return begins, end

    def _cut(self, parameter: torch.nn.Parameter, group: dict[str, Any], at: int) -> None:
        most, begin, count = SLICE_BYTES // 4, 0, local_part(parameter).numel()
        while begin < count:
            place, inside = divmod(at + begin, most)
            while place >= len(self._slices):
                self._slices.append(Slice(len(self._slices) * SLICE_BYTES))
            end = min(count, begin + most - inside)
            self._slices[place].parts.append(DiskPart(parameter, group, begin, end, place, inside))
            begin = end

    # --- a step ---

    def read_ahead(self, room_bytes: int) -> None:
        """Passes begin, and a step will follow: bring what it reads first into the page cache, up to `room_bytes`."""
        self._reader.submit(self._ask_for, self._due[: room_bytes // (2 * SLICE_BYTES)])

    def _ask_for(self, due: list[Slice]) -> None:
        """For the reading thread. A write that failed is raised by who reads the slice."""
        for one in due:
            if one.written is not None:
                one.written.result()
            for number in range(2):
                self.file.will_need(number * self._half_bytes + one.start_bytes, one.length_bytes)
            one.is_cached = True

    def parts(self) -> Iterator[Part]:
        # Named first: what is updated is read in this order.
        due = [[part for part in one.parts if part.parameter.grad is not None] for one in self._slices]
        self._due = [one for one, parts in zip(self._slices, due, strict=True) if parts]
        self._todo.extend(self._due)
        for _ in range(READ_AHEAD):
            self._read_another()
        yield from (part for part in self._nothing if part.parameter.grad is not None)
        for parts in due:
            yield from parts

    def moments(self, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        assert isinstance(part, DiskPart) and part.stop is not None
        if self._current is None:
            one, reading = self._reading.popleft()
            self._read_another()
            self._current = one, reading.result()
        if self.before_part is not None:
            self.before_part(part.of(part.parameter))
        one, slot = self._current
        assert one is self._slices[part.place], "slices are updated in the order in which they are read"
        begin, size = 4 * part.inside, 4 * (part.stop - part.start)
        first, second = (slot.bytes[at : at + size].view(torch.float32) for at in (begin, one.length_bytes + begin))
        return first, second

    def updated(self, part: Part) -> None:
        assert isinstance(part, DiskPart) and self._current is not None
        one, slot = self._current
        if part is [other for other in one.parts if other.parameter.grad is not None][-1]:
            one.written = self._writer.submit(self._write, one, slot)
            self._current = None
            if self.after_slice is not None:
                self.after_slice()

    def _read_another(self) -> None:
        if self._todo:
            one = self._todo.popleft()
            self._reading.append((one, self._reader.submit(self._read, one)))

    def _read(self, one: Slice) -> Slot:
        """For the reading thread: as soon as there is a slot, and the slice was written."""
        if one.written is not None:
            one.written.result()
        slot, size = self._free.get(), one.length_bytes
        try:
            for number in range(2):
                half = slot.part(number * size, size)
                start = number * self._half_bytes + one.start_bytes
                self.file.read(start, half, cached=one.is_cached)
                if one.sums is not None and checksum(half) != one.sums[number]:
                    raise self.file.damaged()
            one.is_cached = False  # its write goes past the page cache, and empties it of the slice
        except BaseException:  # a Ctrl-C too must give the buffer back; raised again
            self._free.put(slot)
            raise
        return slot

    def _write(self, one: Slice, slot: Slot) -> None:
        """For the writing thread."""
        size = one.length_bytes
        try:
            halves = [slot.part(number * size, size) for number in range(2)]
            one.sums = checksum(halves[0]), checksum(halves[1])
            for number, half in enumerate(halves):
                self.file.write(number * self._half_bytes + one.start_bytes, half)
        finally:
            self._free.put(slot)

    # --- for others ---

    def settle(self) -> None:
        """Returns when the file holds the state of the last step; raises what a write came to."""
        for one in self._slices:
            if one.written is not None:
                one.written.result()
                one.written = None

    def saved_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """A parameter's state, to be read or filled."""
        if self.is_near(parameter):
            return self.state[parameter]
        self.settle()
        for one in self._slices:
            one.sums = None
        return self.state[parameter]
