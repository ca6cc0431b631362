"""`load_optimizer` and `load_scheduler`: those of `duoka train`, for a loop of one's own."""

from __future__ import annotations

import math
from typing import Any

import torch

from duoka.compat.config import Part
from duoka.config.schema import OptimConfig
from duoka.errors import ConfigError


def load_optimizer(model: torch.nn.Module, trainer: Part) -> torch.optim.Optimizer:
    from duoka.optim.build import build_optimizer

    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return build_optimizer(named, trainer.run.optim)


class ScheduleLR(torch.optim.lr_scheduler.LRScheduler):
    """duoka's schedule as torch has schedulers: exactly the rates of `duoka train`, one for each optimizer step."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, optim: OptimConfig, total_steps: int,
        tokens_per_step: float | None = None,
    ) -> None:  # fmt: skip
        self.optim = optim
        self.total_steps = total_steps
        self.tokens_per_step = tokens_per_step
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        from duoka.optim.schedule import learning_rate

        # After the last step there is no next one: its rate stays.
        step = min(self.last_epoch + 1, self.total_steps)
        return [learning_rate(self.optim, step, self.total_steps, self.tokens_per_step) for _ in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict().items() if name != "optim"}


def load_scheduler(optimizer: torch.optim.Optimizer, trainer: Part, num_samples: int) -> ScheduleLR:
    """`num_samples` is this rank's, as `len(train_dataset)` gives it. The schedule's length is in optimizer steps."""
    from duoka.comm.world import join_world
    from duoka.units import parse_amount

    config = trainer.run
    world, _ = join_world(config.parallel)
    total = int(world.sum([float(num_samples)])[0])
    batch = parse_amount(config.train.global_batch)
    per_batch = batch.count if batch.unit == "samples" else max(1, batch.count // config.data.max_length)
    ends = [config.train.max_steps] if config.train.max_steps else []
    if config.train.epochs is not None:
        ends.append(math.ceil(math.ceil(total / per_batch) * config.train.epochs))
    if not ends:
        raise ConfigError("train.tokens counts text for duoka train, not for a loop of one's own", fix="set max_steps")
    tokens = float(batch.count) if batch.unit == "tokens" else None  # how long samples are, the loop knows alone
    return ScheduleLR(optimizer, config.optim, min(ends), tokens)
