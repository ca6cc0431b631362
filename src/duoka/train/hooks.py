"""What happens between steps: signals that ask for an end, and when to save, evaluate and compare replicas.

Decisions that depend on a clock or a signal differ between ranks; they are summed over ranks with the step's loss,
so that all ranks do the same thing at the same step.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

from duoka.process.exits import STOP_SIGNALS
from duoka.units import Every

_OF_A_TERMINAL = (signal.SIGINT, signal.SIGHUP)


class StopSignal:
    """Remembers that this process was asked to stop; a second Ctrl-C leaves at once.

    A Ctrl-C that was ignored before stays ignored: that is how a shell starts what it puts into the background; and so
    does a SIGHUP, under nohup. SIGTERM never is: launchers ask by it.
    """

    def __init__(self) -> None:
        self.name = ""
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopSignal:
        for number in STOP_SIGNALS:
            if number in _OF_A_TERMINAL and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.name and number == signal.SIGINT:
            os._exit(130)
        self.name = signal.Signals(number).name

    @property
    def asked(self) -> bool:
        return bool(self.name)


class Timer:
    """Says when something that happens `every` so often is due; asked once after each step."""

    def __init__(self, every: Every | None, steps_per_epoch: int | None) -> None:
        self.every = every
        self._steps = _in_steps(every, steps_per_epoch)
        self._last_s = time.monotonic()

    def due_at(self, step: int) -> bool:
        """Due by the count of steps: the same on every rank."""
        return self._steps > 0 and step % self._steps == 0

    def due_by_clock(self) -> bool:
        """Due by this process's clock: rank 0 decides for all."""
        return self.every is not None and self.every.unit == "seconds" and self._elapsed_s() >= self.every.count

    def restart(self) -> None:
        self._last_s = time.monotonic()

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._last_s


def _in_steps(every: Every | None, steps_per_epoch: int | None) -> int:
    if every is None or every.unit == "seconds":
        return 0
    if every.unit == "steps":
        return int(every.count)
    return max(1, round(every.count * steps_per_epoch)) if steps_per_epoch else 0  # the config refuses that
