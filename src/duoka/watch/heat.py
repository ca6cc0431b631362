"""Ranks x steps as a map: how long each rank worked and how little it waited, from logs of any length.

Short logs are read whole, of long ones lines at even distances: a thousand ranks' logs are many gigabytes. Read in
slices of time, so that a page can show how far it is.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from duoka.runs.folder import RunFolder, open_plain
from duoka.watch.columns import number, whole
from duoka.watch.ranks import parse_lines, rank_files, sample_events
from duoka.watch.series import short

MOST_COLUMNS, MOST_ROWS = 200, 256
_MOST_PLACES = 100_000  # that are looked at in all ranks' logs together
_LEAST_COLUMNS = 50
_ALL_WHOLE_BYTES = 16 * 2**20  # logs are read from end to end where all of them together are no more


class HeatMap:
    """Of the steps up to `last_step`; made anew when the run has gone on."""

    def __init__(self, run: RunFolder, last_step: int) -> None:
        self.last_step = max(1, last_step)
        self._left = rank_files(run)
        self.num_ranks = len(self._left)
        columns = max(_LEAST_COLUMNS, min(MOST_COLUMNS, _MOST_PLACES // max(1, self.num_ranks)))
        self.num_columns = min(columns, self.last_step)
        sizes = [path.stat().st_size for path in self._left]
        self.is_sampled = sum(sizes) > _ALL_WHOLE_BYTES
        self._own: dict[int, list[float | None]] = {}
        self._wait: dict[int, list[float | None]] = {}
        self.cost_s = 0.0

    @property
    def is_whole(self) -> bool:
        return not self._left

    def catch_up(self, budget_s: float) -> None:
        began, before = time.perf_counter(), time.thread_time()
        while self._left and time.perf_counter() - began < budget_s:
            self._read(self._left.pop())
        self.cost_s += time.thread_time() - before

    def _read(self, path: Path) -> None:
        own: list[float | None] = [None] * self.num_columns
        wait: list[float | None] = [None] * self.num_columns
        rank, before = None, 0
        for event in self._events(path):
            step, step_s = whole(event.get("step")), number(event.get("step_s"))
            if event.get("type") != "rank" or step is None or not step_s or not 0 < step <= self.last_step:
                continue
            rank = whole(event.get("rank"))
            place = (step - 1) * self.num_columns // self.last_step
            if step <= before:  # a crash threw away what comes after
                own[place:] = wait[place:] = [None] * (self.num_columns - place)
            before = step
            waited = number(event.get("wait_s")) or 0.0
            own[place] = max(own[place] or 0.0, step_s - waited)
            share = waited / step_s
            known = wait[place]
            wait[place] = share if known is None else min(known, share)
        if rank is not None:
            self._own[rank], self._wait[rank] = own, wait

    def _events(self, path: Path) -> list[dict[str, Any]]:
        if self.is_sampled:
            return sample_events(path, self.num_columns)
        try:
            with open_plain(path) as file:
                return parse_lines(file.read().splitlines())
        except OSError:
            return []  # moved away meanwhile

    def to_json(self) -> dict[str, Any]:
        """Rows of ranks: `own`, their time relative to the ranks' median, the most of a cell; `wait`, the least."""
        if not self.is_whole:
            return {"is_whole": False, "share_read": len(self._own) / self.num_ranks}
        ranks = sorted(self._own)
        group = max(1, -(-len(ranks) // MOST_ROWS))
        medians = [_median([self._own[rank][place] for rank in ranks]) for place in range(self.num_columns)]
        own, wait = [], []
        for start in range(0, len(ranks), group):
            some = ranks[start : start + group]
            best = [_pick(max, [self._own[rank][place] for rank in some]) for place in range(self.num_columns)]
            own.append([_ratio(value, middle) for value, middle in zip(best, medians, strict=True)])
            least = [_pick(min, [self._wait[rank][place] for rank in some]) for place in range(self.num_columns)]
            wait.append([None if value is None else short(value) for value in least])
        return {
            "ranks": ranks[::group], "group": group, "num_ranks": self.num_ranks, "last_step": self.last_step,
            "own": own, "wait": wait, "is_sampled": self.is_sampled, "is_whole": True, "share_read": 1.0,
        }  # fmt: skip


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _pick(choose: Any, values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return choose(known) if known else None


def _ratio(value: float | None, middle: float | None) -> float | None:
    return None if value is None or not middle else short(value / middle)
