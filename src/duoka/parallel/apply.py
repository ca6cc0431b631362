"""The one fixed order in which a model becomes parallel: (pipeline ->) (tensor ->) recompute -> (compile ->) data.

Names in brackets arrive with later parts, at their place in `parallelize`, and nowhere else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property

import torch

from duoka.config.schema import ParallelConfig
from duoka.model.build import LossModel
from duoka.model.shards import WeightSource
from duoka.parallel.ddp import CommunicationClock, DdpExchange, apply_ddp
from duoka.parallel.sharded import apply_sharded, fill_shards
from duoka.parallel.world import World
from duoka.plan.layout import Layout


def exchange_nothing(last: bool) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


def keep_as_is() -> None:
    """Nothing was gathered, nothing is to be given back."""


@dataclass(frozen=True)
class Parallelized:
    """`model` is called in training; `bare` is the same model without its wrapper, for names and for saving.

    Each micro-batch's passes run inside `exchange(is it the step's last)`; `settle` follows passes without a backward.
    """

    model: torch.nn.Module
    bare: LossModel
    clock: CommunicationClock = field(default_factory=CommunicationClock)
    exchange: Callable[[bool], AbstractContextManager[None]] = exchange_nothing
    settle: Callable[[], None] = keep_as_is
    num_sharing: int = 1  # ranks that hold one copy of weights and state together

    def named_trainable(self) -> dict[str, torch.nn.Parameter]:
        """What the optimizer changes, by the names that checkpoints use; shards where weights are sharded."""
        return self._trainable

    @cached_property
    def _trainable(self) -> dict[str, torch.nn.Parameter]:
        # Looked up once, before the first pass: FSDP shows gathered weights under the same names while it computes.
        return {name: p for name, p in self.bare.lm.named_parameters() if p.requires_grad}


def parallelize(
    bare: LossModel, layout: Layout, parallel: ParallelConfig, world: World, source: WeightSource | None = None
) -> Parallelized:
    """Apply the layout. With `source` the model is on the meta device still, and is filled once it is sharded."""
    if layout.recompute == "full":
        apply_recompute(bare.lm)
    if layout.is_sharded:
        exchange = apply_sharded(bare, layout, parallel, world)
        if source is not None:
            home = torch.device("cpu") if layout.offload == "params" else world.device
            fill_shards(bare.lm, source, home)
        return Parallelized(bare, bare, exchange=exchange, settle=exchange.settle, num_sharing=layout.shard)
    bare.to(world.device)
    if layout.strategy == "single":
        return Parallelized(bare, bare)
    model, clock = apply_ddp(bare, parallel, world)
    return Parallelized(model, bare, clock, DdpExchange(model))


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
