"""Cross-validation of the planner: predict the runs of each source with constants fitted without it.

The constants are fitted anew, from neutral values and by search alone, to the rows of all other sources, and then
judged on those of the one left out. `duoka plan --validate` prints the table. What it cannot undo: the form of the
formulas, and what is known of each program, were written down with all rows in view.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from duoka.plan.published import PublishedRun
from duoka.plan.speed import Rates

if TYPE_CHECKING:
    import numpy as np

# (name, neutral value to start from, lowest, highest): limits are physical ones, not what fits.
_TIME_CONSTANTS = (
    ("products", 0.6, 0.2, 1.0),
    ("attention", 0.5, 0.05, 1.0),
    ("half_tokens", 100.0, 1.0, 2000.0),
    ("touches", 2.0, 0.5, 8.0),
)
_MEMORY_CONSTANTS = (("framework", 1.0, 0.1, 4.0), ("axis", 1.0, 0.1, 4.0))  # GiB
_ROWS_PER_SOURCE = 30  # to fit to: enough for two or four constants
_ROUNDS, _NUDGE = 8, 0.05
# Rows of one source share its faults: a source is off by 15%, a neutral constant by a factor of 1.5 (0.4 in logs).
_HOLD = 0.15 / 0.4


@dataclass(frozen=True)
class Fold:
    """One source left out: the errors on its rows, and the constants that all other sources gave."""

    quantity: str
    source: str
    num_rows: int
    num_others: int
    median: float
    p90: float
    bias: float
    constants: dict[str, float]
    errors: tuple[float, ...] = field(default=(), repr=False)

    def line(self) -> str:
        found = ", ".join(f"{name} {value:.3g}" for name, value in self.constants.items())
        return (
            f"{self.quantity:<14}{'without ' + self.source:<34}{self.num_rows:>7}{self.median:>9.1%}{self.p90:>8.1%}"
            f"{self.bias:>+8.1%}  {found}"
        )


def pooled(folds: Sequence[Fold], quantity: str) -> tuple[float, float]:
    """(median, p90) of all rows, each foretold without its own source."""
    sizes = sorted(abs(error) for fold in folds if fold.quantity == quantity for error in fold.errors)
    return statistics.median(sizes), sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]


Predict = Callable[[PublishedRun, Sequence[float]], float]  # of a point under constants: predicted / measured


def cross_validate(points: Sequence[PublishedRun]) -> tuple[Fold, ...]:
    """A fold per source and quantity."""
    timed = [point for point in points if point.step_s and point.ran]
    weighed = [point for point in points if point.memory_bytes is not None]
    return (
        *_folds("step time", timed, _TIME_CONSTANTS, _time_ratio),
        *_folds("memory", weighed, _MEMORY_CONSTANTS, _memory_ratio),
    )


def _time_ratio(point: PublishedRun, values: Sequence[float]) -> float:
    products, attention, half_tokens, touches = values
    generation = point.cluster.device.generation
    rates = Rates({generation: products}, {generation: attention}, half_tokens, touches)
    return point.plan_speed(rates).step_s / (point.step_s or 1.0)


def _memory_ratio(point: PublishedRun, values: Sequence[float]) -> float:
    """A program's way to keep numbers is known of it, not fitted; what is fitted is what no document tells."""
    memory = point.plan_memory()
    own = (values[0] + values[1] * len(point.layout.axes)) * 2**30
    return (memory.peak_bytes - memory.parts["framework"] + own) / (point.memory_bytes or 1.0)


def _folds(
    quantity: str,
    points: Sequence[PublishedRun],
    constants: Sequence[tuple[str, float, float, float]],
    predict: Predict,
) -> list[Fold]:
    found = []
    for source in dict.fromkeys(point.project for point in points):
        others: dict[str, list[PublishedRun]] = {}
        for point in points:
            if point.project != source:
                others.setdefault(point.project, []).append(point)
        if not others:
            continue  # nothing to fit to
        values = _fit([_some(rows) for rows in others.values()], constants, predict)
        errors = [predict(point, values) - 1 for point in points if point.project == source]
        sizes = sorted(map(abs, errors))
        found.append(
            Fold(
                quantity, source, len(errors), sum(map(len, others.values())), statistics.median(sizes),
                sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))], statistics.median(errors),
                {name: value for (name, *_), value in zip(constants, values, strict=True)}, tuple(errors),
            )
        )  # fmt: skip
    return found


def _some(rows: list[PublishedRun]) -> list[PublishedRun]:
    """Evenly chosen, so that a source with many rows costs no more time than one with few."""
    every = max(1, -(-len(rows) // _ROWS_PER_SOURCE))
    return rows[::every]


def _fit(
    sources: Sequence[Sequence[PublishedRun]], constants: Sequence[tuple[str, float, float, float]], predict: Predict
) -> list[float]:
    """Least squares of the logarithms of predicted / measured, each source as heavy as any other (Gauss-Newton)."""
    import numpy as np

    weights = np.concatenate([np.full(len(rows), len(rows) ** -0.5) for rows in sources])
    low, high = (np.log([constant[place] for constant in constants]) for place in (2, 3))
    start = np.log([constant[1] for constant in constants])

    def residuals(place: np.ndarray) -> np.ndarray:
        values = np.exp(place).tolist()
        errors = [math.log(predict(point, values)) for rows in sources for point in rows]
        # What the rows do not tell stays where it began.
        return np.concatenate([weights * errors, _HOLD * (place - start)])

    place = start
    now = residuals(place)
    for _ in range(_ROUNDS):
        nudges = _NUDGE * np.eye(len(place))
        slopes = np.stack([(residuals(place + nudge) - now) / _NUDGE for nudge in nudges], axis=1)
        step = np.linalg.lstsq(slopes, -now, rcond=None)[0]
        for shorter in (1.0, 0.3, 0.1):
            tried = np.clip(place + shorter * step, low, high)
            then = residuals(tried)
            if then @ then < now @ now:
                break
        else:
            break
        place, now = tried, then
    values: list[float] = np.exp(place).tolist()
    return values
