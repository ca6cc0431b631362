"""A part of a tensor, as a mesh of any axes cuts it: a range in each dimension."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """`starts` and `sizes` by dimension."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.starts, self.sizes, strict=True))

    @property
    def rows(self) -> slice:
        """In the first dimension."""
        return self.slices[0]

    @property
    def columns(self) -> slice:
        """Of a matrix."""
        return self.slices[1]
