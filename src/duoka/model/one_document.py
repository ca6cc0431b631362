"""Attention inside one document, causal and exact: by torch's kernels where they know the case, else written out.

attention.py finds the documents of a row and calls this for each; where ranks share a row, and each has all keys but
only a stretch of its queries, `attend_stretch` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

# Of queries whose document begins on another rank, so many scores at once: they need a mask, which is as large.
SCORES_AT_ONCE = 2**24


@dataclass(frozen=True)
class Scoring:
    """What a model makes of queries and keys. `drop(weights, first_query, first_key)` says no by places in the row."""

    scaling: float | None = None
    window: int | None = None
    softcap: float | None = None
    drop: Callable[..., torch.Tensor] | None = None


def attend_document(
    query: torch.Tensor,  # (rows, heads, tokens, head_dim)
    key: torch.Tensor,  # (rows, key_value_heads, before + tokens, head_dim)
    value: torch.Tensor,
    how: Scoring,
    first_key: int = 0,
    before: int = 0,
) -> torch.Tensor:
    """The keys begin at `first_key` of the row, the queries so many tokens `before` later; both end together."""
    tokens = query.shape[2]
    far = how.window is not None and before + tokens > how.window
    grouped = query.shape[1] != key.shape[1]
    if how.softcap is None and how.drop is None:
        mask = _window_mask(tokens, before, how.window if far else None, query.device) if far or before else None
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=how.scaling, enable_gqa=grouped,
        )  # fmt: skip
    if grouped:
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
    scores = query @ key.transpose(2, 3) * (how.scaling if how.scaling is not None else query.shape[-1] ** -0.5)
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    mask = _window_mask(tokens, before, how.window if far else None, query.device)
    weights = scores.masked_fill(~mask, float("-inf")).float().softmax(dim=-1).to(query.dtype)
    return (weights if how.drop is None else how.drop(weights, first_key + before, first_key)) @ value


def _window_mask(tokens: int, before: int, window: int | None, device: torch.device) -> torch.Tensor:
    """True where a token may look: at itself and before, at most `window` tokens in all."""
    place = torch.arange(before + tokens, device=device)
    distance = place[before:, None] - place[None, :]
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def attend_stretch(
    query: torch.Tensor,  # (rows, heads, tokens of the stretch, head_dim)
    key: torch.Tensor,  # (rows, key_value_heads, tokens of the row, head_dim)
    value: torch.Tensor,
    start: int,
    lengths: Sequence[int],
    how: Scoring,
) -> torch.Tensor:
    """Queries from token `start` of a row on, whose documents have these lengths; shaped as `query`."""
    end, at = start + query.shape[2], 0
    met: list[tuple[int, int, int]] = []  # of each document that has queries here: first key, first query, end of both
    for length in lengths:
        if at < end and at + length > start:
            met.append((at, max(at, start), min(at + length, end)))
        at += length
    queries = query.split([last - own for _, own, last in met], dim=2)
    # Split, not sliced: the gradient of a slice is as large as the row.
    sizes = [met[0][0], *(last - first for first, _, last in met), key.shape[2] - end]
    keys, values = (tensor.split(sizes, dim=2)[1:-1] for tensor in (key, value))
    parts = []
    for asking, asked, held, (first, own, _) in zip(queries, keys, values, met, strict=True):
        attend = attend_document if own == first else _attend_in_chunks
        parts.append(attend(asking, asked, held, how, first, own - first))
    return torch.cat(parts, dim=2)


def _attend_in_chunks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: Scoring, first_key: int, before: int
) -> torch.Tensor:
    """As `attend_document`, some queries at a time; masks are made again in the backward pass, not kept."""
    tokens, num_keys = query.shape[2], key.shape[2]
    scores = num_keys * (1 if how.softcap is None and how.drop is None else query.shape[0] * query.shape[1])
    step = max(1, SCORES_AT_ONCE // scores)
    parts = []
    for at in range(0, tokens, step):
        some = query[:, :, at : at + step]
        seen = before + at + some.shape[2]
        lowest = 0 if how.window is None else max(0, before + at - how.window + 1)
        inputs: tuple[Any, ...] = (some, key[:, :, lowest:seen], value[:, :, lowest:seen])
        inputs += (how, first_key + lowest, before + at - lowest)
        if torch.is_grad_enabled():
            parts.append(checkpoint(attend_document, *inputs, use_reentrant=False, preserve_rng_state=bool(how.drop)))
        else:
            parts.append(attend_document(*inputs))
    return torch.cat(parts, dim=2)
