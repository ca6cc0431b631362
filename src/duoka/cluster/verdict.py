"""How a start ended: a kind that rules may read, and the words for people.

Made by blame.py and by launchers, read by restart.py and meeting.py (what is worth another start), the command line
(what is printed) and the run's status. No rule ever reads the words.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from enum import Enum
from typing import Any

from duoka.errors import ConfigError, DoctorError, DoesNotFit, DuokaError, StoppedEarly, StorageError, WorkerFailed

INTERRUPTED = 130
LEFT_AT_ONCE = "left at once, as asked; nothing more was saved"


class Kind(str, Enum):
    DONE = "done"
    STOPPED = "stopped"  # on request
    REFUSED = "refused"  # config, data or machine: the same start would be refused again
    OUT_OF_MEMORY = "out_of_memory"
    STORAGE = "storage"
    WORKER_DIED = "worker_died"  # of an error of its own, or by a signal
    LEFT_EARLY = "left_early"  # a rank ended with exit code 0 while the others still needed it
    LOST_RANK = "lost_rank"  # connections broke, and no rank has an error of its own: the network, or another machine
    HUNG = "hung"
    NOT_STOPPING = "not_stopping"  # ranks ignored a stop request until its timeout, and were killed
    LAUNCHER_LOST = "launcher_lost"  # the launcher that owns the rendezvous is gone, or was never reached


KIND_OF_CODE = {
    0: Kind.DONE,
    ConfigError.exit_code: Kind.REFUSED,
    DoctorError.exit_code: Kind.REFUSED,
    DoesNotFit.exit_code: Kind.OUT_OF_MEMORY,
    StorageError.exit_code: Kind.STORAGE,
    StoppedEarly.exit_code: Kind.STOPPED,
    INTERRUPTED: Kind.STOPPED,
}
# Accidents: another start may end better.
WORTH_ANOTHER_START = (Kind.WORKER_DIED, Kind.LEFT_EARLY, Kind.LOST_RANK, Kind.HUNG)
# SIGKILL and the like come from outside and hit a rank by chance; a crash in compiled code is the same fault on
# whichever rank it shows first.
_FROM_OUTSIDE = tuple(signal.Signals(number).name for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
_CHANGES_EACH_TIME = re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-fA-F]{8,}\b|\d[\d.]*")  # addresses, ids, ports, times


@dataclass(frozen=True)
class Verdict:
    """`lines` is the message, `details` what may follow once (a traceback, where logs are)."""

    kind: Kind
    exit_code: int = 0
    lines: tuple[str, ...] = ()
    details: tuple[str, ...] = ()
    rank: int | None = None  # whose end was the cause
    cause: str = ""  # of that exit, without rank and step: "SIGKILL", "exit code 3", "ValueError: loss is NaN"
    step: int = 0  # of a failure: the last optimizer step that was recorded
    again: bool = False  # the world left only to begin again with less at once

    @property
    def stopped(self) -> bool:
        """On request, or saved and left: no failure."""
        return self.kind is Kind.STOPPED

    @property
    def may_go_better(self) -> bool:
        """Whether another start is worth it."""
        return self.kind in WORTH_ANOTHER_START

    def is_same_failure(self, other: Verdict | None) -> bool:
        """The same failure at the same step. An error may show on any rank the next time; a kill hits one by chance."""
        return other is not None and self._failure() == other._failure()

    def _failure(self) -> tuple[object, ...]:
        rank = self.rank if self.cause in _FROM_OUTSIDE else None
        return self.kind, rank, _CHANGES_EACH_TIME.sub("#", self.cause), self.step

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "kind": self.kind.value}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Verdict:
        """What another machine said. Raises ValueError, KeyError or TypeError for anything else."""
        lines, details = (tuple(str(line) for line in raw[name]) for name in ("lines", "details"))
        rank = None if raw["rank"] is None else int(raw["rank"])
        return cls(
            Kind(raw["kind"]), int(raw["exit_code"]), lines, details, rank, str(raw["cause"]), int(raw["step"]),
            bool(raw["again"]),
        )  # fmt: skip


def verdict_of(error: DuokaError, kind: Kind | None = None) -> Verdict:
    """Of a start that was refused, or could not go on, before or beside its ranks."""
    found = kind or KIND_OF_CODE.get(error.exit_code, Kind.WORKER_DIED)
    return Verdict(found, error.exit_code, tuple(error.lines()), cause=type(error).__name__)


def stopped(text: str = "", exit_code: int = StoppedEarly.exit_code) -> Verdict:
    return Verdict(Kind.STOPPED, exit_code, (text,) if text else ())


def failed(kind: Kind, text: str, *more: str, **facts: Any) -> Verdict:
    """A failure of processes, which ends with exit code 5."""
    return Verdict(kind, WorkerFailed.exit_code, (f"{WorkerFailed.title}: {text}", *more), **facts)
