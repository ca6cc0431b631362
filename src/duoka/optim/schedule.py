"""Learning rates as a pure function of the optimizer step; no state to save, nothing to count twice."""

from __future__ import annotations

import math

from duoka.config.rates import warmup_steps
from duoka.config.schema import OptimConfig
from duoka.units import Amount


def tokens_per_step(global_batch: Amount, mean_length: float) -> float:
    """What an optimizer step learns from on average, when samples (or rows) have `mean_length` tokens."""
    return global_batch.count * (mean_length if global_batch.unit == "samples" else 1.0)


def learning_rate(optim: OptimConfig, step: int, total_steps: int, tokens_per_step: float | None = None) -> float:
    """The rate of optimizer step `step` (the first is 1) of `total_steps`."""
    warm = warmup_steps(optim, total_steps, tokens_per_step)
    if step > warm:
        return _rate_after(optim, step, total_steps, warm)
    rising = optim.lr * step / warm
    # wsd falls in its last steps, however long the warm-up is: where the two overlap, the rate turns where they meet.
    return min(rising, _rate_after(optim, step, total_steps, warm)) if optim.schedule == "wsd" else rising


def lost_peak(optim: OptimConfig, total_steps: int, tokens_per_step: float | None = None) -> float | None:
    """The highest rate of a run whose fall begins before its warm-up ends; None where it reaches `optim.lr`."""
    warm = warmup_steps(optim, total_steps, tokens_per_step)
    if optim.schedule != "wsd" or not warm or _rate_after(optim, warm, total_steps, warm) >= optim.lr:
        return None
    return max(learning_rate(optim, step, total_steps, tokens_per_step) for step in range(1, warm + 1))


def _rate_after(optim: OptimConfig, step: int, total_steps: int, warm: int) -> float:
    """The rate of a step behind the warm-up."""
    # The last step still learns: the fall ends one step after it, at min_lr.
    progress = (step - 1 - warm) / max(1, total_steps - warm)
    falls = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "wsd": min(1.0, (total_steps + 1 - step) / max(1.0, optim.decay * total_steps)),
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }
    return optim.lr * (optim.min_lr + (1.0 - optim.min_lr) * falls[optim.schedule])
