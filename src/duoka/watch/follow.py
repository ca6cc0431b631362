"""A run that is followed: its history, kept up with the files as they grow, by who watches and never by training.

A look costs what has come since the one before. `next_look_s` spaces looks so that following costs a small share of
a core, however much a run writes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from duoka.runs.events import EventTail, global_log
from duoka.runs.find import written_at
from duoka.runs.folder import RunFolder, read_json
from duoka.runs.status import read_status
from duoka.watch.columns import whole
from duoka.watch.history import History
from duoka.watch.ranks import RankTail, read_ranks

LEAST_S = 1.0  # between two looks
# Looks are this many times as far apart as one takes: half a percent of a core.
_PACE = 200.0
_CHUNK_BYTES = 2**20


class Pace:
    """When to look again, by what looks cost: the cheaper one of two, so that a first look, or one in which Python
    collected its garbage, does not put the next off for half a minute."""

    def __init__(self, least_s: float, times: float) -> None:
        self._least_s, self._times = least_s, times
        self._last_s = 0.0

    def next_s(self, cost_s: float, *, is_behind: bool) -> float:
        cheaper_s, self._last_s = min(cost_s, self._last_s), 0.0 if is_behind else cost_s
        return 0.0 if is_behind else max(self._least_s, self._times * cheaper_s)


class FollowedRun:
    """`version` changes with everything that a look has found new."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self.version = 0
        self.is_behind = True  # some of the log has not been read yet
        self.share_read = 0.0
        self._stamps: dict[Path, tuple[int, int]] = {}
        self._pace = Pace(LEAST_S, _PACE)
        self.next_look_s = LEAST_S
        self._ranks: list[RankTail] = []
        self._ranks_at = -1.0
        self._ranks_cost_s = 0.0
        self._grown_at: float | None = None  # by our own steady clock
        self._met_at = time.monotonic()
        self._begin()

    def _begin(self) -> None:
        self.history = History(self.run)
        self._tail = EventTail(global_log(self.run))
        self.last_t: float | None = None  # of the newest event, by the training machine's clock

    def catch_up(self, budget_s: float = float("inf")) -> None:
        """Read what came; of a long log as much as fits into the time."""
        began, before = time.perf_counter(), time.thread_time()
        while True:
            self._read_chunk()
            if not self.is_behind or time.perf_counter() - began > budget_s:
                break
        self._read_small_files()
        self.next_look_s = self._pace.next_s(time.thread_time() - before, is_behind=self.is_behind)

    def _read_chunk(self) -> None:
        events = self._tail.read(_CHUNK_BYTES)
        if self._tail.replaced:
            self.history = History(self.run)
            self.version += 1
            self._stamps.clear()
        for event in events:
            self.history.apply(event)
        if events:
            t = events[-1].get("t")
            self.last_t = float(t) if isinstance(t, (int, float)) else None
            self.version += 1
            if not self.is_behind:  # else it is old news
                self._grown_at = time.monotonic()
        left, offset = self._tail.num_left, self._tail.offset
        self.is_behind = left > 0
        self.share_read = offset / (offset + left) if offset else 1.0

    def _read_small_files(self) -> None:
        run, history = self.run, self.history
        if self._is_new(run.plan):
            history.plan = read_json(run.plan) or {}
        if self._is_new(run.env):
            history.env = read_json(run.env) or {}
        if self._is_new(run.status) | self._is_new(run.progress):
            history.status = read_status(run)

    def _is_new(self, path: Path) -> bool:
        try:
            found = os.stat(path)
            stamp = (found.st_mtime_ns, found.st_ino)
        except OSError:
            stamp = (0, 0)
        if self._stamps.get(path) == stamp:
            return False
        self._stamps[path] = stamp
        self.version += 1
        return True

    def ranks(self) -> list[RankTail]:
        """Every rank's last steps; read again only when that costs little."""
        now = time.monotonic()
        if self._ranks_at < 0 or now - self._ranks_at >= max(LEAST_S, _PACE * self._ranks_cost_s):
            before = time.thread_time()
            self._ranks = read_ranks(self.run, whole(self.history.facts.get("world_size")))
            self._ranks_at, self._ranks_cost_s = now, time.thread_time() - before
        return self._ranks

    def age_s(self) -> float:
        """Since the log last grew: by our own clock when we saw it, else by the disk's, never by another machine's."""
        written = time.time() - written_at(self.run) if written_at(self.run) else 0.0
        if written < 0:  # a clock was set back: what it says tells nothing, and silence is at least as long as we look
            written = time.monotonic() - self._met_at
        return written if self._grown_at is None else min(written, time.monotonic() - self._grown_at)

    def clock_ahead_s(self) -> float:
        """How far the training machine's clock is ahead of the disk's; 0 where they agree, or nothing tells."""
        try:
            written = os.stat(global_log(self.run)).st_mtime
        except OSError:
            return 0.0
        return 0.0 if self.last_t is None else self.last_t - written
