"""How long a run is when `train.tokens` says so: the budget in tokens, and in optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass

from duoka.config.derive import count_batch_tokens
from duoka.config.schema import RunConfig
from duoka.plan.flops import products
from duoka.plan.sizes import ModelShape
from duoka.units import format_count, parse_budget


@dataclass(frozen=True)
class Horizon:
    """What `train.tokens` comes to: so much text, in so many steps."""

    tokens: int
    steps: int
    per_parameter: float  # of those that multiply: all but the input embedding
    tokens_per_step: int

    def sentence(self) -> str:
        return (
            f"{format_count(self.tokens)} tokens ({self.per_parameter:.3g} per parameter that multiplies) "
            f"/ {self.tokens_per_step:,} a step = {self.steps:,} steps"
        )


def find_horizon(config: RunConfig, shape: ModelShape) -> Horizon | None:
    """The budget in steps; None without `train.tokens`."""
    if config.train.tokens is None:
        return None
    per_step = count_batch_tokens(config)
    number = products(shape)
    tokens = parse_budget(config.train.tokens).tokens(number)
    return Horizon(tokens, max(1, round(tokens / per_step)), tokens / number, per_step)
