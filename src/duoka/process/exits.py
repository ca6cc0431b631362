"""How ranks ended, as the process that started them sees it. Used by cluster/, which knows no torch."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

RESUME_ME = 75
# By which people, terminals and schedulers ask a run to stop. A scheduler sends them to every process of a job at once.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
# How a rank of ours ends that such a signal reached before it listened: while it loads, and after its last step.
ENDED_BY_STOP = frozenset(code for number in STOP_SIGNALS for code in (-number, 128 + number))
DRAIN_S = 3.0  # ranks whose peer died notice it by themselves, and can say so
DRAIN_KILLED_S = 0.5  # after a SIGKILL: time enough to finish a checkpoint that only wants its name
DRAIN_SAVED_S = 30.0  # after a 75 the others are still saving or leaving
SIGTERM_S = 8.0  # from our SIGTERM to our SIGKILL: with DRAIN_S well below the promised 30 s


@dataclass(frozen=True)
class RankExit:
    """One rank's end. `code` is negative for a signal; `time` is when it was last seen alive."""

    rank: int
    pid: int
    code: int
    time: float
    by_us: bool = False  # it was sent a signal by its supervisor before it ended


class ExitWatch:
    """Sees which ranks have ended, in order, without reaping them."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        self.pids = dict(pids)
        self.exits: list[RankExit] = []
        self._looked_at = time.time()
        self._signalled: set[int] = set()

    @property
    def running(self) -> dict[int, int]:
        ended = {one.rank for one in self.exits}
        return {rank: pid for rank, pid in self.pids.items() if rank not in ended}

    @property
    def first_failure(self) -> RankExit | None:
        return next((one for one in self.exits if one.code != 0), None)

    def look(self) -> None:
        now = time.time()
        for rank, pid in self.running.items():
            code = _exit_code(pid)
            if code is not None:
                self.exits.append(RankExit(rank, pid, code, self._looked_at, rank in self._signalled))
        self._looked_at = now

    def send(self, number: int) -> None:
        """Signal every rank that still runs: their own pids, which are not reused until they are reaped."""
        for rank, pid in self.running.items():
            self._signalled.add(rank)
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


def _exit_code(pid: int) -> int | None:
    if not hasattr(os, "waitid"):  # macOS before Python 3.13: reaped here, so a later wait gets no status
        reaped, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if reaped else None
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0  # reaped by someone who kept its status: it can no longer be told
    if ended is None:
        return None
    return int(ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)
