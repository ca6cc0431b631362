"""Preference pairs: two sequences a sample, which never part.

The loader lays both sequences of one into the same micro-batch. Stages read who is who, and the reference's numbers,
from the batch (loader.py:Batch).
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from duoka.data.feed.answers import CHOSEN, REJECTED, AnswerRows
from duoka.data.tokens.template import Sample
from duoka.data.tokens.token_store import TokenStore


class PairRows(AnswerRows):
    """Sample i is pair i: the sequence with the better answer, then the one with the worse, each with its prompt."""

    noun = "pairs"

    def __init__(self, store: TokenStore) -> None:
        self.store = store
        self.lengths = store.lengths
        self.num_targets = store.num_targets

    def __len__(self) -> int:
        return len(self.store)

    @property
    def fingerprint(self) -> str:
        return self.store.fingerprint

    def segments(self, index: int) -> list[Sample]:
        """Chosen and rejected, end to end; neither sees the other."""
        return list(split_pair(self.store, index))

    def sides_of(self, index: int) -> list[int]:
        return [CHOSEN, REJECTED]

    def reference_of(self, index: int) -> np.ndarray | None:
        return None if self.reference is None else self.reference[index]

    @property
    def margins(self) -> np.ndarray | None:
        return self.store.margins

    @property
    def packed_lengths(self) -> np.ndarray:
        return self.lengths

    @cached_property
    def row_lengths(self) -> np.ndarray:
        """Twice the longer one."""
        longer: np.ndarray = np.maximum(self.store.marks, self.lengths - self.store.marks)
        return 2 * longer

    @cached_property
    def chosen_targets(self) -> np.ndarray:
        """(pairs,) target tokens of the better answers."""
        return np.array([self.segments(index)[CHOSEN].num_targets for index in range(len(self))], np.int64)


def split_pair(store: TokenStore, index: int) -> tuple[Sample, Sample]:
    """The sequences of a pair: chosen and rejected."""
    whole, cut = store.sample(index), int(store.marks[index])
    return (
        Sample(whole.input_ids[:cut], whole.is_target[:cut]),
        Sample(whole.input_ids[cut:], whole.is_target[cut:]),
    )
