"""Experts by boxes: one 3-D tensor in the model, and in most files a matrix for each expert.

transformers joins the matrices when it loads a model, and takes them apart when it saves one. Here a rank reads those
of the experts that it keeps. Called by shards.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import torch

from duoka.model.box import Box

# A tensor of all experts: (the place of the block in the model, which of its tensors).
_NAME = re.compile(r"(?P<block>.*)\.mlp\.experts\.(?P<kind>gate_up_proj|down_proj)")
# How files name the block and the matrices of an expert, in the order in which they are joined.
_SPELLINGS: tuple[tuple[str, dict[str, tuple[str, ...]]], ...] = (
    ("mlp", {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}),
    ("block_sparse_moe", {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}),
)


@dataclass(frozen=True)
class ExpertFiles:
    """The matrices, in the files, that a tensor of all experts is made of: by expert, then joined along its rows."""

    names: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, name: str, files: Container[str], num_experts: int) -> ExpertFiles | None:
        """None: `name` is no such tensor, or the files do not hold all of it under these names."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        for block, kinds in _SPELLINGS:
            parts = kinds[found["kind"]]
            names = tuple(
                tuple(f"{found['block']}.{block}.experts.{expert}.{part}.weight" for part in parts)
                for expert in range(num_experts)
            )
            if all(one in files for own in names for one in own):
                return cls(names)
        return None

    def fits(self, shape: Sequence[int], shape_of: Callable[[str], Sequence[int]]) -> bool:
        """Whether the first expert's matrices have the tensor's shape; files that lie about others fail in `read`."""
        sizes = [tuple(shape_of(name)) for name in self.names[0]]
        return len(shape) == 3 and all(
            size == (shape[1] // len(sizes), shape[2]) and shape[1] % len(sizes) == 0 for size in sizes
        )

    def read(
        self, shape: Sequence[int], box: Box, get: Callable[[str, tuple[slice, ...]], torch.Tensor]
    ) -> torch.Tensor:
        """What lies in `box` of the tensor; `get` reads a part of a matrix."""
        experts, rows, columns = box.slices
        each = shape[1] // len(self.names[0])
        out = None
        for place, expert in enumerate(range(experts.start, experts.stop)):
            for number, name in enumerate(self.names[expert]):
                first = number * each
                low, high = max(rows.start, first), min(rows.stop, first + each)
                if low >= high:
                    continue
                values = get(name, (slice(low - first, high - first), columns))
                if out is None:
                    out = values.new_empty(box.sizes)
                out[place, low - rows.start : high - rows.start] = values
        return torch.empty(box.sizes) if out is None else out
