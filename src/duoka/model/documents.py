"""Where the documents of a packed row lie, as attention and whatever else looks for their borders is told it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from duoka.model.prefixes import SharedKeys, ShortRow, shorten, upload

_FEWEST = 64  # documents of a micro-batch, as compiled layers know them


@dataclass(frozen=True)
class Documents:
    """Where the documents of a packed row lie. Layers read it as it is: each question to the device would stop it."""

    lengths: torch.Tensor  # (documents,) on the host; as numbers, a compiled layer would be compiled for each count
    longest: int
    edges: torch.Tensor  # (documents + 1,) int32, on the device
    ids: torch.Tensor | None = None  # (1, tokens) on the host, where the row's tokens are known there
    keys: SharedKeys | None = None  # which keys they see, where these are not just their own

    @classmethod
    def of(
        cls, boundaries: torch.Tensor | Documents, device: torch.device, ids: torch.Tensor | None = None
    ) -> Documents:
        """From where documents start and the row's end; what was measured before stays as it is."""
        if isinstance(boundaries, Documents):
            return boundaries
        lengths = boundaries.cpu().diff()
        return cls(lengths, int(lengths.max()), boundaries.to(device, torch.int32, non_blocking=True), ids)

    def shortened(self) -> tuple[ShortRow, Documents] | None:
        """The row without what its documents repeat, and they in it; None where that is little, or not known."""
        short = None if self.ids is None else shorten(self.ids, self.lengths, self.edges.device)
        if short is None:
            return None
        edges = upload(F.pad(short.own.cumsum(0), (1, 0)).int(), self.edges.device)
        return short, Documents(short.own, int(short.own.max()), edges, keys=short.keys)

    @property
    def longest_key(self) -> int:
        return self.longest if self.keys is None else self.keys.longest

    @property
    def both_edges(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of queries and of keys."""
        return self.edges, self.edges if self.keys is None else self.keys.edges

    def expand(self, states: torch.Tensor) -> torch.Tensor:
        """(1, tokens, ...) of the row that was computed as of the whole row."""
        return states if self.keys is None else states[:, self.keys.places]

    def with_room(self, longest: int) -> Documents:
        """With empty documents behind, to the next power of two: code that is made for one number serves most others.

        None of them is longer than `longest`, which stands in place of the length that was measured.
        """
        count = len(self.edges) - 1
        room = max(_FEWEST, 1 << (count - 1).bit_length()) - count
        return Documents(self.lengths, longest, torch.cat((self.edges, self.edges[-1:].expand(room))))
