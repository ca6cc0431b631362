"""Which batch a loop works on: what its loaders gave last, or of batches that were read ahead, the one in hand.

A loop may read a whole window before its first backward pass (to count its targets). Each micro-batch then weighs what
its own batch holds, which is found by the tensors that the loop works with.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from duoka.store.state import Generators, take_generators


@dataclass(frozen=True)
class Current:
    """The micro-batch that the loop works on: what it weighs here and over all ranks, in samples (or targets)."""

    num_own: int
    num_global: int
    is_last: bool  # of the epoch
    window_total: int | None = None  # of loaders that know it: all that one optimizer step learns from
    ends_window: bool = False


@dataclass(eq=False)
class Reading:
    """One batch that a loader gave."""

    current: Current
    loader: Any
    place_before: dict[str, Any]
    random_before: Generators
    tensors: list[weakref.ref[torch.Tensor]]
    is_taken: bool = False  # by `accumulate`

    @property
    def held(self) -> list[torch.Tensor]:
        """Those of its tensors that are still referenced."""
        return [tensor for ref in self.tensors if (tensor := ref()) is not None]


@dataclass
class Readings:
    """What prepared loaders gave."""

    device: torch.device
    active: list[Any] = field(default_factory=list)  # loaders that are being walked, the innermost last
    recent: list[Reading] = field(default_factory=list)
    in_hand: Reading | None = None  # what a prepared model was called with since the last batch was read

    def begin(self, loader: Any) -> None:
        self.recent = [one for one in self.recent if one.loader is not loader]
        self.active.append(loader)

    def end(self, loader: Any) -> None:
        # Not `remove`: an inner loop over the same loader has an entry of its own.
        for at in reversed(range(len(self.active))):
            if self.active[at] is loader:
                del self.active[at]
                break

    def random_state(self) -> Generators:
        """Kept for each batch: a window that a save interrupts is done again from its first one."""
        return take_generators(self.device)

    def add(self, reading: Reading) -> None:
        last = {id(one.loader): one for one in self.recent}
        walked = {id(loader) for loader in self.active}
        self.recent = [
            one for one in self.recent if one.held or (id(one.loader) in walked and last[id(one.loader)] is one)
        ]
        self.recent.append(reading)
        self.in_hand = None

    def clear(self) -> None:
        self.active.clear()
        self.recent.clear()
        self.in_hand = None

    @property
    def newest(self) -> Reading | None:
        """The last batch of the innermost loop."""
        if not self.active:
            return None
        return next((one for one in reversed(self.recent) if one.loader is self.active[-1]), None)

    def take(self) -> Reading | None:
        """The batch that a micro-batch begins with: of those that the loop still holds, the oldest not begun."""
        newest = self.newest or (self.recent[-1] if self.recent and self.recent[-1].held else None)
        if newest is None:
            return None
        waiting = [
            one
            for one in self.recent
            if one.loader is newest.loader and not one.is_taken and (one is newest or one.held)
        ]
        if not waiting and not self.active:
            return None
        taken = waiting[0] if waiting else newest
        taken.is_taken = True
        return taken

    def find(self, tensors: Iterable[torch.Tensor]) -> Reading | None:
        """The batch that one of these belongs to, itself or as a view."""
        given = list(tensors)
        same = {id(tensor) for tensor in given}
        for reading in reversed(self.recent):
            if any(id(tensor) in same for tensor in reading.held):
                return reading
        places = {place for tensor in given if (place := _storage(tensor))}
        found = [one for one in self.recent if any(_storage(tensor) in places for tensor in one.held)]
        return found[0] if len(found) == 1 else None

    def note_call(self, tensors: Iterable[torch.Tensor]) -> None:
        """A prepared model is called with these, for a backward pass."""
        if len(self.recent) > 1 or not self.active:
            self.in_hand = self.find(tensors) or self.in_hand


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
