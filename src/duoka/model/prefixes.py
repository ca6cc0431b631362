"""Prefix sharing: what documents of a packed row begin with alike is computed once.

Answers to one prompt, pairs of answers, conversations under one system prompt: a causal model computes the same states
for the same first tokens. So a row is shortened to one copy of each beginning; a document's own tokens attend to keys
that lie wherever its beginning is computed, and a token that stands for several gets the sum of their gradients. Losses
and gradients are those of the whole row, but for rounding. LossModel shortens rows where row_choice.py allows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from duoka.data.feed.prefixes import find_repeats
from duoka.model import native


@dataclass(frozen=True)
class Uses:
    """Which tokens of the short row stand where: a gather forward, a sum of each token's uses backward."""

    index: torch.Tensor  # (uses,) on the device
    order: torch.Tensor  # (uses,) uses by token, on the host
    begins: torch.Tensor  # (tokens + 1,) where each token's are in `order`, on the host

    @classmethod
    def of(cls, index: np.ndarray, num_tokens: int, device: torch.device) -> Uses:
        counts = np.bincount(index, minlength=num_tokens)
        order = torch.from_numpy(np.argsort(index, kind="stable"))
        begins = torch.from_numpy(np.cumsum([0, *counts]))
        return cls(upload(torch.from_numpy(index), device), order, begins)


@dataclass(frozen=True)
class SharedKeys:
    """Of documents that have tokens of their own: the keys that these see, one document behind the other."""

    uses: Uses
    places: torch.Tensor  # (whole row's tokens,) where each of them is computed; on the device
    lengths: torch.Tensor  # (documents,) on the host
    longest: int
    edges: torch.Tensor  # (documents + 1,) int32, on the device


@dataclass(frozen=True)
class ShortRow:
    """A packed row without what it repeats."""

    kept: torch.Tensor  # (tokens,) which tokens of the whole row are computed; on the device
    own: torch.Tensor  # (documents,) how many tokens of each are computed, none left out that have some; on the host
    keys: SharedKeys


def shorten(ids: torch.Tensor, lengths: torch.Tensor, device: torch.device) -> ShortRow | None:
    """`ids`: a packed row (1, tokens), on the host, as `lengths`; None where it repeats too little."""
    row = ids[0].numpy()
    found = find_repeats(row, lengths.numpy())
    if found is None:
        return None
    is_kept, source = found
    places = (np.cumsum(is_kept) - 1)[source]
    edges = np.concatenate([[0], np.cumsum(lengths.numpy())])
    own = np.add.reduceat(is_kept.astype(np.int64), edges[:-1])
    asks = own > 0  # a document that another begins with has none
    held = places[np.repeat(asks, lengths.numpy())]
    sizes = lengths[torch.from_numpy(asks)]
    keys = SharedKeys(
        Uses.of(held, int(is_kept.sum()), device), torch.from_numpy(places).to(device, non_blocking=True),
        sizes, int(sizes.max()),
        upload(F.pad(sizes.cumsum(0), (1, 0)).int(), device),
    )  # fmt: skip
    kept = upload(torch.from_numpy(np.flatnonzero(is_kept)), device)
    return ShortRow(kept, torch.from_numpy(own[asks]), keys)


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Without a wait of the host, which a copy from pageable memory may be."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def take_keys(states: torch.Tensor, uses: Uses) -> torch.Tensor:
    """(1, heads, tokens, dim) as (1, heads, uses, dim): each token where it is used."""
    _, heads, _, dim = states.shape
    rows = states.transpose(1, 2).reshape(-1, heads * dim)  # no copy of what projections leave
    taken: torch.Tensor = _Take.apply(rows, uses)
    return taken.view(1, -1, heads, dim).transpose(1, 2)


class _Take(torch.autograd.Function):
    """rows[index]; sums of bf16 in fp32 and in one order, so that no thread or GPU can change a bit."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, uses: Uses) -> torch.Tensor:
        ctx.uses, ctx.count = uses, len(rows)
        return rows.index_select(0, uses.index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        uses, grad = ctx.uses, grad.contiguous()
        if native.serves(grad):
            return native.sum_rows(grad, uses.order, uses.begins), None
        if grad.device.type == "cpu":
            wide = torch.zeros((ctx.count, grad.shape[1]), dtype=torch.float32 if grad.itemsize < 4 else grad.dtype)
            return wide.index_add_(0, uses.index, grad.to(wide.dtype)).to(grad.dtype), None
        # As an embedding learns: sorted, and so in one order on a GPU too.
        return torch.ops.aten.embedding_dense_backward(grad, uses.index, ctx.count, -1, False), None
