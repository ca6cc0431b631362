"""Where the documents of a packed row lie, as attention and whatever else looks for their borders is told it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from duoka.model.prefixes import SharedKeys, ShortRow, shorten, upload

_FEWEST = 64  # documents of a micro-batch, as compiled layers know them
_SHORT = 64  # up to here documents stand beside each other, however short: states are computed by chunks of so many


@dataclass(frozen=True)
class Group:
    """Documents about as long as each other, each in a row of its own."""

    num_rows: int
    longest: int
    places: torch.Tensor  # (rows * longest,) in the packed row; behind a document's end its last token stands again


@dataclass(frozen=True)
class OwnRows:
    groups: tuple[Group, ...]
    back: torch.Tensor  # (tokens,): where each token of the packed row stands, all groups' rows behind each other


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

    @functools.cached_property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @functools.cached_property
    def own_rows(self) -> OwnRows:
        return _lay_out(self.lengths, self.edges.device)

    def with_room(self, longest: int) -> Documents:
        """With empty documents behind, to the next power of two: code that is made for one number serves most others.

        None of them is longer than `longest`, which stands in place of the length that was measured.
        """
        count = len(self.edges) - 1
        room = max(_FEWEST, 1 << (count - 1).bit_length()) - count
        return Documents(self.lengths, longest, torch.cat((self.edges, self.edges[-1:].expand(room))))


def group_by_length(lengths: list[int]) -> list[list[int]]:
    """Documents by their number, the longest first: with others that are more than half as long."""
    groups: list[list[int]] = []
    for number in sorted((n for n, length in enumerate(lengths) if length), key=lambda n: -lengths[n]):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and (longest <= _SHORT or 2 * lengths[number] > longest):
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


def _lay_out(lengths: torch.Tensor, device: torch.device) -> OwnRows:
    starts, back = lengths.cumsum(0) - lengths, torch.empty(int(lengths.sum()), dtype=torch.long)
    groups, begin = [], 0
    for members in group_by_length(lengths.tolist()):
        offsets = torch.arange(int(lengths[members[0]]))
        own = lengths[members, None]
        places = starts[members, None] + offsets.minimum(own - 1)
        is_token = (offsets < own).flatten()
        back[places.flatten()[is_token]] = begin + is_token.nonzero()[:, 0]
        groups.append(Group(len(members), len(offsets), upload(places.flatten(), device)))
        begin += places.numel()
    return OwnRows(tuple(groups), upload(back, device))


# Of the pass that is going on; None: its rows hold a document each. Not set where nobody says: in a model that is used
# as it is.
READ: ContextVar[Documents | None] = ContextVar("duoka_documents_read")


@contextlib.contextmanager
def reading(documents: Documents | None) -> Iterator[None]:
    """Around a pass over a packed row, or over rows that hold a document each: for layers that are not told."""
    token = READ.set(documents)
    try:
        yield
    finally:
        READ.reset(token)


def reading_again() -> Callable[[], AbstractContextManager[None]]:
    """Called in a pass: what a layer of it is computed again in, by any thread and after other passes."""
    return functools.partial(reading, READ.get(None))


def documents_read(num_rows: int, num_tokens: int, ranks: int = 1) -> Documents | None:
    """Those of this pass, where it is over a row of that size; of a row that ranks share each has a stretch."""
    documents = READ.get(None)
    is_this = documents is not None and num_rows == 1 and documents.num_tokens == ranks * num_tokens
    return documents if is_this else None
