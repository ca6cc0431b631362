"""Nested structures of tensors and other things, as batches and model outputs are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """The same structure with `function` applied to its tensors; what is no tensor stays as it is."""
    if isinstance(value, torch.Tensor):
        return function(value)
    return rebuild(value, [map_tensors(part, function) for part in parts_of(value)])


def send(value: Any, device: Any, non_blocking: bool = False) -> Any:
    """The same structure on `device`: tensors, and what has a `to` of its own (a graph, a packed sequence)."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=non_blocking)
    if hasattr(value, "to") and not isinstance(value, Mapping):
        return value.to(device)
    return rebuild(value, [send(part, device, non_blocking) for part in parts_of(value)])


def parts_of(value: Any) -> list[Any]:
    """The members of a structure, in its order; of anything else none."""
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else []


def rebuild(value: Any, parts: list[Any]) -> Any:
    """A structure like `value` with other members; anything else as it is."""
    if isinstance(value, Mapping):
        pairs = dict(zip(value, parts, strict=True))
        kind: Any = type(value)
        if kind is dict:
            return pairs
        try:
            return kind(**pairs)  # model outputs are mappings whose constructor takes fields
        except TypeError:
            return kind(pairs)
    if isinstance(value, tuple):
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return type(value)(parts) if isinstance(value, list) else value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    for part in parts_of(value):
        yield from tensors_in(part)
