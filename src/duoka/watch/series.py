"""Curves made small enough for a screen: by step, tokens or training time, each pixel with its mean, least and most."""

from __future__ import annotations

import bisect
import itertools
import math
from array import array
from collections.abc import Sequence

from duoka.watch.columns import StepColumns

AXES = {"step": "", "tokens": "num_tokens", "time": "step_s"}
_DIGITS = 6


def axis_of(steps: StepColumns, axis: str) -> array[float]:
    """Where each step lies. Tokens and time are sums over the steps that count: no clock, no lost step is in them."""
    if axis == "step":
        return array("d", steps.numbers())
    total, out = 0.0, array("d")
    for value in steps.column(AXES[axis]):
        total += value if value > 0 else 0.0
        out.append(total)
    return out


def thin_curve(
    xs: array[float], ys: array[float], most: int, *, low: float = -math.inf, high: float = math.inf, log: bool = False
) -> list[list[float | None]]:
    """Rows of x, mean, least, most: at most `most` of them, each of an equal share of the axis (of its logarithm).

    Of few points each is given as it is: x and y alone. A value that is no number gives null, which leaves a gap.
    """
    first, last = bisect.bisect_left(xs, low), bisect.bisect_right(xs, high)
    # One more on each side, so that a curve that was zoomed into goes on to the edge.
    first, last = max(0, first - 1), min(len(xs), last + 1)
    if last - first <= most:
        return [[short(xs[i]), short(ys[i])] for i in range(first, last)]
    rows: list[list[float | None]] = []
    for start, end in itertools.pairwise(_edges(xs, first, last, most, log)):
        if end > start:
            rows.append([short(xs[(start + end - 1) // 2]), *_spread(ys[start:end])])
    return rows


def _edges(xs: array[float], first: int, last: int, most: int, log: bool) -> list[int]:
    left, right = xs[first], xs[last - 1]
    if log:
        left = max(left, xs[bisect.bisect_right(xs, 0.0)] if right > 0 else 1.0)
        ratio = (right / left) ** (1 / most) if left > 0 else 1.0
        places = [left * ratio**i for i in range(1, most)]
    else:
        places = [left + (right - left) * i / most for i in range(1, most)]
    inner = [bisect.bisect_left(xs, place, first, last) for place in places]
    return [first, *inner, last]


def _spread(values: Sequence[float]) -> list[float | None]:
    total = sum(values)
    if math.isnan(total):
        values = [value for value in values if not math.isnan(value)]
        total = sum(values)
    if not values:
        return [None, None, None]
    return [short(total / len(values)), short(min(values)), short(max(values))]


def place_of(steps: array[int], xs: array[float], step: int) -> float | None:
    """Where an event of this step lies on the axis."""
    if not xs:
        return None
    return short(xs[min(len(xs) - 1, bisect.bisect_left(steps, step))])


def short(value: float) -> float | None:
    """With as many digits as a picture shows; null for what is no number."""
    return None if math.isnan(value) else float(f"{value:.{_DIGITS}g}")
