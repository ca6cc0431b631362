"""Rotary embeddings that depend on how long a text is (longrope, dynamic): of each document by its own length.

transformers makes one table for all that a pass reads, by the longest text in it, and of `dynamic` also by the longest
that it ever read. A short document in a row with a long one would be turned by other angles than alone, and a loss
would hang on how a batch is cut and on what came before it. Called by LossModel, for models that have such tables.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

_STRETCHED = ("dynamic", "longrope")


def use_own_lengths(lm: torch.nn.Module) -> None:
    """Let the model's rotary embeddings look at each document by itself; others stay as they are. In place."""
    for module in lm.modules():
        kinds = getattr(module, "rope_type", None)
        named = kinds.values() if isinstance(kinds, dict) else (kinds,)
        if any(kind in _STRETCHED for kind in named) and not hasattr(module, "forward_at_once"):
            # A class, not a method of this object: replicas that torch makes of it must not call the original.
            plain: Any = type(module)
            module.__class__ = _by_document(plain)


@functools.cache
def _by_document(kind: Any) -> type:
    members = {"forward": _forward, "forward_at_once": kind.forward}
    return type(f"ByDocument{kind.__name__}", (kind,), members)


def document_lengths(position_ids: torch.Tensor) -> torch.Tensor:
    """(rows, tokens): the length of the document that each token is a part of. One begins where positions do."""
    rows, tokens = position_ids.shape
    number = (position_ids == 0).cumsum(dim=1)
    longest = position_ids.new_zeros(rows, tokens + 1).scatter_reduce(1, number, position_ids + 1, "amax")
    return longest.gather(1, number)


def _forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
    named = {} if layer_type is None else {"layer_type": layer_type}
    kind = self.rope_type if layer_type is None else self.rope_type[layer_type]
    if kind not in _STRETCHED or position_ids.ndim != 2:
        return self.forward_at_once(x, position_ids, **named)
    lengths = document_lengths(position_ids)
    if kind == "longrope":
        is_long = lengths > _begin_of_long(self, layer_type)
        tables = self.forward_at_once(x, position_ids.masked_fill(is_long, 0), **named)
        longer = self.forward_at_once(x, position_ids.masked_fill(~is_long, 0), **named)
        return _choose(is_long, longer, tables)
    is_long = lengths > self.original_max_seq_len
    _forget(self, layer_type)
    tables = self.forward_at_once(x, position_ids.masked_fill(is_long, 0), **named)
    for length in lengths[is_long].unique().tolist():
        is_this = lengths == length
        _forget(self, layer_type)
        tables = _choose(is_this, self.forward_at_once(x, position_ids.masked_fill(~is_this, 0), **named), tables)
    return tables


def _begin_of_long(rotary: Any, layer_type: str | None) -> int:
    """The longest text that is turned by the short factors."""
    parameters = rotary.config.rope_parameters
    own = parameters if layer_type is None else parameters[layer_type]
    return int(own["original_max_position_embeddings"])


def _forget(rotary: Any, layer_type: str | None) -> None:
    """What `dynamic` keeps of the longest text that it read."""
    prefix = "" if layer_type is None else f"{layer_type}_"
    now = getattr(rotary, f"{prefix}inv_freq")
    setattr(rotary, f"{prefix}inv_freq", getattr(rotary, f"{prefix}original_inv_freq").to(now.device))
    setattr(rotary, f"{prefix}max_seq_len_cached", rotary.original_max_seq_len)


def _choose(where: torch.Tensor, one: Any, other: Any) -> Any:
    """Tables of `one` where `where` (rows, tokens) says so: cos and sin, or one table of complex numbers."""
    if isinstance(one, tuple):
        return tuple(_choose(where, *both) for both in zip(one, other, strict=True))
    return torch.where(where.view(*where.shape, *[1] * (one.ndim - 2)), one, other)


def find_stretch(config: Any) -> int | None:
    """From which length on a model's rotary embedding is made anew for each text, by the text's length."""
    kinds = _kinds_of(config)
    if not any(one.get("rope_type") in _STRETCHED for one in kinds):
        return None
    known = [one.get("original_max_position_embeddings") for one in kinds]
    return int(next((one for one in known if one), None) or config.get_text_config().max_position_embeddings)


def find_turn(config: Any) -> int | None:
    """The longest text whose keys are those of a shorter one; one token more, and all of them are turned otherwise.

    None where there is no such length: `dynamic` turns new tokens alone, as transformers does.
    """
    is_long = any(one.get("rope_type") == "longrope" for one in _kinds_of(config))
    turn, window = find_stretch(config), getattr(config.get_text_config(), "max_position_embeddings", None)
    return turn if is_long and turn is not None and (window is None or turn < window) else None


def _kinds_of(config: Any) -> list[dict[str, Any]]:
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return [rope, *(one for one in rope.values() if isinstance(one, dict))]
