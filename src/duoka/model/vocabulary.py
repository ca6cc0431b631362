"""The words that a head's rows stand for: all of them here, or a range that this rank has of a shared vocabulary.

The chunked losses (loss.py, logps.py) ask it for what concerns all words. Exchanges come from outside, because nothing
here knows of process groups: parallel/tensor.py shares a head's rows out, and leaves a `SharedVocabulary` with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

VOCABULARY = "shared_vocabulary"  # where a head keeps it


class Vocabulary:
    """All words, so that nothing is exchanged."""

    def spread(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows as all ranks read them: their gradient is the sum of what each rank makes of its words."""
        return rows

    def total(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Sums over ranks, of tensors of one shape."""
        return values

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """The maximum over ranks."""
        return values

    def pick(self, values: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """(rows, words) at one word a row: (rows, 1), to be summed over ranks."""
        return values.gather(1, words[:, None])

    def add_at_(self, values: torch.Tensor, words: torch.Tensor, amounts: torch.Tensor) -> None:
        """Add `amounts` (rows, 1) at one word a row, in place."""
        values.scatter_add_(1, words[:, None], amounts)

    def likeliest(self, values: torch.Tensor) -> torch.Tensor:
        """The word with the largest value of each row; of equal ones the first."""
        return values.argmax(dim=-1)

    def most_words(self, own: int) -> int:
        """Of the rank that has most: by it rows are cut into chunks, equally many everywhere."""
        return own


WHOLE = Vocabulary()


@dataclass(frozen=True)
class SharedVocabulary(Vocabulary):
    """Words `start` to `start + size` of `num_words`. `add` and `most` work over ranks, in place."""

    start: int
    size: int
    num_words: int
    most_here: int
    add: Callable[[torch.Tensor], torch.Tensor]
    most: Callable[[torch.Tensor], torch.Tensor]
    spread_rows: Callable[[torch.Tensor], torch.Tensor]

    def spread(self, rows: torch.Tensor) -> torch.Tensor:
        return self.spread_rows(rows)

    def total(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.add(torch.stack(values)).unbind()

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        return self.most(values)

    def pick(self, values: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        place, elsewhere = self._find(words)
        return values.gather(1, place).masked_fill_(elsewhere, 0.0)

    def add_at_(self, values: torch.Tensor, words: torch.Tensor, amounts: torch.Tensor) -> None:
        place, elsewhere = self._find(words)
        values.scatter_add_(1, place, amounts.masked_fill(elsewhere, 0.0))

    def likeliest(self, values: torch.Tensor) -> torch.Tensor:
        best, place = values.max(dim=-1)
        is_best = best == self.most(best.clone())
        return -self.most(torch.where(is_best, -(place + self.start), -self.num_words))

    def most_words(self, own: int) -> int:
        return self.most_here

    def _find(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each word's column here (rows, 1), and whether it is another rank's."""
        place = words[:, None] - self.start
        elsewhere = (place < 0) | (place >= self.size)
        return place.masked_fill(elsewhere, 0), elsewhere
