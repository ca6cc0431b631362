"""Preference pairs: two sequences a sample, which never part, and their log-probabilities where the run begins.

`PairRows` stands where a TokenStore does: the epoch plan orders pairs, the loader lays both sequences of one into the
same micro-batch. Stages read who is who, and the reference's numbers, from the batch (loader.py:Batch).
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from duoka.data.tokens.template import Sample
from duoka.data.tokens.token_store import TokenStore

CHOSEN, REJECTED = 0, 1
PADDING = -1  # of a document that only fills a row


class PairRows:
    """Sample i is pair i: the sequence with the better answer, then the one with the worse, each with its prompt."""

    def __init__(self, store: TokenStore) -> None:
        self.store = store
        self.lengths = store.lengths
        self.num_targets = store.num_targets
        # (pairs, 2): set once, before the first step, where the loss has a reference.
        self.reference: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.store)

    @property
    def fingerprint(self) -> str:
        return self.store.fingerprint

    def segments(self, index: int) -> list[Sample]:
        """Chosen and rejected, end to end; neither sees the other."""
        whole, cut = self.store.sample(index), int(self.store.marks[index])
        return [
            Sample(whole.input_ids[:cut], whole.is_target[:cut]),
            Sample(whole.input_ids[cut:], whole.is_target[cut:]),
        ]

    @cached_property
    def row_lengths(self) -> np.ndarray:
        """What a pair takes where each sequence has a row of its own: twice the longer one."""
        longer: np.ndarray = np.maximum(self.store.marks, self.lengths - self.store.marks)
        return 2 * longer

    @cached_property
    def chosen_targets(self) -> np.ndarray:
        """(pairs,) target tokens of the better answers."""
        return np.array([self.segments(index)[CHOSEN].num_targets for index in range(len(self))], np.int64)
