"""Windows: the micro-batches of one optimizer step, and what each of them weighs in its mean.

Gradients are added over micro-batches and ranks, never averaged; a loss is divided here, once, so that the sum is the
mean over the whole global batch: over its samples, or over its targets when `backward` is told how many there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from duoka.accelerator.readings import Current, Reading, Readings
from duoka.comm.world import World
from duoka.optim.host import local_part
from duoka.torch_private import foreach_mul_


@dataclass(frozen=True)
class Weighed:
    """A loss as its part of the window's mean. `outside`: what gradients outside of prepared models are multiplied
    with, so that they are those of this rank's own loss, divided by the steps of a window."""

    loss: torch.Tensor
    outside: Any
    is_nothing: bool = False  # a filling, or no targets: it takes part, and adds nothing


@dataclass
class Window:
    """The open window. `sync`: this micro-batch is its last, or there is no accumulation."""

    world: World  # the ranks whose losses make the mean
    readings: Readings
    num_steps: int = 1
    sync: bool = True
    at: int = 0  # micro-batches begun
    opened: Reading | None = None  # the batch that it began with
    expected: float = 0.0  # samples (or micro-batches) of a full window: what plain losses are divided by
    total: float = 0.0  # what there truly are, so far
    is_local: bool = False  # this rank steps by itself (LocalSGD)
    is_inside: bool = False  # of a micro-batch that `accumulate` announced
    taken: Reading | None = None  # that micro-batch's
    scale: torch.Tensor | float | None = None  # what counted losses were divided by so far
    num_targets: Any = 0
    usual_targets: float = 0.0

    @property
    def current(self) -> Current | None:
        """The micro-batch that the loop works on."""
        reading = self.taken if self.is_inside else self.readings.in_hand or self.readings.newest
        return None if reading is None else reading.current

    def current_of(self, values: Iterable[torch.Tensor]) -> tuple[Current | None, Any]:
        """The micro-batch that these tensors belong to (or else the loop), and its loader."""
        reading = self.readings.find(values) or (self.taken if self.is_inside else self.readings.newest)
        return (None, None) if reading is None else (reading.current, reading.loader)

    def begin_micro_batch(self) -> None:
        """Called by `accumulate`: is this the last one, and what does it weigh?"""
        self.taken = self.readings.take()
        current = None if self.taken is None else self.taken.current
        if self.at == 0:
            self.expected = self.total = 0.0
            self.opened = self.taken
        self.at += 1
        self.is_inside = True
        if current and current.window_total is not None:
            self.sync = current.ends_window
            self.expected = self.total = current.window_total
        else:
            self.sync = self.at >= self.num_steps or bool(current and current.is_last)
            weight = current.num_global if current else self.world.size
            self.expected = self.expected or self.num_steps * weight
            self.total += weight
        if self.sync:
            self.at = 0

    def end_micro_batch(self) -> None:
        self.is_inside = False

    def weigh(self, loss: torch.Tensor) -> Weighed:
        """A plain loss (the mean over its micro-batch), as its part of the window's mean.

        Where a loop divides its windows by itself (outside of `accumulate`, with more than one step), ranks weigh the
        same: such a loop may have counted its samples or tokens already.
        """
        current = self.current
        num_own, num_global = (current.num_own, current.num_global) if current else (1, self.world.size)
        if not num_own:
            return Weighed(nothing_of(loss), 0.0, is_nothing=True)
        if self.is_local:
            divisor = float(self.num_steps)
        elif self.is_inside:
            divisor = self.expected / num_own
        elif self.num_steps > 1:
            divisor = self.num_steps * self.world.size
        else:
            divisor = num_global / num_own
        return Weighed(loss / divisor, divisor / self.num_steps)

    @property
    def correction(self) -> float:
        """By how much a plain window's gradients are too small: a short last one, or batches of several sizes."""
        if self.is_local or not self.is_inside or not self.total or self.scale is not None:
            return 1.0
        return self.expected / self.total

    def weigh_counted(self, loss: torch.Tensor, count: Any, is_mean: bool) -> Weighed:
        """A loss over `count` targets; filling counts for nothing."""
        current = self.current
        if current and not current.num_own:
            count = 0
        number = torch.as_tensor(count, dtype=torch.float64, device=self.world.device).detach()
        if current and current.window_total is not None:
            divisor: Any = current.window_total
        else:
            self.scale = self._guess(number) if self.scale is None else self.scale
            self.num_targets = self.num_targets + number
            divisor = self.scale
        # The mean over no targets is 0/0. A sum over none is 0, and its count may stay on the device.
        if (is_mean or not isinstance(count, torch.Tensor)) and not bool(count):
            return Weighed(nothing_of(loss), 0.0, is_nothing=True)
        if is_mean:
            loss = loss * number.to(loss.dtype)
        return Weighed(loss / divisor, divisor / (self.num_steps * number.clamp(min=1.0)))

    def _guess(self, number: torch.Tensor) -> float:
        """About what the window's targets will be: a power of two, which divides without rounding."""
        if not self.usual_targets:
            self.usual_targets = self.world.sum([float(number)])[0] * self.num_steps
        return 2.0 ** max(0, int(self.usual_targets).bit_length() - 1)

    def settle_counted(self, grads: Iterable[torch.Tensor]) -> None:
        """Gradients are exchanged: divide them by what the window's targets truly are, over all ranks."""
        if self.scale is None:
            return
        total = self.num_targets.clone()
        if self.world.size > 1:
            torch.distributed.all_reduce(total, group=self.world.group)
        scale_all(grads, torch.where(total > 0, self.scale / total.clamp(min=1.0), 0.0))
        self.scale = total.clamp(min=1.0)

    def close(self) -> None:
        """The optimizer stepped, or gradients were dropped."""
        self.scale, self.num_targets = None, 0

    @property
    def is_open(self) -> bool:
        """Gradients of some micro-batches wait for the others."""
        return self.at > 0


def nothing_of(loss: torch.Tensor) -> torch.Tensor:
    """Zero, with gradients of zero: this rank takes part in what the others exchange, and adds nothing."""
    return torch.nan_to_num(loss) * 0.0


def scale_all(grads: Iterable[torch.Tensor], factor: Any) -> None:
    local = [local_part(grad) for grad in grads]
    if local:
        wide = torch.float64 if local[0].dtype == torch.float64 else torch.float32
        number = factor.to(local[0].device, wide) if isinstance(factor, torch.Tensor) else factor
        foreach_mul_(local, number)
