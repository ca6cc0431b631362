"""A forward of a transformers module, with another function in place of one that it calls by name.

The code is the module's own; only what the name means in it is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any


def rewired(forward: Any, name: str, make: Callable[[Any], Any]) -> Any:
    """The same forward where `name` means what `make` gives for theirs; None where it calls no such function, or `make`
    knows none in its place."""
    inner = getattr(forward, "__wrapped__", None)
    if inner is not None:  # decorated, as where an argument has another name since a later version
        again = rewired(inner, name, make)
        return None if again is None else _decorated(forward, inner, again)
    if not isinstance(forward, FunctionType) or name not in forward.__code__.co_names or forward.__closure__:
        return None
    ours = make(forward.__globals__.get(name))
    return None if ours is None else _copy(forward, {**forward.__globals__, name: ours}, None)


def _decorated(outer: Any, inner: Any, again: Any) -> Any:
    """The decorator's function, around `again` in place of `inner`; None where that is not to be seen in it."""
    cells = outer.__closure__ or () if isinstance(outer, FunctionType) else ()
    held = [cell.cell_contents is inner for cell in cells]
    if held.count(True) != 1:
        return None
    closure = tuple(CellType(again) if it else cell for it, cell in zip(held, cells, strict=True))
    copy = _copy(outer, outer.__globals__, closure)
    copy.__wrapped__ = again
    return copy


def _copy(function: FunctionType, names: dict[str, Any], closure: tuple[CellType, ...] | None) -> Any:
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
