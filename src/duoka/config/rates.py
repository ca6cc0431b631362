"""What a config says of learning rates in numbers: steps of warm-up, and the factor of a batch on all rates."""

from __future__ import annotations

import math

from duoka.config.schema import OptimConfig
from duoka.errors import ConfigError
from duoka.units import Amount, parse_amount, parse_warmup


def warmup_steps(optim: OptimConfig, total_steps: int, tokens_per_step: float | None = None) -> int:
    """Below 1 the warm-up is a share of all steps, from 1 on a number of steps; of tokens, the steps that hold them."""
    warm = parse_warmup(optim.warmup)
    if isinstance(warm, Amount):
        if tokens_per_step is None:
            raise ConfigError(
                f"optim.warmup is {optim.warmup}, and it is unknown how many tokens a step has",
                fix='write train.global_batch in tokens, such as "64k tokens", or the warm-up in steps',
            )
        steps = warm.count / tokens_per_step
    else:
        steps = warm * total_steps if warm < 1 else warm
    return min(math.ceil(steps - 1e-9), total_steps)


def batch_factor(optim: OptimConfig, global_batch: Amount) -> float:
    """How much larger rates are than they are written, because the batch is not the one they were found for."""
    if optim.lr_scaling == "none" or optim.lr_batch is None:
        return 1.0
    ratio = global_batch.count / parse_amount(optim.lr_batch).count
    return ratio if optim.lr_scaling == "linear" else math.sqrt(ratio)
