"""`duoka plan --validate`: the planner's errors on published runs of other projects.

Constants were fitted to rows marked `fit` only; the other rows, of other cards, models and programs, judge them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from duoka.plan.crossval import Fold, cross_validate, pooled
from duoka.plan.flops import megatron_flops_per_token, palm_flops_per_token
from duoka.plan.memory import TIGHT
from duoka.plan.published import PublishedRun, read_points

# What the plan promises of itself on these rows: (median, p90) of the relative error, and right answers.
PROMISED = {"memory": (0.10, 0.25), "step time": (0.15, 0.35)}
PROMISED_RIGHT = 0.95


@dataclass(frozen=True)
class Errors:
    """Relative errors of one quantity over some rows; `bias` is the median with its sign (positive: too much)."""

    quantity: str
    rows: str
    num_rows: int
    median: float
    p90: float
    bias: float
    worst: str


@dataclass(frozen=True)
class Validation:
    """All tables, and whether every promise holds."""

    errors: tuple[Errors, ...]
    num_right: int
    num_judged: int
    wrong: tuple[str, ...]
    unused: dict[str, int]
    folds: tuple[Fold, ...] = ()

    @property
    def broken(self) -> list[str]:
        """Promises that do not hold on all rows together."""
        found = []
        for row in self.errors:
            if row.rows == "all" and row.quantity in PROMISED:
                found += _too_far(row.quantity, row.median, row.p90, row.quantity)
        for quantity in dict.fromkeys(fold.quantity for fold in self.folds):
            found += _too_far(f"{quantity} foretold without its source", *pooled(self.folds, quantity), quantity)
        if self.num_right < PROMISED_RIGHT * self.num_judged:
            found.append(f"fits or not: {self.num_right} of {self.num_judged} right")
        return found

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"broken": self.broken}

    def lines(self) -> list[str]:
        out = [f"{'quantity':<14}{'rows':<34}{'number':>7}{'median':>9}{'p90':>8}{'bias':>8}  worst"]
        out += [
            f"{row.quantity:<14}{row.rows:<34}{row.num_rows:>7}{row.median:>9.1%}{row.p90:>8.1%}{row.bias:>+8.1%}"
            f"  {row.worst}"
            for row in self.errors
        ]
        share = self.num_right / max(1, self.num_judged)
        out.append(f"{'fits or not':<14}{'all':<34}{self.num_judged:>7}  {self.num_right} right ({share:.1%})")
        out += [f"  wrong: {text}" for text in self.wrong]
        out += [f"left out: {count} rows, {why}" for why, count in self.unused.items()]
        out += self._fold_lines()
        out.append("bias: the plan's figure above (+) or below (-) what was measured, median")
        return out

    def _fold_lines(self) -> list[str]:
        if not self.folds:
            return []
        out = ["", "each source foretold by constants that were fitted anew to all others, from neutral values:"]
        out += [fold.line() for fold in self.folds]
        for quantity in dict.fromkeys(fold.quantity for fold in self.folds):
            median, p90 = pooled(self.folds, quantity)
            number = sum(fold.num_rows for fold in self.folds if fold.quantity == quantity)
            out.append(f"{quantity:<14}{'all, each without its own source':<34}{number:>7}{median:>9.1%}{p90:>8.1%}")
        return [*out, ""]


def _too_far(name: str, median: float, p90: float, quantity: str) -> list[str]:
    most = PROMISED[quantity]
    return [f"{name}: median {median:.1%} and p90 {p90:.1%}"] if median > most[0] or p90 > most[1] else []


def validate() -> Validation:
    """Run the planner over every published row that states its settings."""
    points, unused = read_points()
    errors: list[Errors] = []
    for name, measure in (("FLOPs", _flops_error), ("memory", _memory_error), ("step time", _time_error)):
        found = [(point, error) for point in points if (error := measure(point)) is not None]
        if not found:
            continue
        errors.append(_summary(name, "all", found))
        for title, chosen in _groups(found):
            errors.append(_summary(name, title, chosen))
    judged = [(point, _is_right(point)) for point in points]
    wrong = tuple(
        f"{point.id} {point.model} {point.layout.name} micro {point.micro} x {point.load.length:g} on "
        f"{point.cluster.device.name}: {'ran' if point.ran else 'ran out of memory'}, planned "
        f"{point.plan_memory().peak_bytes / 2**30:.1f} GiB"
        for point, right in judged
        if not right
    )
    return Validation(
        tuple(errors), sum(right for _, right in judged), len(judged), wrong, unused, cross_validate(points)
    )


Found = list[tuple[PublishedRun, float]]


def _groups(found: Found) -> Iterable[tuple[str, Found]]:
    """Rows that constants were fitted to, then each other source; titles say which."""
    key: Callable[[PublishedRun], str] = lambda point: (  # noqa: E731
        f"{'fitted' if point.split == 'fit' else 'judging'}: {point.project} {point.cluster.device.name}"
    )
    titles = list(dict.fromkeys(key(point) for point, _ in found))
    for title in sorted(titles, key=lambda title: not title.startswith("fitted")):
        yield title, [(point, error) for point, error in found if key(point) == title]


def _summary(quantity: str, rows: str, found: Found) -> Errors:
    sizes = sorted(abs(error) for _, error in found)
    worst, error = max(found, key=lambda pair: abs(pair[1]))
    return Errors(
        quantity=quantity,
        rows=rows,
        num_rows=len(found),
        median=statistics.median(sizes),
        p90=sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))],
        bias=statistics.median(error for _, error in found),
        worst=f"{worst.id} {worst.model} {error:+.0%}",
    )


def _flops_error(point: PublishedRun) -> float | None:
    """Does the named formula give the share of the peak that the source printed from its own tokens per second?"""
    if point.flops_share is None or point.step_s is None:
        return None
    formula = {"6N+12A": palm_flops_per_token, "megatron": megatron_flops_per_token}[point.flops_formula]
    per_token = formula(point.shape, round(point.load.length))
    peak = point.cluster.device.peak_flops(point.layout.precision) * point.cluster.num_devices
    return per_token * point.load.tokens_per_step / (point.step_s * peak) / point.flops_share - 1


def _memory_error(point: PublishedRun) -> float | None:
    if point.memory_bytes is None:
        return None
    return point.plan_memory().peak_bytes / point.memory_bytes - 1


def _time_error(point: PublishedRun) -> float | None:
    return point.plan_speed().step_s / point.step_s - 1 if point.step_s and point.ran else None


def _is_right(point: PublishedRun) -> bool:
    return (point.plan_memory().peak_bytes <= TIGHT * point.cluster.device.memory_bytes) == point.ran
