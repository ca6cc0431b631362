"""What ranks exchange that cut the matrices of a layer between them: four ways in and out of a cut region.

Outside of one all ranks hold the same activations, bit for bit, and the same gradients of them. `spread` leads in:
each rank's gradient is a part, and the sum goes back. `total` leads out: each rank has a summand. `joined` leads out
where each has its columns, and `own_columns` in again. All of it is in the ledger, as all else that ranks exchange.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from duoka.comm.collectives import all_gather, all_reduce
from duoka.comm.world import World


def bounds(size: int, world: World) -> tuple[int, int]:
    """(first, number) of this rank's part of a dim, as DTensor cuts it: equal parts, the last ones shorter."""
    most = -(-size // world.size)
    first = min(world.rank * most, size)
    return first, min(most, size - first)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, world: World) -> torch.Tensor:
        ctx.world = world
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        # A copy: other branches of the graph may hold the same gradient.
        return all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.world.group), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, world: World) -> torch.Tensor:
        return all_reduce(x.clone(memory_format=torch.contiguous_format), world.group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, world: World, size: int) -> torch.Tensor:
        ctx.first, ctx.size = bounds(size, world)
        return _join(x, world, size)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return grad.narrow(-1, ctx.first, ctx.size), None, None


class _OwnColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, world: World) -> torch.Tensor:
        ctx.world, ctx.size = world, x.shape[-1]
        return x.narrow(-1, *bounds(x.shape[-1], world))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _join(grad, ctx.world, ctx.size), None


def _join(x: torch.Tensor, world: World, size: int) -> torch.Tensor:
    most = -(-size // world.size)
    sent = F.pad(x, (0, most - x.shape[-1])).contiguous()
    arrived = all_gather(sent.new_empty(world.size * sent.numel()), sent.view(-1), world.group)
    parts = arrived.view(world.size, *sent.shape).unbind()
    return torch.cat(parts, dim=-1).narrow(-1, 0, size)


def spread(x: torch.Tensor, world: World) -> torch.Tensor:
    """The same values, into a region where each rank's gradient of them is a part of the whole."""
    answer: torch.Tensor = _Spread.apply(x, world)
    return answer


def total(x: torch.Tensor, world: World) -> torch.Tensor:
    """The sum of all ranks' values."""
    answer: torch.Tensor = _Total.apply(x, world)
    return answer


def joined(x: torch.Tensor, world: World, size: int) -> torch.Tensor:
    """All ranks' columns, `size` in all."""
    answer: torch.Tensor = _Joined.apply(x, world, size)
    return answer


def own_columns(x: torch.Tensor, world: World) -> torch.Tensor:
    """This rank's columns of what all ranks have whole."""
    answer: torch.Tensor = _OwnColumns.apply(x, world)
    return answer
