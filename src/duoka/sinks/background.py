"""A sink that may wait for a network, in a thread of its own behind a bounded queue: no step ever waits for it.

When it does not keep up, what comes is dropped and that is said; when it does not end, the run leaves without it.
"""

from __future__ import annotations

import copy
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from duoka.process.lifeline import MAY_BE_LEFT
from duoka.sinks.sink import RunFacts, Sink, StepNumbers
from duoka.sinks.trouble import Troubles

MOST_WAITING = 1000  # calls: as many steps
CLOSE_S = 10.0  # to take what waits and, where the run was stopped, to say goodbye: who stops a run waits for it
GOODBYE_S = 30.0  # of one that is done: a tracker sends files now, each with a few answers from far away
_Call = Callable[[], None]


class SinkLate(Exception):
    """It did not keep up, or did not end."""


class Background(Sink):
    """Troubles of the thread are said there, those of keeping up where the run is."""

    def __init__(self, sink: Sink, troubles: Troubles) -> None:
        self.name, self.trouble = sink.name, sink.trouble
        self._sink = sink
        self._troubles = troubles
        self._calls: queue.Queue[_Call | None] = queue.Queue(MOST_WAITING)
        self._is_open = True
        self._num_dropped = 0
        self._is_done, self._goodbye_began = False, 0.0
        self._thread = threading.Thread(target=self._run, name=f"{MAY_BE_LEFT}-{sink.name}", daemon=True)

    def open(self, facts: RunFacts, say: Callable[[str], None]) -> None:
        def first() -> None:
            # When it cannot be opened, what waits for it and what comes is passed over.
            self._is_open = self._troubles.attempt(self._sink, lambda: self._sink.open(facts, say))

        self._calls.put_nowait(first)
        self._thread.start()

    def open_now(self, facts: RunFacts, say: Callable[[str], None]) -> None:
        self._sink.open(facts, say)
        self._thread.start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            if self._is_open:
                self._troubles.attempt(self._sink, call)

    def _put(self, call: _Call) -> None:
        if not self._is_open:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._num_dropped += 1
            raise SinkLate(f"{MOST_WAITING:,} calls wait for it; what comes until it has room is left out") from None

    def started(self, kind: str, step: int, facts: Mapping[str, Any]) -> None:
        self._put(lambda: self._sink.started(kind, step, facts))

    def step(self, now: StepNumbers) -> None:
        self._put(lambda: self._sink.step(now))

    def evaluated(self, step: int, values: Mapping[str, Any]) -> None:
        self._put(lambda: self._sink.evaluated(step, values))

    def samples(self, step: int, pairs: Sequence[tuple[str, str]]) -> None:
        self._put(lambda: self._sink.samples(step, pairs))

    def event(self, type: str, step: int, values: Mapping[str, Any]) -> None:
        self._put(lambda: self._sink.event(type, step, values))

    def scalars(self, values: Mapping[str, Any], step: int | None, options: Mapping[str, Any]) -> None:
        kept = copy.copy(values)  # the caller may fill the same mapping again
        self._put(lambda: self._sink.scalars(kept, step, options))

    def say(self, text: str) -> None:
        """For people in front of this machine."""

    def ended(self, step: int, reason: str, exit_code: int, cause: str) -> None:
        self._is_done = reason == "done"
        self._put(lambda: self._sink.ended(step, reason, exit_code, cause))

    def close(self) -> None:
        if self._thread.ident is None:
            return  # it was never opened
        deadline = time.monotonic() + CLOSE_S
        left_out = f"; {self._num_dropped:,} calls were left out" if self._num_dropped else ""
        try:
            self._calls.put(self._say_goodbye, timeout=CLOSE_S)
            self._calls.put(None, timeout=max(0.0, deadline - time.monotonic()))
        except queue.Full:
            raise SinkLate(f"it takes nothing any more, and the run ends without it{left_out}") from None
        self._thread.join(max(0.0, deadline - time.monotonic()))
        patience = CLOSE_S
        if self._is_done and self._goodbye_began:
            patience = GOODBYE_S
            self._thread.join(max(0.0, self._goodbye_began + GOODBYE_S - time.monotonic()))
        if self._thread.is_alive():
            raise SinkLate(f"it has not ended within {patience:g} s, and the run ends without it{left_out}")
        if self._num_dropped:
            raise SinkLate(f"{self._num_dropped:,} calls were left out in all")

    def _say_goodbye(self) -> None:
        self._goodbye_began = time.monotonic()
        self._sink.close()

    @property
    def handle(self) -> Any:
        return self._sink.handle
