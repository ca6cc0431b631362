"""The state of schedulers and of people's own objects as JSON and named tensors, and back: what a pickle would hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from duoka.errors import ConfigError

_MARK = "duoka:"


def pack(value: Any, tensors: dict[str, torch.Tensor], name: str) -> Any:
    """`value` as JSON; tensors in it go into `tensors` under names that begin with `name`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        while name in tensors:  # {"a": {"b": one}, "a.b": another}
            name += "'"
        tensors[name] = value.detach()
        return {_MARK: "tensor", "name": name, "shape": list(value.shape), "dtype": str(value.dtype)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        return {_MARK: "array", "of": pack(torch.from_numpy(value.copy()), tensors, name)}
    if isinstance(value, np.generic):
        return pack(value.item(), tensors, name)
    if isinstance(value, Mapping):
        pairs = [[key, pack(one, tensors, f"{name}.{key}")] for key, one in value.items()]
        if all(isinstance(key, str) for key in value):
            return dict(pairs)
        return {_MARK: "pairs", "of": [[pack(key, tensors, name), one] for key, one in pairs]}
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = [pack(one, tensors, f"{name}.{i}") for i, one in enumerate(value)]
        if isinstance(value, list):
            return parts
        return {_MARK: "tuple" if isinstance(value, tuple) else "set", "of": parts}
    raise ConfigError(
        f"{name} is a {type(value).__name__}, which cannot be saved without a pickle",
        fix="let state_dict() give numbers, texts, tensors, and lists and mappings of them",
    )


def unpack(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [unpack(one, tensors) for one in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_MARK)
    if kind == "tensor":
        return tensors[value["name"]]
    if kind == "array":
        return unpack(value["of"], tensors).numpy()
    if kind == "pairs":
        return {unpack(key, tensors): unpack(one, tensors) for key, one in value["of"]}
    if kind in ("tuple", "set"):
        parts = [unpack(one, tensors) for one in value["of"]]
        return tuple(parts) if kind == "tuple" else set(parts)
    return {key: unpack(one, tensors) for key, one in value.items()}


def room_for(value: Any) -> dict[str, torch.Tensor]:
    """Empty tensors for all that a packed value names."""
    if isinstance(value, dict) and value.get(_MARK) == "tensor":
        return {value["name"]: torch.empty(value["shape"], dtype=getattr(torch, value["dtype"].removeprefix("torch.")))}
    parts = value if isinstance(value, list) else value.values() if isinstance(value, dict) else []
    return {name: tensor for part in parts for name, tensor in room_for(part).items()}
