"""What passes keep of weights that DeepSpeed's stage 3 gathered: which weight and which view of it, not its memory.

A product keeps a view of its weight for the backward pass, and with it the whole weight, which stage 3 has long let go
of: until the backward pass all would be in memory. Another gather is there by the time that the view is wanted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from duoka.parallel.flat_shard import gather_cut, is_cut_flat


class Kept(NamedTuple):
    weight: Any
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class KeptViews(torch.autograd.graph.saved_tensors_hooks):
    """Around the passes of a micro-batch."""

    def __init__(self) -> None:
        super().__init__(_pack, _unpack)


def _pack(tensor: torch.Tensor) -> torch.Tensor | Kept:
    base = tensor if tensor._base is None else tensor._base
    if is_cut_flat(base) and tensor.untyped_storage().data_ptr() == base.untyped_storage().data_ptr():
        return Kept(base, tensor.size(), tensor.stride(), tensor.storage_offset() - base.storage_offset())
    return tensor


def _unpack(kept: torch.Tensor | Kept) -> torch.Tensor:
    if not isinstance(kept, Kept):
        return kept
    here = kept.weight.detach()
    if here.numel() != kept.weight.ds_numel:  # of a module whose backward pass does not wait for it
        here = gather_cut(kept.weight)
    return here.as_strided(kept.size, kept.stride, here.storage_offset() + kept.offset)
