"""What ranks exchange that cut the matrices of a layer between them: four ways in and out of a cut region.

Outside of one all ranks hold the same activations, bit for bit, and the same gradients of them. `spread` leads in:
each rank's gradient is a part, and the sum goes back. `total` leads out: each rank has a summand. `joined` leads out
where each has its columns (or, of a mixture, its tokens), and `own_part` in again. All of it is in the ledger.
"""

from __future__ import annotations

from typing import Any

import torch

from duoka.comm.collectives import all_gather, all_reduce
from duoka.comm.world import World
from duoka.model.remade import as_before


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
        return _sum(grad, ctx.world, "all_reduce of activations' gradients"), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, world: World) -> torch.Tensor:
        return _sum(x, world, "all_reduce of activations")

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, world: World, size: int, dim: int) -> torch.Tensor:
        ctx.place = (dim, *bounds(size, world))
        return _join(x, world, size, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return grad.narrow(*ctx.place), None, None, None


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, world: World, dim: int) -> torch.Tensor:
        ctx.how = world, x.shape[dim], dim
        return x.narrow(dim, *bounds(x.shape[dim], world))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return _join(grad, *ctx.how), None, None


def _sum(x: torch.Tensor, world: World, what: str) -> torch.Tensor:
    # Of a copy: other branches of the graph may hold the same tensor.
    with world.heart.exchange(f"{what} (over tensor)"):
        return all_reduce(x.clone(memory_format=torch.contiguous_format), world.group)


def _join(x: torch.Tensor, world: World, size: int, dim: int) -> torch.Tensor:
    short = list(x.shape)
    short[dim] = -(-size // world.size) - x.shape[dim]
    sent = (torch.cat([x, x.new_zeros(short)], dim) if short[dim] else x).contiguous()
    with world.heart.exchange("all_gather of activations (over tensor)"):
        arrived = all_gather(sent.new_empty(world.size * sent.numel()), sent.view(-1), world.group)
    parts = arrived.view(world.size, *sent.shape).unbind()
    return torch.cat(parts, dim).narrow(dim, 0, size)


def spread(x: torch.Tensor, world: World) -> torch.Tensor:
    """The same values, into a region where each rank's gradient of them is a part of the whole."""
    answer: torch.Tensor = _Spread.apply(x, world)
    return as_before(answer, x)


def total(x: torch.Tensor, world: World) -> torch.Tensor:
    """The sum of all ranks' values."""
    answer: torch.Tensor = _Total.apply(x, world)
    return answer


def joined(x: torch.Tensor, world: World, size: int, dim: int = -1) -> torch.Tensor:
    """All ranks' columns, `size` in all; with dim 0 their rows."""
    answer: torch.Tensor = _Joined.apply(x, world, size, dim)
    return answer


def own_part(x: torch.Tensor, world: World, dim: int = -1) -> torch.Tensor:
    """This rank's columns of what all ranks have whole; with dim 0 its rows."""
    answer: torch.Tensor = _OwnPart.apply(x, world, dim)
    return answer
