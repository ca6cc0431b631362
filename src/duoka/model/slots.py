"""Keys and values of sequences that are generated together, and the attention that reads them.

Registered into transformers as `duoka_slots`. Each row of a pass belongs to a sequence of its own, with a length of its
own, and looks at its own keys alone: what a row computes is the same whatever stands in the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

from duoka.model import native
from duoka.model.decode import attend_rows
from duoka.model.one_document import UNSAID, Scoring, attend_by_torch, attend_document, find_window

NAME = "duoka_slots"


@dataclass
class SequenceCache:
    """Room for `capacity` tokens in every layer, taken when a layer is first written."""

    capacity: int
    keys: dict[int, torch.Tensor] = field(default_factory=dict)  # by layer: (key_value_heads, capacity, head_dim)
    values: dict[int, torch.Tensor] = field(default_factory=dict)

    def write(
        self, layer: int, start: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put (heads, tokens, dim) from `start` on; returns all up to their end."""
        if layer not in self.keys:
            self.keys[layer] = key.new_empty((key.shape[0], self.capacity, key.shape[2]))
            self.values[layer] = value.new_empty((value.shape[0], self.capacity, value.shape[2]))
        end = start + key.shape[1]
        self.keys[layer][:, start:end] = key
        self.values[layer][:, start:end] = value
        return self.keys[layer][:, :end], self.values[layer][:, :end]

    def addresses(self, layer: int) -> tuple[int, int] | None:
        """Where its keys and values of a layer lie; None when it has none yet."""
        if layer not in self.keys:
            return None
        return self.keys[layer].data_ptr(), self.values[layer].data_ptr()

    def take_over(self, other: SequenceCache, length: int) -> None:
        """The first `length` tokens of another sequence that begins alike."""
        for layer, keys in other.keys.items():
            self.write(layer, 0, keys[:, :length], other.values[layer][:, :length])

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for side in (self.keys, self.values) for t in side.values())


@dataclass(frozen=True)
class Rows:
    """Whose cache each row of a pass reads and writes, and at which position its first token stands; None: nobody's."""

    caches: tuple[SequenceCache | None, ...]
    starts: tuple[int, ...]

    def places(self, layer: int) -> torch.Tensor | None:
        """What the compiled attention asks for one token of each row; None where a row has no room there yet."""
        found = [(0, 0) if cache is None else cache.addresses(layer) for cache in self.caches]
        if not all(found):
            return None
        room = [0 if cache is None else cache.capacity for cache in self.caches]
        if any(
            cache is not None and start >= cache.capacity for cache, start in zip(self.caches, self.starts, strict=True)
        ):
            raise RuntimeError("a sequence is longer than the room that was taken for it")
        keys, values = zip(*found, strict=True)
        return torch.tensor([keys, values, room, self.starts])


def register_slot_attention() -> str:
    """Make `attn_implementation="duoka_slots"` known to transformers, which makes no mask for it."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend_slots)
    return NAME


def attend_slots(
    module: torch.nn.Module,
    query: torch.Tensor,  # (rows, heads, tokens, head_dim)
    key: torch.Tensor,  # (rows, key_value_heads, tokens, head_dim)
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    slots: Rows | None = None,
    sliding_window: int | None = UNSAID,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Each row over its own sequence; returns (rows, tokens, heads, head_dim)."""
    if slots is None:
        raise RuntimeError("a layer does not hand on what it is called with, so sequences cannot be told apart")
    rows, heads, tokens = query.shape[:3]
    if tokens == 1:  # parts of one product (Phi-3) lie side by side alone and apart beside others: two ways to compute
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    how = Scoring(scaling, find_window(module, sliding_window), softcap, sinks=s_aux)
    if tokens == 1 and not how.is_written_out and _is_plain(query, key, value):
        layer, scale = int(module.layer_idx), query.shape[-1] ** -0.5 if scaling is None else scaling  # type: ignore[arg-type]
        if (places := slots.places(layer)) is not None:
            return attend_rows(query, key, value, places, how.window or 0, scale), None
    out = query.new_zeros((rows, tokens, heads, value.shape[-1]))
    for row, (cache, start) in enumerate(zip(slots.caches, slots.starts, strict=True)):
        if cache is not None:
            keys, values = cache.write(int(module.layer_idx), start, key[row], value[row])  # type: ignore[arg-type]
            out[row] = _look(query[row : row + 1], keys[None], values[None], how, start)[0].transpose(0, 1)
    return out, None


def _is_plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the compiled attention takes them."""
    alike = query.dtype == key.dtype == value.dtype and query.shape[-1] == key.shape[-1] == value.shape[-1]
    return alike and native.serves(query, key, value)


def _look(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, how: Scoring, start: int) -> torch.Tensor:
    tokens, window = query.shape[2], how.window
    if window is not None and keys.shape[2] > window and tokens == 1:
        keys, values, start, window = keys[:, :, -window:], values[:, :, -window:], window - 1, None
    if how.is_written_out:
        return attend_document(query, keys, values, replace(how, window=window), before=start)
    if tokens == 1:
        # The heads that share a key as if they were tokens of one: torch's CPU kernel takes a fifth to a seventh of the
        # time that it takes one by one in bf16, and no longer in fp32.
        folded = query.reshape(1, keys.shape[1], -1, query.shape[-1])
        seen = F.scaled_dot_product_attention(folded, keys, values, scale=how.scaling)
        return seen.reshape(1, query.shape[1], 1, -1)
    is_far = window is not None and keys.shape[2] > window
    mask = _mask(start, tokens, window if is_far else None, query.device) if start or is_far else None
    return attend_by_torch(query, keys, values, mask, how.scaling)


def _mask(start: int, tokens: int, window: int | None, device: torch.device) -> torch.Tensor:
    """True where a token may look: (tokens, start + tokens)."""
    own = torch.arange(start, start + tokens, device=device)[:, None]
    distance = own - torch.arange(start + tokens, device=device)[None, :]
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)
