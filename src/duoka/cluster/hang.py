"""Hang detection: find a world without progress, name the rank that holds it up, and collect every rank's stacks.

The supervisor asks `HangWatch.look` now and then. It knows only heartbeats and process states, so it works whatever
the ranks wait in and whatever the timeout of a process group is. It ends no process; the supervisor does.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from duoka.runs.folder import RunFolder
from duoka.runs.heart import ASK_FOR_STACKS, Beat, describe_place, patience_s, read_beats, stacks_path
from duoka.units import format_seconds

LEFT_EARLY = "left early, with exit code 0"
STOPPED_S = 60.0  # a rank that the system shows as stopped needs no patience beyond that of a person with a debugger
_LOOK_EVERY_S = 0.5
_AWAY_S = 10.0  # a pause of our own that says nothing about the ranks
_STACKS_S = 3.0
_NONE_YET = -1  # the count of a rank that has written no heartbeat


@dataclass(frozen=True)
class Hang:
    """A world without progress. `rank` is the one the others wait for, as far as can be seen."""

    rank: int
    step: int
    lines: tuple[str, ...]


@dataclass
class _Seen:
    """When this process saw a rank's beat change, and when it saw the rank stopped, on its own clock."""

    pid: int
    count: int
    moved_at: float
    stopped_at: float | None = None


class HangWatch:
    """`after_s`: the silence that counts as a hang; None: auto."""

    def __init__(self, run: RunFolder, after_s: float | None) -> None:
        self.run = run
        self.after_s = after_s
        self._seen: dict[int, _Seen] = {}
        self._looked_at = 0.0

    def look(self, left: Sequence[int] = (), running: Mapping[int, int] | None = None) -> Hang | None:
        """Cheap; looks twice a second, however often it is called. `left`: ranks that ended with exit code 0.

        `running`: pids of those that will write heartbeats, and may hang before their first.
        """
        now = time.monotonic()
        away_s = now - self._looked_at
        if self.after_s == math.inf or away_s < _LOOK_EVERY_S:
            return None
        self._looked_at = now
        beats = read_beats(self.run)
        for rank, pid in (running or {}).items():
            if rank not in beats and (rank not in self._seen or self._seen[rank].count == _NONE_YET):
                beats[rank] = Beat(rank, pid, count=_NONE_YET)
        for rank, beat in beats.items():
            self._note(rank, beat, now)
        if away_s > _AWAY_S:  # this process was stopped itself, or this is its first look
            for seen in self._seen.values():
                seen.moved_at, seen.stopped_at = now, None
            return None
        return self._judge(beats, now, left)

    def _note(self, rank: int, beat: Beat, now: float) -> None:
        seen = self._seen.get(rank)
        if seen is None or (seen.pid, seen.count) != (beat.pid, beat.count):
            self._seen[rank] = seen = _Seen(beat.pid, beat.count, now)
        seen.stopped_at = (seen.stopped_at or now) if is_stopped(beat.pid) else None

    def _judge(self, beats: dict[int, Beat], now: float, left: Sequence[int]) -> Hang | None:
        if not beats:
            return None
        allowed_s = max(patience_s(beat, self.after_s) for beat in beats.values())
        stopped = [rank for rank, seen in self._seen.items() if seen.stopped_at is not None]
        held_s = max((now - (self._seen[rank].stopped_at or now) for rank in stopped), default=0.0)
        # One rank that moves is enough: the others wait for it.
        silent_s = min(now - self._seen[rank].moved_at for rank in beats)
        if silent_s <= allowed_s and held_s <= min(STOPPED_S, self.after_s or STOPPED_S):
            return None
        culprits = sorted(stopped) or list(left) or find_last(beats)
        first, step, size = culprits[0], max(beat.step for beat in beats.values()), len(beats.keys() | set(left))
        who = f"rank {first} of {size}" if len(culprits) < size else "every rank"
        what = "has not moved"
        if stopped:
            what = "is stopped (SIGSTOP, a debugger, a frozen container)"
        elif left:
            what = f"{LEFT_EARLY}, and no other rank has moved"
        lines = [f"the run hangs after step {step}: {who} {what} for {format_seconds(held_s if stopped else silent_s)}"]
        lines += [self._describe(beats[rank], now) for rank in (culprits + sorted(beats))[: 1 + 8] if rank in beats]
        return Hang(first, step, tuple(dict.fromkeys(lines)))

    def _describe(self, beat: Beat, now: float) -> str:
        seen = self._seen[beat.rank]
        stopped = ", stopped" if seen.stopped_at is not None else ""
        silent = format_seconds(now - seen.moved_at)
        place = "it imports packages or reads its config, and has begun nothing yet"
        place = place if beat.count == _NONE_YET else describe_place(beat)
        return f"  rank {beat.rank} (pid {beat.pid}{stopped}), silent for {silent}: {place}"

    def write_stacks(self) -> str:
        """Every rank's Python stacks into the run folder; returns where. Stopped ones get SIGCONT for it."""
        beats = read_beats(self.run)
        for name in (ASK_FOR_STACKS, "SIGCONT"):  # in this order: a rank that continues dumps before all else
            for beat in beats.values():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(beat.pid, getattr(signal, name))
        files = {rank: stacks_path(self.run, rank) for rank in beats}
        deadline = time.monotonic() + _STACKS_S
        while time.monotonic() < deadline and not all(_has_text(path) for path in files.values()):
            time.sleep(0.05)
        time.sleep(0.2)  # the last one may be in the middle of its answer
        found = [rank for rank, path in files.items() if _has_text(path)]
        return f"stacks of {len(found)} of {len(files)} ranks: {self.run.logs / 'stacks-rank*.txt'}"


def find_last(beats: dict[int, Beat]) -> list[int]:
    """The ranks that the others wait for: least far in steps, then in collectives, then in other work."""

    def progress(beat: Beat) -> tuple[int, int]:
        return beat.step, beat.num_collectives

    least = min(progress(beat) for beat in beats.values())
    last = [rank for rank, beat in sorted(beats.items()) if progress(beat) == least]
    outside = [rank for rank in last if not beats[rank].is_inside]
    return outside or last


def is_stopped(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


def _has_text(path: os.PathLike[str]) -> bool:
    try:
        return os.stat(path).st_size > 0
    except OSError:
        return False
