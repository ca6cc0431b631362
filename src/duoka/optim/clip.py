"""The one global gradient norm, and the limit on it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from duoka.parallel.collectives import all_reduce


def clip_gradients(parameters: Iterable[torch.nn.Parameter], limit: float) -> torch.Tensor:
    """Shorten all gradients together when their global norm exceeds `limit` (0: only measure). Returns the norm."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = global_norm(grads)
    if limit > 0:
        # As torch.nn.utils.clip_grads_with_norm_, on each rank's own part: the norm is a plain number everywhere.
        factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
        local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
        torch._foreach_mul_(local, factor.to(local[0].device)) if local else None
    return norm


def global_norm(grads: list[torch.Tensor]) -> torch.Tensor:
    """The norm over all ranks: squares are added over the ranks that hold different parts of a tensor."""
    plain = [g for g in grads if not isinstance(g, DTensor)]
    sharded = [g for g in grads if isinstance(g, DTensor)]
    if not sharded:
        return torch.nn.utils.get_total_norm(plain)
    parts: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for grad in sharded:
        groups = tuple(
            grad.device_mesh.get_group(axis) for axis, place in enumerate(grad.placements) if place.is_shard()
        )
        parts.setdefault(groups, []).append(grad.to_local())
    total = torch.nn.utils.get_total_norm(plain).square() if plain else torch.zeros(())
    for groups, local in parts.items():
        square = torch.stack(torch._foreach_norm(local)).square().sum()
        # On the mesh's device: offloaded gradients lie in host memory, which NCCL does not reach.
        square = square.to(sharded[0].device_mesh.device_type)
        for group in groups:
            all_reduce(square, group)
        total = total.to(square.device) + square
    return total.sqrt()
