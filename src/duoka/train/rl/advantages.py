"""From rewards to advantages: how much better an answer was than others, a number for all of its tokens; or with a
value head how much better than it expected, a number for each.

Computed from plain numbers before anything is learned, the same on every rank; None is an answer without a reward,
which is no part of any mean. docs/rl.md has the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from duoka.config.rl import Advantage

_EPSILON = 1e-4  # beside a deviation


def advantages(groups: Sequence[Sequence[float | None]], kind: Advantage) -> list[list[float | None]]:
    """Of the answers to each prompt. A single reward, or equal ones, give exactly 0."""
    centered = [_center(group) for group in groups]
    if kind == "batch_std":
        spread = deviation([value for group in centered for value in group if value is not None])
        return [_scaled(group, spread) for group in centered]
    if kind == "group_std":
        return [_scaled(group, deviation([value for value in group if value is not None])) for group in centered]
    if kind == "leave_one_out":
        return [_left_out(group) for group in centered]
    return centered


def estimate(values: Sequence[float], reward: float, discount: float, gae_lambda: float) -> list[float]:
    """Of each token of an answer whose reward comes with its last one (GAE, arXiv 1506.02438): nothing comes after."""
    found, ahead, value_ahead, gained = [], 0.0, 0.0, reward
    for value in reversed(values):
        ahead = gained + discount * value_ahead - value + discount * gae_lambda * ahead
        value_ahead, gained = value, 0.0
        found.append(ahead)
    return found[::-1]


def whitened(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    """Less their common mean, over their common deviation."""
    every = [value for group in groups for value in group]
    mean, spread = math.fsum(every) / max(1, len(every)), deviation(every) + _EPSILON
    return [[(value - mean) / spread for value in group] for group in groups]


def has_signal(group: Sequence[float | None]) -> bool:
    """Whether the answers to a prompt differ in their rewards."""
    return len({value for value in group if value is not None}) > 1


def deviation(values: Sequence[float]) -> float:
    """Of a sample (over n - 1)."""
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _center(group: Sequence[float | None]) -> list[float | None]:
    known = [value for value in group if value is not None]
    if not has_signal(group):
        return [None if value is None else 0.0 for value in group]
    mean = math.fsum(known) / len(known)
    return [None if value is None else value - mean for value in group]


def _scaled(group: Sequence[float | None], spread: float) -> list[float | None]:
    return [None if value is None else value / (spread + _EPSILON) for value in group]


def _left_out(group: Sequence[float | None]) -> list[float | None]:
    """Less the mean of the others: G / (G - 1) times what is centered."""
    count = sum(value is not None for value in group)
    return [None if value is None else value * count / max(1, count - 1) for value in group]
