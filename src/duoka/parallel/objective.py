"""What a stage asks of the model, as the engine sees it: sums over a micro-batch, and what each sum is divided by.

Stages (train/stages) implement `Objective`; engines call it for each micro-batch, wherever the layout computes it. The
loss of an optimizer step is `sum over k of sums[k] / denominators[k]`. Each denominator is global for the step and
known on every rank before the first micro-batch, so no mean of means can arise.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from duoka.data.feed.loader import Batch, GlobalBatch


@dataclass(frozen=True)
class Sums:
    """Of one micro-batch: `losses` by the name of their denominator, with gradients; `metrics` without."""

    losses: Mapping[str, torch.Tensor]
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Objective(Protocol):
    """What an optimizer step minimizes."""

    @property
    def metrics(self) -> Mapping[str, str]:
        """The keys of `Sums.metrics`, and which denominator makes each a mean.

        Known beforehand, because a rank without memory has sums of none.
        """
        ...

    def denominators(self, batch: GlobalBatch) -> Mapping[str, float]:
        """Global counts of the whole optimizer step by name (tokens, sequences, pairs, groups).

        None is 0 of a sum in the loss. A metric whose count is 0 in a step is left out of it.
        """
        ...

    def sums(self, model: torch.nn.Module, micro: Batch, device: torch.device) -> Sums:
        """The forward pass of one micro-batch, in the engine's precision; called inside its autocast."""
        ...


@runtime_checkable
class LooksAhead(Protocol):
    """An objective whose loss of each sample needs numbers of the whole global batch: passes without gradients first
    (parallel/look_ahead.py)."""

    num_looked: int

    def look(self, model: torch.nn.Module, micro: Batch, device: torch.device) -> torch.Tensor:
        """(num_looked,) float64: sums over one micro-batch; called inside autocast, on every rank equally often."""
        ...

    def has_looked(self, totals: Sequence[float], batch: GlobalBatch) -> None:
        """Take the sums over the whole global batch; they are the same on every rank."""
        ...


def mean_loss(losses: Mapping[str, torch.Tensor], denominators: Mapping[str, float]) -> torch.Tensor:
    """A micro-batch's part of the step's loss, for its backward pass."""
    # Without a zero to begin with: a single sum takes no addition, and its gradients keep their bits.
    return functools.reduce(torch.add, (loss / denominators[name] for name, loss in losses.items()))


def no_loss(losses: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Zero, through all that the losses came from: a backward pass that exchanges and changes nothing."""
    return functools.reduce(torch.add, losses.values()) * 0.0
