"""How FSDP's units exchange: through collectives.py, so that bytes are counted and gloo is used at its best.

On gloo a gather runs beside the computation of the layer before it and is waited for where it is needed; gradients
are scattered by an all-to-all. On other backends the calls stay FSDP's own, on its own streams, and are only counted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from duoka.parallel.collectives import bytes_of, is_gloo, reduce_scatter, start_all_gather
from duoka.parallel.ledger import LEDGER
from duoka.plan.layout import Layout
from duoka.runs.heart import Heart


class CountedGather(AllGather):
    """Weights of a unit."""

    def __init__(self, heart: Heart) -> None:
        self._plain = DefaultAllGather()
        self._heart = heart

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._plain.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._heart.begin_exchange("all_gather of weights")
        if is_gloo(group, output_tensor.device):
            return start_all_gather(output_tensor, input_tensor, group)
        LEDGER.note("all-gather", bytes_of(output_tensor), group.size())
        return self._plain(output_tensor, input_tensor, group, async_op)


class CountedScatter(ReduceScatter):
    """Gradients of a unit; and, between groups that share a model, the sum over the groups."""

    def __init__(self, heart: Heart, num_replicas: int) -> None:
        self._plain = DefaultReduceScatter()
        self._heart = heart
        self._num_replicas = num_replicas
        self._scattered = 0.0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._plain.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        work = None
        self._heart.begin_exchange("reduce_scatter of gradients")
        if is_gloo(group, output_tensor.device):
            assert op == dist.ReduceOp.SUM, "apply_sharded asks for plain sums"
            reduce_scatter(output_tensor, input_tensor, group)
        else:
            LEDGER.note("reduce-scatter", bytes_of(input_tensor), group.size())
            work = self._plain(output_tensor, input_tensor, group, op, async_op)
        self._scattered = time.perf_counter()
        return work

    def after_all_reduce(self, shard: torch.Tensor) -> None:
        """Called by FSDP when it has summed `shard` over the groups, which comes right after the scatter."""
        LEDGER.note("all-reduce", bytes_of(shard), self._num_replicas)
        if self._scattered and shard.device.type == "cpu":
            LEDGER.waited_s += time.perf_counter() - self._scattered


def count_traffic(unit: FSDPModule, layout: Layout, heart: Heart) -> None:
    """Make a unit exchange through this file."""
    scatter = CountedScatter(heart, layout.num_replicas)
    unit.set_custom_all_gather(CountedGather(heart))
    unit.set_custom_reduce_scatter(scatter)
    if layout.num_replicas > 1:
        unit.set_all_reduce_hook(scatter.after_all_reduce)
