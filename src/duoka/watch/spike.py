"""When a loss is out of the ordinary: far above what the steps before it were, by their own spread."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from duoka.watch.columns import StepColumns

_BEFORE = 100  # steps that say what is ordinary
_LEAST_BEFORE = 20
_SPREADS = 8.0  # robust standard deviations
_LEAST_RISE = 0.2  # of the median: the spread of a flat curve is next to nothing
_MAD_TO_SIGMA = 1.4826


@dataclass(frozen=True)
class Spike:
    step: int
    loss: float
    ordinary: float  # the median before it

    def sentence(self) -> str:
        return f"the loss jumped to {self.loss:.4g} at step {self.step:,}, from {self.ordinary:.4g} before"


def is_spike(loss: float, before: Sequence[float]) -> bool:
    known = [value for value in before if not math.isnan(value)]
    if len(known) < _LEAST_BEFORE or math.isnan(loss):
        return False
    middle = statistics.median(known)
    spread = _MAD_TO_SIGMA * statistics.median(abs(value - middle) for value in known)
    return loss - middle > max(_SPREADS * spread, _LEAST_RISE * abs(middle))


def find_spike(steps: StepColumns, *, newest: int = 10) -> Spike | None:
    """The first of the newest steps whose loss stands out from those before it."""
    losses = steps.column("loss", _BEFORE + newest)
    count = len(losses)
    for place in range(max(0, count - newest), count):
        before = losses[max(0, place - _BEFORE) : place]
        if is_spike(losses[place], before):
            return Spike(steps[len(steps) - count + place].step, losses[place], statistics.median(before))
    return None
