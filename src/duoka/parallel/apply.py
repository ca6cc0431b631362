"""The one fixed order in which a model becomes parallel: (pipeline ->) (tensor ->) recompute -> compile -> data.

For `duoka train`, whose model is a LossModel, and for any module that people's own loops bring (duoka.Accelerator).

Names in brackets arrive with later parts, at their place in `parallelize`, and nowhere else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from duoka.comm.world import World, keep_group
from duoka.config.schema import ParallelConfig
from duoka.model.build import LossModel, find_core, named_part
from duoka.model.fused import apply_fused
from duoka.model.shards import Weights
from duoka.optim.muon import Sharing, WholeMatrices
from duoka.optim.spread import Groups, spread_of
from duoka.parallel.ddp import DdpExchange, apply_ddp
from duoka.parallel.dp import Replicas, apply_dp
from duoka.parallel.matrices import OwnedExchange, OwnedMatrices, RowMatrices
from duoka.parallel.recompute import apply_recompute
from duoka.parallel.sharded import HALF, apply_sharded, fill_shards, find_layers
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
    bare: torch.nn.Module
    exchange: Callable[[bool], AbstractContextManager[None]] = exchange_nothing
    settle: Callable[[], None] = keep_as_is
    num_sharing: int = 1  # ranks that hold one copy of weights and state together
    owned: OwnedMatrices | None = None

    def named_trainable(self) -> dict[str, torch.nn.Parameter]:
        """What the optimizer changes, by the names that checkpoints use; shards where weights are sharded."""
        return self._trainable

    def go_on(self) -> None:
        """Weights and state came from a checkpoint: the first step must add as the later ones of that run did."""
        if isinstance(self.exchange, DdpExchange):
            self.exchange.go_on()

    @contextlib.contextmanager
    def for_evaluation(self) -> Iterator[torch.nn.Module]:
        """The model for passes without a backward: bare, but under dp on all GPUs, copied to them once."""
        if isinstance(self.model, Replicas):
            with self.model.replicated_once():
                yield self.model
        else:
            yield self.bare
        self.settle()

    @cached_property
    def _trainable(self) -> dict[str, torch.nn.Parameter]:
        # Looked up once, before the first pass: FSDP shows gathered weights under the same names while it computes.
        return {name: p for name, p in named_part(self.bare).named_parameters() if p.requires_grad}

    def spread_of(self, parameter: torch.Tensor) -> Groups:
        """The groups whose ranks hold different parts of a parameter's gradient."""
        if self.owned is not None and self.owned.owns(parameter):
            return (self.owned.group,)
        return spread_of(parameter)

    def share_matrices(self, matrices: list[torch.nn.Parameter]) -> Sharing:
        """How whole matrices come to whoever works on them."""
        if self.owned is not None:
            return self.owned
        sharded = [matrix for matrix in matrices if isinstance(matrix, DTensor)]
        return RowMatrices(sharded) if sharded else WholeMatrices(matrices)


def parallelize(
    bare: torch.nn.Module,
    layout: Layout,
    parallel: ParallelConfig,
    world: World,
    source: Weights | None = None,
    matrices: Collection[str] = (),
) -> Parallelized:
    """Apply the layout. With `source` the model is on the meta device still, and is filled once it is sharded.

    `matrices` names what the optimizer needs whole: under zero1 and zero2 each has a rank that owns it.
    """
    if isinstance(bare, LossModel) and not layout.compile:
        # Selective recompute keeps products as they are: adapters may not add to them in place.
        apply_fused(bare.lm, adapters=layout.recompute != "selective")
    if layout.recompute != "none":
        apply_recompute(named_part(bare), layout.recompute)
    if layout.compile:
        for layer in find_layers(find_core(bare)):
            layer.compile(dynamic=True)  # lengths differ from micro-batch to micro-batch
    if layout.is_sharded:
        return _apply_sharing(bare, layout, parallel, world, source, matrices)
    bare.to(world.device)
    if layout.strategy == "single":
        return Parallelized(bare, bare)
    if layout.strategy == "dp":
        assert isinstance(bare, LossModel)
        return Parallelized(apply_dp(bare, layout.precision), bare)
    model, power = apply_ddp(bare, parallel, world)
    # With a static graph DDP has learnt by itself which parameters are never used.
    looks = parallel.find_unused_parameters or parallel.static_graph
    return Parallelized(model, bare, DdpExchange(model, looks, parallel.static_graph, power))


def _apply_sharing(
    bare: torch.nn.Module,
    layout: Layout,
    parallel: ParallelConfig,
    world: World,
    source: Weights | None,
    matrices: Collection[str],
) -> Parallelized:
    apart = matrices if layout.strategy in ("zero1", "zero2") else ()
    exchange = apply_sharded(bare, layout, parallel, world, apart)
    if source is not None:
        home = torch.device("cpu") if layout.offload == "params" else world.device
        fill_shards(named_part(bare), source, home)
    if not apart:
        return Parallelized(bare, bare, exchange=exchange, settle=exchange.settle, num_sharing=layout.shard)
    named = dict(named_part(bare).named_parameters())
    owned = OwnedMatrices(
        [named[name] for name in named if name in apart],
        world.size,
        world.rank,
        # A group of their own: their gradients travel between those of FSDP's units, in whatever order.
        keep_group(dist.new_group()),
        every_pass=layout.strategy == "zero2",
        wire=HALF.get(parallel.compress, torch.float32),
    )
    return Parallelized(
        bare, bare, exchange=OwnedExchange(exchange, owned), settle=exchange.settle,
        num_sharing=layout.shard, owned=owned,
    )  # fmt: skip
