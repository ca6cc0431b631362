"""Rows of one length: what lets layers be compiled for that length alone, and recorded as CUDA graphs.

A LossModel whose layers are compiled so keeps a `Steady`, and goes through it in every pass.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from duoka.model.documents import Documents


@dataclass
class Steady:
    """`row_tokens`: the length of every row, and so the most that a document has. `graphs`: layers are CUDA graphs."""

    row_tokens: int
    graphs: bool
    layers: Sequence[torch.nn.Module]

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Around a pass. One without gradients has rows of any length: its layers are not compiled."""
        if not torch.is_grad_enabled():
            with torch.compiler.set_stance("force_eager"):
                yield
            return
        if self.graphs:
            self._begin()
        yield

    def documents(self, documents: Documents) -> Documents:
        """As many for every micro-batch, and as long: what is compiled knows their number."""
        return documents.with_room(self.row_tokens) if torch.is_grad_enabled() else documents

    @functools.cached_property
    def _trained(self) -> list[torch.nn.Parameter]:
        """Looked up in the first pass: before it a model may be on the meta device still."""
        return [parameter for layer in self.layers for parameter in layer.parameters() if parameter.requires_grad]

    def _begin(self) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        # Where there is no gradient yet autograd takes a graph's own memory for it, which the next pass writes over.
        for parameter in self._trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
