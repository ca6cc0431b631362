"""The timeout between a stop request and SIGKILL: by default as long as heartbeats show progress.

Used by supervise.py (one machine) and ranks.py (one of several). A step or a save takes what it takes: a fixed time
would kill healthy ranks of a large model in the middle of the save that they were asked for.
"""

from __future__ import annotations

import time

from duoka.runs.folder import RunFolder
from duoka.runs.heart import STOP_S, read_beats, stop_patience_s

_LOOK_EVERY_S = 0.5
_STEPS_TO_STOP = 2  # a rank that finished more steps since the request ignores it


class StopPatience:
    """`within_s`: from the request to the end; None: auto, by heartbeats."""

    def __init__(self, run: RunFolder, within_s: float | None) -> None:
        self.run = run
        self.within_s = within_s
        self._counts: dict[int, int] = {}
        self._step: int | None = None  # that ranks had finished when they were asked
        self._moved_at = 0.0
        self._looked_at = -_LOOK_EVERY_S
        self.allowed_s = STOP_S if within_s is None else within_s

    def is_over(self, asked_at: float) -> bool:
        """Whether the timeout of a stop request made at `asked_at` (monotonic) is over. Cheap; for polling."""
        now = time.monotonic()
        if self.within_s is not None:
            return now - asked_at > self.within_s
        if now - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = now
            self._look(now)
        return now - max(asked_at, self._moved_at) > self.allowed_s

    def _look(self, now: float) -> None:
        beats = read_beats(self.run)
        if not beats:  # a user's own script, without heartbeats
            return
        counts = {beat.pid: beat.count for beat in beats.values()}
        step = max(beat.step for beat in beats.values())
        self._step = step if self._step is None else self._step
        if counts != self._counts and step <= self._step + _STEPS_TO_STOP:
            self._moved_at = now
        self._counts = counts
        self.allowed_s = max(stop_patience_s(beat) for beat in beats.values())
