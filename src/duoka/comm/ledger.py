"""The byte ledger: what this process sent to others, and how long it did nothing but wait for them.

`collectives.py` and the strategies write into it, each optimizer step reads it off. It counts what the collectives
move (on a ring: twice the buffer for an all-reduce, once for a gather, each less this rank's own share), not packets:
benchmarks/traffic.md holds it beside the network's own counters. Object exchanges at start and in checks are left out.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

# Bytes that a rank sends for each byte of the whole buffer, times (N-1)/N. One-sided kinds: the mean over ranks.
SENT_PER_BYTE: Mapping[str, float] = {
    "all-reduce": 2.0,
    "all-gather": 1.0,
    "reduce-scatter": 1.0,
    "all-to-all": 1.0,
    "broadcast": 1.0,
    "reduce": 1.0,
}


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind: how many, the bytes of their whole buffers, and what this rank sent for them."""

    num_calls: int = 0
    buffer_bytes: int = 0
    sent_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.num_calls + other.num_calls,
            self.buffer_bytes + other.buffer_bytes,
            self.sent_bytes + other.sent_bytes,
        )


@dataclass
class Ledger:
    """Counts since the last `take`. Waiting is time on the host's clock in which nothing else was done.

    On CUDA collectives are queued, not waited for: there the waiting lies inside kernels that this clock cannot see.
    """

    traffic: dict[str, Traffic] = field(default_factory=dict)
    waited_s: float = 0.0
    spans: list[list[float]] = field(default_factory=list)  # of exchanges: begun, done (0: not yet)
    handed_over: float = 0.0  # when the last of several overlapped collectives was started
    came_back: float = 0.0  # and when it was done

    def note(self, kind: str, buffer_bytes: int, num_ranks: int, *, sent_bytes: int | None = None) -> None:
        """One collective over `num_ranks`, whose whole buffer has `buffer_bytes`; `sent_bytes` where parts differ."""
        if sent_bytes is None:
            sent_bytes = round(SENT_PER_BYTE[kind] * buffer_bytes * (num_ranks - 1) / num_ranks)
        self.traffic[kind] = self.traffic.get(kind, Traffic()) + Traffic(1, buffer_bytes, sent_bytes)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """What happens inside is waiting for others."""
        started, done = time.perf_counter(), self.begin()
        try:
            yield
        finally:
            done()
            self.waited_s += time.perf_counter() - started

    def begin(self) -> Callable[[], None]:
        """An exchange is under way until what comes back is called, from any thread."""
        span = [time.perf_counter(), 0.0]
        self.spans.append(span)

        def done() -> None:
            span[1] = time.perf_counter()

        return done

    def exchanged_s(self) -> float:
        """Seconds in which an exchange was under way, several at once counted once."""
        total = reached = 0.0
        for begun, done in sorted(self.spans):
            total += max(0.0, done - max(begun, reached))
            reached = max(reached, done)
        return total

    def overlapped_s(self) -> float:
        """Of collectives that ran beside a backward pass: seconds from its own end to theirs."""
        return max(0.0, self.came_back - self.handed_over)

    def take(self) -> dict[str, Traffic]:
        """What was counted, by kind; everything begins again at zero."""
        taken, self.traffic = self.traffic, {}
        self.spans = []
        self.waited_s = self.handed_over = self.came_back = 0.0
        return taken


# One per process, as there is one default process group.
LEDGER = Ledger()


def sent_bytes(traffic: Mapping[str, Traffic]) -> int:
    return sum(one.sent_bytes for one in traffic.values())
