"""The one fixed order in which a model becomes parallel: (pipeline ->) (tensor ->) recompute -> (compile ->) data.

Names in brackets arrive with later parts, at their place in `parallelize`, and nowhere else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from duoka.config.schema import ParallelConfig
from duoka.model.build import LossModel
from duoka.parallel.ddp import CommunicationClock, apply_ddp
from duoka.parallel.world import World
from duoka.plan.layout import Layout


@dataclass(frozen=True)
class Parallelized:
    """`model` is called in training; `bare` is the same model without its wrapper, for names and for saving."""

    model: torch.nn.Module
    bare: LossModel
    clock: CommunicationClock = field(default_factory=CommunicationClock)

    def named_trainable(self) -> dict[str, torch.nn.Parameter]:
        """What the optimizer changes, by the names that checkpoints use."""
        return {name: p for name, p in self.bare.lm.named_parameters() if p.requires_grad}


def parallelize(bare: LossModel, layout: Layout, parallel: ParallelConfig, world: World) -> Parallelized:
    """Apply the layout to a model that is on its device already."""
    if layout.recompute == "full":
        apply_recompute(bare.lm)
    if layout.strategy == "single":
        return Parallelized(bare, bare)
    model, clock = apply_ddp(bare, parallel, world)
    return Parallelized(model, bare, clock)


def apply_recompute(lm: torch.nn.Module) -> None:
    """Keep only each layer's input, compute the rest again in the backward pass."""
    lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]


@contextlib.contextmanager
def compute_in(precision: str, device: torch.device) -> Iterator[None]:
    """The arithmetic of forward passes: fp32 as it is, bf16 and fp16 through autocast over fp32 masters."""
    if precision == "fp32":
        yield
        return
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    with torch.autocast(device.type, dtype=dtype):
        yield
