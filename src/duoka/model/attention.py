"""Our attention, registered into transformers under the name `duoka`: exact, causal, documents isolated, no dense mask.

Packed rows carry their document boundaries through the model's keyword arguments (`cu_seq_lens_q`); each document
attends to itself alone. Padded rows need no mask: padding stands to the right, where causal attention never looks.
For training only: it knows no key-value cache.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F

NAME = "duoka"


def register_attention() -> str:
    """Make `attn_implementation="duoka"` known to transformers; calling it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _no_mask)
    return NAME


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The attention function knows the documents itself; a dense mask would cost memory and the fast kernel."""
    return None


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,  # (rows, heads, tokens, head_dim)
    key: torch.Tensor,  # (rows, key_value_heads, tokens, head_dim)
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each document; returns (rows, tokens, heads, head_dim)."""
    if query.shape[2] != key.shape[2]:
        raise RuntimeError("duoka's attention is for training; load the model with attention='sdpa' to generate")
    if kwargs.get("s_aux") is not None:
        raise RuntimeError("attention sinks are not supported by duoka's attention")

    def one(start: int, end: int) -> torch.Tensor:
        part = (query[:, :, start:end], key[:, :, start:end], value[:, :, start:end])
        return _attend_document(*part, scaling, dropout, sliding_window, softcap)

    if cu_seq_lens_q is None:
        out = one(0, query.shape[2])
    else:
        # One call per document: a quadratic cost of each document's length instead of the whole row's.
        edges = cu_seq_lens_q.tolist()
        out = torch.cat([one(start, end) for start, end in itertools.pairwise(edges)], dim=2)
    return out.transpose(1, 2), None


def _attend_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    dropout: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    tokens = query.shape[2]
    far = window is not None and tokens > window
    grouped = query.shape[1] != key.shape[1]
    if softcap is None:
        mask = _window_mask(tokens, window, query.device) if far else None
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling,
            enable_gqa=grouped,
        )  # fmt: skip
    if grouped:
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
    scores = query @ key.transpose(2, 3) * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~_window_mask(tokens, window if far else None, query.device), float("-inf"))
    weights = F.dropout(scores.float().softmax(dim=-1).to(query.dtype), p=dropout)
    return weights @ value


def _window_mask(tokens: int, window: int | None, device: torch.device) -> torch.Tensor:
    """True where a token may look: at itself and before, at most `window` tokens in all."""
    place = torch.arange(tokens, device=device)
    distance = place[:, None] - place[None, :]
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)
