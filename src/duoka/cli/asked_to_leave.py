"""Signals that ask the process a user started to leave, before it has ranks to pass them on to.

`duoka train` prepares models and data under `leave_when_asked`: a SIGTERM or SIGHUP then unwinds what is under way
(workers are ended, locks let go of) and is reported as what it is. Ranks never come here: they must die at once.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ASK_TO_LEAVE = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)


class AskedToLeave(BaseException):
    """Not an Exception: no handler on the way may swallow it and go on."""

    def __init__(self, signal_name: str) -> None:
        super().__init__(signal_name)
        self.signal_name = signal_name


@contextmanager
def leave_when_asked() -> Iterator[None]:
    """Raise AskedToLeave in this thread, the main one, when a signal asks. One that is ignored (nohup) stays so."""

    def leave(number: int, frame: FrameType | None) -> None:
        for other in before:  # once: a second signal must not interrupt the cleanup
            signal.signal(other, signal.SIG_IGN)
        raise AskedToLeave(signal.Signals(number).name)

    before = {n: signal.getsignal(n) for n in _ASK_TO_LEAVE if signal.getsignal(n) is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
