"""How FSDP's units exchange: through collectives.py, so that bytes are counted and gloo is used at its best.

On gloo a gather runs beside the computation of the layer before it and is waited for where it is needed; gradients
are scattered by an all-to-all. On other backends the calls stay FSDP's own, on its own streams, and are only counted.
"""

from __future__ import annotations

import mmap
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from duoka.comm.blockwise import Nodes, reduce_scatter_packed, start_packed_gather
from duoka.comm.collectives import bytes_of, is_gloo, reduce_scatter, start_all_gather
from duoka.comm.ledger import LEDGER
from duoka.plan.layout import Layout
from duoka.runs.heart import Heart
from duoka.torch_private import AllGather, DefaultAllGather, DefaultReduceScatter, ReduceScatter


@dataclass
class _Slot:
    memory: mmap.mmap
    lease: Callable[[], object]  # gives None once no tensor lies in the memory


class LayerBuffers:
    """Host memory in which layers of one size travel, used again and again.

    Memory that comes fresh from the system for every layer costs a page fault per 4 KiB: a sixth of all processor time
    of a small step. A tensor's memory is free when the tensor and all views of it are gone.
    """

    def __init__(self) -> None:
        self._slots: dict[int, list[_Slot]] = {}
        self._numels: set[int] = set()

    def knows(self, numel: int) -> bool:
        """Whether as many numbers were ever asked for, in whatever type."""
        return numel in self._numels

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor, uninitialized."""
        num_bytes = numel * dtype.itemsize
        self._numels.add(numel)
        slots = self._slots.setdefault(num_bytes, [])
        slot = next((one for one in slots if one.lease() is None), None)
        if slot is None:
            slot = _Slot(mmap.mmap(-1, num_bytes), lambda: None)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                slot.memory.madvise(mmap.MADV_HUGEPAGE)
            slots.append(slot)
        view = np.frombuffer(slot.memory, dtype=np.uint8)
        slot.lease = weakref.ref(view)  # which the tensor's storage keeps alive
        return torch.from_numpy(view).view(dtype)


@dataclass(frozen=True)
class Packing:
    """In how many bits weights and gradients travel (0: as they are) among all `num_ranks` that share a model."""

    weight_bits: int = 0
    gradient_bits: int = 0
    num_ranks: int = 1
    nodes: Nodes | None = None  # where sums of gradients are made inside each node first


class CountedGather(AllGather):
    """Weights of a unit."""

    def __init__(self, heart: Heart, buffers: LayerBuffers | None, packing: Packing) -> None:
        self._packing = packing
        self._plain = DefaultAllGather()
        self._heart = heart
        self._buffers = buffers

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self._buffers is not None and device.type == "cpu":
            return self._buffers.take(int(size[0]), dtype)
        return self._plain.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._heart.begin_exchange("all_gather of weights")
        bits, on_gloo = self._packing.weight_bits, is_gloo(group, output_tensor.device)
        # Inside a node they travel as they are: packed anew in other parts, they would not be those of the forward.
        if bits and output_tensor.is_floating_point() and group.size() == self._packing.num_ranks:
            work = start_packed_gather(output_tensor, input_tensor, bits, group, may_overlap=on_gloo)
            if on_gloo:
                return work
            work.wait()
            return None
        if is_gloo(group, output_tensor.device):
            return start_all_gather(output_tensor, input_tensor, group)
        LEDGER.note("all-gather", bytes_of(output_tensor), group.size())
        return self._plain(output_tensor, input_tensor, group, async_op)


class CountedScatter(ReduceScatter):
    """Gradients of a unit; and, between groups that share a model, the sum over the groups."""

    def __init__(self, heart: Heart, num_replicas: int, buffers: LayerBuffers | None, packing: Packing) -> None:
        self._packing = packing
        self._plain = DefaultReduceScatter()
        self._heart = heart
        self._buffers = buffers
        self._num_replicas = num_replicas
        self._scattered = 0.0

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        # As large as the unit's gathered weights: its gradients on their way. What comes of them stays, and is plain.
        if self._buffers is not None and device.type == "cpu" and self._buffers.knows(int(size[0])):
            return self._buffers.take(int(size[0]), dtype)
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
        bits = self._packing.gradient_bits
        if bits and input_tensor.is_floating_point():
            assert op == dist.ReduceOp.SUM, "apply_sharded asks for plain sums"
            reduce_scatter_packed(output_tensor, input_tensor, bits, group, self._packing.nodes)
        elif is_gloo(group, output_tensor.device):
            assert op == dist.ReduceOp.SUM, "apply_sharded asks for plain sums"
            parts = self.allocate(input_tensor.shape, dtype=input_tensor.dtype, device=input_tensor.device)
            reduce_scatter(output_tensor, input_tensor, group, parts)
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


def count_traffic(
    unit: FSDPModule, layout: Layout, heart: Heart, buffers: LayerBuffers | None, packing: Packing
) -> None:
    """Make a unit exchange through this file; units of one size share `buffers`."""
    scatter = CountedScatter(heart, layout.num_replicas, buffers, packing)
    unit.set_custom_all_gather(CountedGather(heart, buffers, packing))
    unit.set_custom_reduce_scatter(scatter)
    if layout.num_replicas > 1:
        unit.set_all_reduce_hook(scatter.after_all_reduce)
