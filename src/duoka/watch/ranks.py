"""Ranks side by side, from the ends of their logs: where each one's time went, what it held, and which one is slow.

All ranks of a step wait for each other, so that their steps take equally long; the slow one is the one with the
least wait. What all ranks' logs together cost to read is bounded, however many there are.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duoka.runs.folder import RunFolder, open_plain
from duoka.watch.columns import PARTS, number, whole

_TAIL_BYTES = 64 * 1024  # of one log
_ALL_TAILS_BYTES = 4 * 2**20
_LEAST_TAIL_BYTES = 2 * 1024  # some lines
_PIECE_BYTES = 2 * 1024  # in which a whole line is found
# A rank is called slow when the others wait for it more than this share of a step longer than it waits itself.
_SLOW_SHARE = 0.05


@dataclass(frozen=True)
class RankTail:
    """A rank's last steps: where its time went, and the most memory it held."""

    rank: int
    memory_bytes: float | None
    times: Mapping[str, float]
    step_s: float
    num_steps: int = 1
    step: int = 0  # the last one
    cpu_s: float = 0.0  # of all its threads, over these steps; 0: its log does not say

    @property
    def cpu_share(self) -> float | None:
        """Of one core, over its steps: 2 is two cores busy all the time."""
        return self.cpu_s / self.step_s if self.cpu_s and self.step_s else None

    @property
    def wait_s(self) -> float:
        """In a step."""
        return self.times.get("wait", 0.0) / self.num_steps

    @property
    def own_s(self) -> float:
        """Of a step, what it did not wait."""
        return (self.step_s - self.times.get("wait", 0.0)) / self.num_steps

    def to_json(self) -> dict[str, Any]:
        step_s, times = self.step_s / self.num_steps, {k: v / self.num_steps for k, v in self.times.items()}
        return {"rank": self.rank, "step": self.step, "step_s": step_s, "wait_s": self.wait_s, "own_s": self.own_s,
                "times": times, "memory_bytes": self.memory_bytes, "cpu_share": self.cpu_share}  # fmt: skip


@dataclass(frozen=True)
class Slowest:
    """The rank that the others wait for."""

    rank: int
    wait_s: float
    others_wait_s: float  # their median
    step_s: float

    def sentence(self) -> str:
        share = (self.others_wait_s - self.wait_s) / self.step_s
        return (
            f"rank {self.rank} is the slowest: it waits {self.wait_s:.3g} s a step, "
            f"the others {self.others_wait_s:.3g} s ({share:.0%} of a step)"
        )


def find_slowest(ranks: Sequence[RankTail]) -> Slowest | None:
    """None where no rank holds the others up, or nothing is known of waiting."""
    if len(ranks) < 2:
        return None
    slow = min(ranks, key=lambda tail: tail.wait_s)
    others = statistics.median(tail.wait_s for tail in ranks if tail is not slow)
    step_s = statistics.median(tail.step_s / tail.num_steps for tail in ranks)
    if step_s <= 0 or (others - slow.wait_s) / step_s < _SLOW_SHARE:
        return None
    return Slowest(slow.rank, slow.wait_s, others, step_s)


def rank_files(run: RunFolder) -> list[Path]:
    return sorted(run.events.glob("rank*.jsonl")) if run.events.is_dir() else []


def read_ranks(run: RunFolder, world_size: int | None = None) -> list[RankTail]:
    """The last steps of every rank that has a log; whole worlds' logs would take too long to read.

    Of a run that has gone on with fewer processes, the `world_size` of now leaves out those that are no more.
    """
    paths = rank_files(run)
    tail_bytes = max(_LEAST_TAIL_BYTES, min(_TAIL_BYTES, _ALL_TAILS_BYTES // max(1, len(paths))))
    tails = [_rank_tail(path, tail_bytes) for path in paths]
    known = [tail for tail in tails if tail is not None and (not world_size or tail.rank < world_size)]
    return sorted(known, key=lambda tail: tail.rank)


def _rank_tail(path: Path, tail_bytes: int) -> RankTail | None:
    events = [event for event in tail_events(path, tail_bytes) if event.get("type") == "rank"]
    rank = whole(events[-1].get("rank")) if events else None
    if rank is None:
        return None
    times = {name: sum(number(event.get(f"{name}_s")) or 0.0 for event in events) for name in PARTS}
    memory = max((number(event.get("memory_bytes")) or 0.0 for event in events), default=0.0)
    step_s = sum(number(event.get("step_s")) or 0.0 for event in events)
    cpu_s = sum(number(event.get("cpu_s")) or 0.0 for event in events)
    last = whole(events[-1].get("step")) or 0
    return RankTail(rank, memory or None, {k: v for k, v in times.items() if v > 0}, step_s, len(events), last, cpu_s)


def tail_events(path: Path, tail_bytes: int = _TAIL_BYTES) -> list[dict[str, Any]]:
    """The whole lines in the last bytes of a log."""
    try:
        with open_plain(path) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - tail_bytes))
            lines = file.read().splitlines()
    except OSError:
        return []
    return parse_lines(lines[1:] if size > tail_bytes else lines)


def sample_events(path: Path, num_places: int) -> list[dict[str, Any]]:
    """A line from each of so many even distances: of a log that is too long to read."""
    out: list[bytes] = []
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            for place in range(num_places):
                piece = os.pread(file.fileno(), _PIECE_BYTES, size * place // num_places)
                out += piece.split(b"\n", 2)[1:2] if piece.count(b"\n") > 1 else []  # the first and the last are cut
    except OSError:
        pass  # moved away meanwhile: what was read stands
    return parse_lines(out)


def parse_lines(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """What are whole events among them."""
    out = []
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            out.append(event)
    return out
