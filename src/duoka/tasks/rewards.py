"""Rewards of answers, computed in processes of their own that are killed at a deadline with all that they started.

A function that raises, hangs, or gives no number has failed: its answer has no reward (None), which is counted, and is
never a zero that training would learn from.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from duoka.tasks.worker import Worker, ask_all


@dataclass(frozen=True)
class Rewarded:
    """What each function gave for one answer, in order; None: it has no opinion, or failed, which `faults` tells."""

    values: tuple[float | None, ...]
    faults: tuple[str, ...] = ()

    def total(self, weights: Sequence[float]) -> float | None:
        """The sum that is learned; None where a part of it is missing."""
        if any(value is None for value in self.values):
            return None
        return sum(weight * value for weight, value in zip(weights, self.values, strict=True) if value is not None)


class RewardPool:
    """`num_workers` processes; each is begun when it is needed, and begun again after one had to be killed."""

    def __init__(self, names: Sequence[str], base: Path, *, deadline_s: float, num_workers: int = 1) -> None:
        self.names = tuple(names)
        self._workers = [Worker(self.names, base, deadline_s) for _ in range(num_workers)]

    def score(
        self,
        questions: Sequence[dict[str, Any]],
        alive: Callable[[], None] = lambda: None,
        for_s: float = math.inf,
    ) -> list[Rewarded]:
        """Rewards of all, in order; `alive` is called as they come. Only of the first ones where all of them would take
        longer than `for_s`."""
        if not self.names:  # reward models alone
            return [Rewarded(()) for _ in questions]
        found: dict[int, Rewarded] = {}
        ends = time.monotonic() + for_s
        in_time = takewhile(lambda _: time.monotonic() < ends or not found, range(len(questions)))

        def ask(worker: Worker, place: int) -> None:
            found[place] = self._rewarded(*worker.ask(questions[place]))

        ask_all(self._workers, in_time, ask, alive)
        return [found[place] for place in range(len(found))]

    def _rewarded(self, parts: list[dict[str, Any]] | None, why: str) -> Rewarded:
        if parts is None:
            return Rewarded((None,) * len(self.names), (f"{' + '.join(self.names)}: {why}",))
        faults = (f"{name}: {one['error']}" for name, one in zip(self.names, parts, strict=True) if "error" in one)
        return Rewarded(tuple(one.get("value") for one in parts), tuple(faults))

    def faults(self) -> list[str]:
        """Why functions cannot be loaded: said before answers are drawn that nobody could reward."""
        return self._workers[0].faults() if self.names else []

    def close(self) -> None:
        for worker in self._workers:
            worker.end()
