"""Attention inside one document, causal and exact: by torch's kernels where they know the case, else written out.

attention.py finds the documents of a row and calls this for each; where ranks share a row, and each has all keys but
only a stretch of its queries, `attend_stretch` does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from duoka.model.dtypes import computed_in

# So many scores at once, of what no kernel of torch knows; and so much of the mask that queries need whose document
# begins on another rank.
SCORES_AT_ONCE = 2**24
UNSAID = -1  # the window of a layer that leaves it to a mask, which is not made beside our attention
_HALF = (torch.float16, torch.bfloat16)
_MASK_OF_WINDOW = "create_sliding_window_causal_mask"  # transformers' name


@dataclass(frozen=True)
class Scoring:
    """What a model makes of queries and keys. `drop(weights, first_query, first_key)` says no by places in the row.

    `sinks`: a score of each head that is no token's and takes its share of the softmax (gpt-oss).
    """

    scaling: float | None = None
    window: int | None = None
    softcap: float | None = None
    drop: Callable[..., torch.Tensor] | None = None
    sinks: torch.Tensor | None = None

    @property
    def is_written_out(self) -> bool:
        """Whether torch's kernels do not know the case."""
        return self.softcap is not None or self.drop is not None or self.sinks is not None


def find_window(module: torch.nn.Module, said: int | None) -> int | None:
    """How far back a layer looks: as it says itself, or as its config has it."""
    if said != UNSAID:
        return said
    config = getattr(module, "config", None)
    window: int | None = getattr(config, "sliding_window", None)
    if not window:
        return None
    kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds and layer is not None and kinds[layer] != "sliding_attention":
        return None
    # Moshi's config has a window that its code never reads: where one is read, the model's file makes masks of it.
    files = (sys.modules.get(kind.__module__) for kind in type(module).__mro__)  # of what it is a subclass of too
    return window if any(hasattr(file, _MASK_OF_WINDOW) for file in files) else None


def attend_document(
    query: torch.Tensor,  # (rows, heads, tokens, head_dim)
    key: torch.Tensor,  # (rows, key_value_heads, before + tokens, head_dim)
    value: torch.Tensor,
    how: Scoring,
    first_key: int = 0,
    before: int = 0,
) -> torch.Tensor:
    """The keys begin at `first_key` of the row, the queries so many tokens `before` later; both end together."""
    if how.is_written_out and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _attend_in_chunks(query, key, value, how, first_key, before)
    return _attend_once(query, key, value, how, first_key, before)


def _attend_once(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: Scoring, first_key: int, before: int
) -> torch.Tensor:
    tokens = query.shape[2]
    far = how.window is not None and before + tokens > how.window
    if not how.is_written_out:
        mask = _window_mask(tokens, before, how.window if far else None, query.device) if far or before else None
        return attend_by_torch(query, key, value, mask, how.scaling)
    if query.shape[1] != key.shape[1]:
        key, value = _repeat_heads(query, key, value)
    scores = query @ key.transpose(2, 3) * (how.scaling if how.scaling is not None else query.shape[-1] ** -0.5)
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    mask = _window_mask(tokens, before, how.window if far else None, query.device)
    weights = softmax_beside(scores.masked_fill(~mask, float("-inf")), how.sinks).to(query.dtype)
    return (weights if how.drop is None else how.drop(weights, first_key + before, first_key)) @ value


def attend_by_torch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """Without a mask, each token looks at itself and before."""
    key, value = share_keys(query, key, value, mask)
    dim = value.shape[-1]
    if not query.is_cuda:
        value = fill_heads(value, query.shape[-1])
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return out[..., :dim]


def fill_heads(value: torch.Tensor, dim: int) -> torch.Tensor:
    """Zeros behind each head's values, up to the size of queries and keys (DeepSeek): what FlashAttention and a CPU's
    kernel have heads of. By definition, as torch computes else, a document's scores would be kept."""
    return F.pad(value, (0, dim - value.shape[-1])) if value.shape[-1] < dim else value


# By GPU: whether torch's FlashAttention runs there.
_HAS_FLASH: dict[torch.device, bool] = {}


def has_flash(device: torch.device) -> bool:
    """Ask before layers are compiled, which read the answer: a call into CUDA's driver would end their graph."""
    if device not in _HAS_FLASH and not torch.compiler.is_compiling():
        _HAS_FLASH[device] = (
            torch.version.hip is None
            and torch.backends.cuda.is_flash_attention_available()
            and torch.cuda.get_device_capability(device) >= (8, 0)
        )
    return _HAS_FLASH.get(device, False)


def share_keys(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values by the heads that torch's attention asks for.

    Of its fused kernels on a GPU only FlashAttention knows heads that share keys. Where that is not taken (fp32, masks,
    GPUs before Ampere) torch would compute by definition, and keep a document's scores: there each head has its own.
    """
    if not query.is_cuda or query.shape[1] == key.shape[1]:
        return key, value
    is_flash = mask is None and computed_in(query) in _HALF and query.shape[-1] == value.shape[-1] <= 256
    return (key, value) if is_flash and has_flash(query.device) else _repeat_heads(query, key, value)


def apart_from_others(value: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Values, copied where they alone would keep the product of queries, keys and values: the others were turned."""
    whole = None if torch.compiler.is_compiling() or not torch.is_grad_enabled() else value._base
    if whole is None or query._base is whole or value.shape[-1] != query.shape[-1] or not value.requires_grad:
        return value
    return value if whole.numel() == value.numel() else value.transpose(1, 2).contiguous().transpose(1, 2)


def _repeat_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    times = query.shape[1] // key.shape[1]
    return key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)


def softmax_beside(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax of (rows, heads, queries, keys) in fp32, beside one more score of each head, whose share is left out."""
    if sinks is None:
        return scores.float().softmax(dim=-1)
    beside = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat((scores.float(), beside.float()), dim=-1).softmax(dim=-1)[..., :-1]


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
    """As `attend_document`, some queries at a time; masks and scores are made again in the backward pass, not kept."""
    tokens, num_keys = query.shape[2], key.shape[2]
    scores = num_keys * (query.shape[0] * query.shape[1] if how.is_written_out else 1)
    step = max(1, SCORES_AT_ONCE // scores)
    parts = []
    for at in range(0, tokens, step):
        some = query[:, :, at : at + step]
        seen = before + at + some.shape[2]
        lowest = 0 if how.window is None else max(0, before + at - how.window + 1)
        inputs: tuple[Any, ...] = (some, key[:, :, lowest:seen], value[:, :, lowest:seen])
        inputs += (how, first_key + lowest, before + at - lowest)
        if torch.is_grad_enabled():
            parts.append(checkpoint(_attend_once, *inputs, use_reentrant=False, preserve_rng_state=bool(how.drop)))
        else:
            parts.append(_attend_once(*inputs))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
