"""Numbers made ready to be drawn: readable ticks, smoothing, thinning. Used by the terminal curve and the charts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

LOG_RATIO = 40.0  # a range wider than this is drawn on a logarithmic axis, or its lower part is a flat line


@dataclass(frozen=True)
class Point:
    x: float
    y: float


@dataclass(frozen=True)
class ChartBin:
    """Neighboring points drawn as one: where they lie, their mean, and how far they spread."""

    x: float
    mean: float
    low: float
    high: float


def points_of(steps: Sequence[float], values: Sequence[float | None]) -> list[Point]:
    """The points that exist: a null (a loss that was not finite) leaves a gap, not a zero."""
    pairs = zip(steps, values, strict=True)
    return [Point(float(x), float(y)) for x, y in pairs if y is not None and math.isfinite(y)]


def thin(points: Sequence[Point], most: int) -> list[ChartBin]:
    """At most `most` buckets with about equally many points each, in order; every point lies in one."""
    if not points:
        return []
    count = min(most, len(points))
    edges = [round(i * len(points) / count) for i in range(count + 1)]
    out: list[ChartBin] = []
    for start, end in itertools.pairwise(edges):
        group = points[start:end]
        values = [point.y for point in group]
        middle = sum(point.x for point in group) / len(group)
        out.append(ChartBin(middle, sum(values) / len(values), min(values), max(values)))
    return out


def smooth(points: Sequence[Point], window: float | None = None) -> list[Point]:
    """A running mean that forgets over `window` points (a fortieth of all, three at least).

    Taken from both ends and averaged: from one end only, it would run behind a falling curve.
    """
    window = max(3.0, len(points) / 40) if window is None else window
    values = [point.y for point in points]
    there, back = _forgetful_mean(values, window), _forgetful_mean(values[::-1], window)[::-1]
    return [Point(point.x, (a + b) / 2) for point, a, b in zip(points, there, back, strict=True)]


def _forgetful_mean(values: Sequence[float], window: float) -> list[float]:
    keep = 1.0 - 1.0 / window
    total, weight, out = 0.0, 0.0, []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1.0
        out.append(total / weight)
    return out


def wants_log(low: float, high: float) -> bool:
    return low > 0 and high / low > LOG_RATIO


def nice_ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers (1, 2, 5 times a power of ten) inside the range, at most `most` of them."""
    if not low < high:
        return [low]
    rough = (high - low) / max(1, most)
    power = 10.0 ** math.floor(math.log10(rough))
    for factor in (1, 2, 5, 10):
        size = factor * power
        first, last = math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9)
        if last - first + 1 <= most:
            # Through a decimal string: 3 * 0.1 is not 0.3.
            return [float(f"{number * size:.12g}") for number in range(first, last + 1)]
    return [low, high]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers for a logarithmic axis."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1,)):
        ticks = [factor * 10.0**exponent for exponent in exponents for factor in factors]
        inside = [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
        if len(inside) <= most:
            return inside
    step = math.ceil(len(inside) / most)
    return inside[::step]


def padded(low: float, high: float, *, log: bool = False) -> tuple[float, float]:
    """The range with air above and below; a single value gets a range around it."""
    if log:
        return low / 1.15, high * 1.15
    if low == high:
        spread = abs(low) * 0.1 or 1.0
        return low - spread, high + spread
    air = (high - low) * 0.06
    return (0.0 if low >= 0 > low - air else low - air), high + air


def short_number(value: float) -> str:
    """A label of at most about six characters: 0.35, 12k, 2e-05."""
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e4:
        return f"{value / 1e3:.3g}k"
    if size < 1e-3:
        return f"{value:.2g}".replace("e-0", "e-")
    return f"{value:.4g}"
