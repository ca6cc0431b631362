"""`load_optimizer` and `load_scheduler`: those of `duoka train`, for a loop of one's own."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from duoka.compat.config import STEP_SAMPLES, Part
from duoka.config.schema import OptimConfig
from duoka.errors import ConfigError
from duoka.model.build import find_core
from duoka.model.layers import find_layers, is_transformer
from duoka.units import Amount, parse_amount


def load_optimizer(model: torch.nn.Module, trainer: Part) -> torch.optim.Optimizer:
    """As `duoka train` has it: rates by the part that a parameter plays, of adapters' B matrices, Muon for matrices."""
    from duoka.optim.build import build_optimizer
    from duoka.optim.roles import assign_roles

    bare = model.module if isinstance(model, DistributedDataParallel) else model
    optim, lora = trainer.run.optim, trainer.run.lora
    named = {name: p for name, p in bare.named_parameters() if p.requires_grad}
    if optim.name == "muon" and any(isinstance(p, DTensor) for p in named.values()):
        raise ConfigError(
            "optim.name is muon, which steps on whole matrices, and this loop's model is sharded",
            fix="write   strategy: ddp   or   name: adamw   or train it by   duoka train",
        )
    core = find_core(bare)
    roles = assign_roles(bare, core, find_layers(core)) if is_transformer(core) else {}
    return build_optimizer(named, optim, roles=roles, b_lr_ratio=lora.b_lr_ratio if lora else 1.0)


class ScheduleLR(torch.optim.lr_scheduler.LRScheduler):
    """duoka's schedule as torch has schedulers: exactly the rates of `duoka train`, one for each optimizer step.

    Its length is counted anew where a loop goes on: what a loop of more epochs, or of other batches, has still to do.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, optim: OptimConfig, epochs: float | None, steps_per_epoch: int,
        max_steps: int | None = None, *, tokens_per_step: float | None = None, factor: float = 1.0,
    ) -> None:  # fmt: skip
        self.optim, self.factor, self.tokens_per_step = optim, factor, tokens_per_step
        self.epochs, self.max_steps, self.steps_per_epoch = epochs, max_steps, steps_per_epoch
        self._begun = 0, 0.0  # steps, and epochs, that were done before steps were of this size
        super().__init__(optimizer)

    @property
    def total_steps(self) -> int:
        steps, done = self._begun
        ends = [self.max_steps] if self.max_steps else []
        if self.epochs is not None:
            ends.append(steps + max(0, math.ceil((self.epochs - done) * self.steps_per_epoch - 1e-6)))
        return min(ends)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        from duoka.optim.schedule import learning_rate

        # After the last step there is no next one: its rate stays.
        total = max(1, self.total_steps)
        rate = learning_rate(self.optim, min(self.last_epoch + 1, total), total, self.tokens_per_step)
        return [rate * self.factor * group.get("scale", 1.0) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        steps, done = self._begun
        epochs_done = done + (self.last_epoch - steps) / self.steps_per_epoch
        return {"last_epoch": self.last_epoch, "_step_count": self._step_count, "epochs_done": epochs_done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch, self._step_count = state_dict["last_epoch"], state_dict["_step_count"]
        # Older states say nothing of epochs: their steps were as large as these.
        done = state_dict.get("epochs_done", self.last_epoch / self.steps_per_epoch)
        self._begun = self.last_epoch, done
        rates = self.get_lr()
        self._last_lr = [*rates]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def load_scheduler(optimizer: torch.optim.Optimizer, trainer: Part, num_samples: int) -> ScheduleLR:
    """`num_samples` is this rank's, as `len(train_dataset)` gives it. The schedule's length is in optimizer steps.

    A step has as many samples as the loader of `load_dataset` gives for it; without one, those of train.global_batch.
    """
    from duoka.comm.world import join_world
    from duoka.config.rates import batch_factor

    config = trainer.run
    if config.train.epochs is None and not config.train.max_steps:
        raise ConfigError("train.tokens counts text for duoka train, not for a loop of one's own", fix="set max_steps")
    world, _ = join_world(config.parallel)
    total = int(world.sum([float(num_samples)])[0])
    batch = parse_amount(config.train.global_batch)
    per_batch = batch.count if batch.unit == "samples" else max(1, batch.count // config.data.max_length)
    per_batch = trainer.found.get(STEP_SAMPLES, per_batch)
    if batch.unit == "samples":
        batch = Amount(per_batch, "samples")
    return ScheduleLR(
        optimizer, config.optim, config.train.epochs, max(1, math.ceil(total / per_batch)), config.train.max_steps,
        tokens_per_step=float(batch.count) if batch.unit == "tokens" else None,  # how long samples are, the loop knows
        factor=batch_factor(config.optim, batch),
    )  # fmt: skip
