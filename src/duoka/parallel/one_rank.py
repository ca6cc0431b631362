"""FSDP on a CPU without other ranks: passes compute with the shards, and gradients are not copied to be summed.

One process is sharded where its state lies on a disk. A shard is the whole weight there; where layers compute in
another type it is cast, as ever. Used by sharded.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from duoka.torch_private import DefaultReduceScatter, ReduceScatter, compute_with_shards


class SumOfOne(ReduceScatter):
    """A unit's gradients end to end are their own sum over ranks: FSDP gets one tensor for both."""

    def __init__(self) -> None:
        self._plain = DefaultReduceScatter()
        self._into: torch.Tensor | None = None

    def begin(self) -> None:
        """A backward pass comes; the one before may have ended between the two."""
        self._into = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        into, self._into = self._into, None
        if into is None:
            into = self._into = self._plain.allocate(size, dtype=dtype, device=device)
        return into

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        assert output_tensor is input_tensor, "both were asked for in turns"


def compute_alone(units: Iterable[FSDPModule]) -> SumOfOne:
    sums = SumOfOne()
    for unit in units:
        unit.set_custom_reduce_scatter(sums)
        # Not 1.0, as among several ranks: FSDP would divide by it, in a tensor more.
        unit.set_gradient_divide_factor(None)  # type: ignore[arg-type]
        compute_with_shards(unit)
    return sums
