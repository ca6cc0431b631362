"""The sequence axis: ranks that each compute a stretch of every row, and come together in attention alone.

A micro-batch is cut on the host, after labels were shifted (`cut_rows`); all layers but attention see single tokens.
Attention exchanges: where heads divide by the ranks, each gets some heads of the whole row, and gives back all heads of
the others' stretches (Ulysses); else each gathers keys and values of the whole row. Both are exact, gradients too: what
goes to several ranks comes back summed. The loss needs nothing of its own: it is a sum over targets, wherever they lie.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from duoka.comm.collectives import all_gather, all_to_all, reduce_scatter
from duoka.comm.world import World
from duoka.data.feed.loader import IGNORED, Batch
from duoka.data.feed.token_keys import PADDING_KEY
from duoka.plan.axes import deals_heads, key_value_heads


def cut_rows(micro: Batch, place: int, size: int) -> Batch:
    """The part of a micro-batch that is computed at `place` of `size`; edges stay those of whole rows.

    Rows become a multiple of `size` long by a document of padding at their end. Counts are of the part, so that sums
    over ranks are the micro-batch's; its samples count at the first place.
    """
    if size == 1:
        return micro
    length = micro.input_ids.shape[1]
    stretch = -(-length // size)
    pad, own = stretch * size - length, slice(place * stretch, (place + 1) * stretch)

    def take(tensor: torch.Tensor, filler: int) -> torch.Tensor:
        return F.pad(tensor, (0, pad), value=filler)[:, own].contiguous()

    positions = torch.arange(pad).expand(micro.position_ids.shape[0], pad)
    edges, mask, keys = micro.boundaries, micro.attention_mask, micro.token_keys
    labels = take(micro.labels, IGNORED)
    part = replace(
        micro,
        input_ids=take(micro.input_ids, 0),
        labels=labels,
        # Of padding they begin again: a table of positions may have no more than rows are long.
        position_ids=torch.cat((micro.position_ids, positions), dim=1)[:, own].contiguous(),
        boundaries=edges if edges is None or not pad else F.pad(edges, (0, 1), value=length + pad),
        attention_mask=None if mask is None else take(mask, 0),
        token_keys=None if keys is None else take(keys, PADDING_KEY),
        num_targets=int((labels != IGNORED).sum()),
        num_samples=micro.num_samples if place == 0 else 0,
    )
    if part.attention_mask is None:
        tokens = min(max(micro.num_tokens - own.start, 0), stretch)
    else:
        tokens = int(part.attention_mask.sum())
    part = replace(part, num_tokens=tokens)
    return part if micro.target_places is None else part.pinned()


class HeadsAndRows:
    """The exchange in attention of one rank (model/attention.py: SequenceExchange)."""

    def __init__(self, world: World) -> None:
        """`world`: the ranks that share rows, in the order of their stretches."""
        self._world = world
        self.rank, self.size = world.rank, world.size
        self.is_on = True
        self._chosen: dict[tuple[int, int, torch.device], torch.Tensor | None] = {}

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True

    def deals_heads(self, num_heads: int) -> bool:
        return deals_heads(num_heads, self.size)

    def to_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(rows, heads, tokens of the stretch, dim) -> (rows, some heads, tokens of the row, dim)."""
        index = self._choose(query.shape[1], key.shape[1], key.device)
        return _ToHeads.apply(self, index, query, key, value)  # type: ignore[return-value]

    def _choose(self, num_heads: int, num_kv_heads: int, device: torch.device) -> torch.Tensor | None:
        """Which key-value heads are sent, on the device, once; None: as they are."""
        sizes = num_heads, num_kv_heads, device
        if sizes not in self._chosen:
            chosen = key_value_heads(num_heads, num_kv_heads, self.size)
            self._chosen[sizes] = None if chosen == [*range(num_kv_heads)] else torch.tensor(chosen, device=device)
        return self._chosen[sizes]

    def to_tokens(self, attended: torch.Tensor) -> torch.Tensor:
        """(rows, tokens of the row, some heads, dim) -> (rows, tokens of the stretch, heads, dim)."""
        return _ToTokens.apply(self, attended)  # type: ignore[return-value]

    def gather(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, heads, tokens of the stretch, dim) -> (rows, heads, tokens of the row, dim)."""
        return _Gather.apply(self, key, value)  # type: ignore[return-value]

    def gather_keys(self, token_keys: torch.Tensor) -> torch.Tensor:
        """(rows, tokens of the stretch) -> (rows, tokens of the row)."""
        whole = self.collect(token_keys.contiguous().view(-1))
        return whole.view(self.size, *token_keys.shape).transpose(0, 1).flatten(1)

    def swap(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors (ranks, ...): what is at i goes to rank i, and what came from rank i is at i."""
        sent = _join(parts)
        with self._world.heart.exchange("all_to_all of heads (over sequence)"):
            received = all_to_all(torch.empty_like(sent), sent, self._world.group)
        return _take_apart(received, [part.shape for part in parts])

    def collect(self, flat: torch.Tensor) -> torch.Tensor:
        """(n) -> (ranks, n)."""
        whole = flat.new_empty(self.size, flat.numel())
        with self._world.heart.exchange("all_gather of keys and values (over sequence)"):
            all_gather(whole.view(-1), flat, self._world.group)
        return whole

    def scatter(self, whole: torch.Tensor) -> torch.Tensor:
        """(ranks, n) -> (n), summed over ranks."""
        with self._world.heart.exchange("reduce_scatter of keys' and values' gradients (over sequence)"):
            return reduce_scatter(whole.new_empty(whole.shape[1]), whole.view(-1), self._world.group)


def _join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """(ranks, ...) each -> (ranks, all), in one buffer: one message a rank."""
    sizes = [math.prod(part.shape[1:]) for part in parts]
    whole = parts[0].new_empty(parts[0].shape[0], sum(sizes))
    for room, part in zip(whole.split(sizes, dim=1), parts, strict=True):
        room.unflatten(1, part.shape[1:]).copy_(part)
    return whole


def _take_apart(whole: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    sizes = [math.prod(shape[1:]) for shape in shapes]
    return [piece.unflatten(1, shape[1:]) for piece, shape in zip(whole.split(sizes, dim=1), shapes, strict=True)]


def _stretches(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Cut along `dim` into `size` parts, which come first."""
    return tensor.unflatten(dim, (size, -1)).movedim(dim, 0)


def _end_to_end(parts: torch.Tensor, dim: int) -> torch.Tensor:
    """The inverse."""
    return parts.movedim(0, dim).flatten(dim, dim + 1)


_HEADS, _TOKENS = 1, 2  # dims of queries, keys and values


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, exchange: HeadsAndRows, index: torch.Tensor | None, query: torch.Tensor, *held: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.exchange, ctx.num_kv_heads = exchange, held[0].shape[_HEADS]
        ctx.save_for_backward(index)
        chosen = held if index is None else tuple(tensor.index_select(_HEADS, index) for tensor in held)
        sent = [_stretches(tensor, _HEADS, exchange.size) for tensor in (query, *chosen)]
        return tuple(_end_to_end(part, _TOKENS) for part in exchange.swap(sent))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        sent = [_stretches(grad, _TOKENS, ctx.exchange.size) for grad in grads]
        query, *held = (_end_to_end(part, _HEADS) for part in ctx.exchange.swap(sent))
        (index,) = ctx.saved_tensors
        if index is not None:  # a head that went to several ranks has a gradient from each
            held = [_sum_by_head(grad, index, ctx.num_kv_heads) for grad in held]
        return None, None, query, *held


def _sum_by_head(grad: torch.Tensor, index: torch.Tensor, num_heads: int) -> torch.Tensor:
    rows, _, tokens, dim = grad.shape
    return grad.new_zeros(rows, num_heads, tokens, dim).index_add_(_HEADS, index, grad)


class _ToTokens(torch.autograd.Function):
    """Of what attention answers, in which tokens come before heads."""

    @staticmethod
    def forward(ctx: Any, exchange: HeadsAndRows, attended: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.exchange = exchange
        (part,) = exchange.swap([_stretches(attended, 1, exchange.size)])
        return _end_to_end(part, 2)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        (part,) = ctx.exchange.swap([_stretches(grad, 2, ctx.exchange.size)])
        return None, _end_to_end(part, 1)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: HeadsAndRows, *held: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        ctx.exchange = exchange
        whole = exchange.collect(_join([tensor[None] for tensor in held]).view(-1))
        shapes = [torch.Size((exchange.size, *tensor.shape)) for tensor in held]
        return tuple(_end_to_end(part, _TOKENS) for part in _take_apart(whole, shapes))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        parts = [_stretches(grad, _TOKENS, ctx.exchange.size) for grad in grads]
        own = ctx.exchange.scatter(_join(parts))
        return None, *(piece[0] for piece in _take_apart(own[None], [part[:1].shape for part in parts]))


def share_sequences(model: torch.nn.Module, world: World) -> None:
    """Let all attention of `model` work over whole rows, of which each rank of `world` has a stretch. In place."""
    exchange = HeadsAndRows(world)
    for module in model.modules():
        # Not a child: attention reads it, and a pass over whole rows pauses it.
        module.sequence_exchange = exchange  # type: ignore[assignment]
