"""Tensors that are cheap to make, as what a norm gives: readers keep none of them for their gradients.

What makes one says how it is made again, and of what, which autograd keeps anyway. A reader in forward (adapted.py)
keeps that in its place. Bit for bit the same comes again, for the same function makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

Make = Callable[..., torch.Tensor]
_ATTRIBUTE = "_duoka_remade"


class Recipe:
    """How a tensor is made again, once for all of its readers. It holds none of what that takes: each reader does."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._readers = self._left = 0
        self._made: torch.Tensor | None = None

    def add_reader(self) -> None:
        self._readers += 1

    def make(self, sources: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """For one reader's backward pass; it is let go with the last one's."""
        if self._made is None:
            self._made, self._left = self._make(*sources), self._readers
        made, self._left = self._made, self._left - 1
        if self._left <= 0:
            self._made = None
        return made


class Remade(NamedTuple):
    recipe: Recipe
    sources: tuple[torch.Tensor, ...]
    version: int  # of the tensor that it makes: written over, it would be another


def can_be_remade(tensor: torch.Tensor, make: Make, *sources: torch.Tensor) -> torch.Tensor:
    """The same tensor, of which its readers know that `make(*sources)` gives it again."""
    if torch.is_grad_enabled():
        setattr(tensor, _ATTRIBUTE, Remade(Recipe(make), sources, tensor._version))
    return tensor


def remade(tensor: torch.Tensor) -> Remade | None:
    """How it is made again; None: it has to be kept."""
    found: Remade | None = getattr(tensor, _ATTRIBUTE, None)
    return None if found is None or found.version != tensor._version else found


def as_before(tensor: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """The same numbers in another place of the graph: they are made again in the same way."""
    found = remade(before)
    if found is not None:
        setattr(tensor, _ATTRIBUTE, found._replace(version=tensor._version))
    return tensor
