"""Learning rates as a pure function of the optimizer step; no state to save, nothing to count twice."""

from __future__ import annotations

import math

from duoka.config.schema import OptimConfig


def warmup_steps(optim: OptimConfig, total_steps: int) -> int:
    """Below 1 the warm-up is a share of all steps, from 1 on it is a number of steps."""
    steps = optim.warmup * total_steps if optim.warmup < 1 else optim.warmup
    return min(math.ceil(steps - 1e-9), total_steps)


def learning_rate(optim: OptimConfig, step: int, total_steps: int) -> float:
    """The rate of optimizer step `step` (the first is 1) of `total_steps`."""
    warm = warmup_steps(optim, total_steps)
    if step <= warm:
        return optim.lr * step / warm
    # The last step still learns: the fall ends one step after it, at min_lr.
    progress = (step - 1 - warm) / max(1, total_steps - warm)
    falls = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }
    return optim.lr * (optim.min_lr + (1.0 - optim.min_lr) * falls[optim.schedule])
