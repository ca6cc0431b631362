"""Samples that are judged answers: who is whose in a batch, and log-probabilities where the run begins.

Both kinds stand where a TokenStore does: the epoch plan orders samples, the loader lays them out. `PairRows` (pairs.py)
has two answers a sample, `LabeledRows` (labeled.py) one, each with its prompt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from duoka.data.tokens.template import Sample

CHOSEN, REJECTED = 0, 1  # a good answer alone is CHOSEN, a bad one REJECTED
PADDING = -1  # of a document that only fills a row


class AnswerRows(ABC):
    """`reference`: (samples, 2), set once, before the first step, where the loss has a reference."""

    noun: str
    lengths: np.ndarray
    num_targets: np.ndarray
    reference: np.ndarray | None = None

    @property
    def margins(self) -> np.ndarray | None:
        """(samples,) by how much the better of two answers is to score higher; None: by nothing."""
        return None

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def fingerprint(self) -> str: ...

    @property
    @abstractmethod
    def packed_lengths(self) -> np.ndarray:
        """What each sample takes of a packed micro-batch's tokens."""

    @property
    @abstractmethod
    def row_lengths(self) -> np.ndarray:
        """What it takes where each sequence has a row of its own."""

    @abstractmethod
    def segments(self, index: int) -> list[Sample]:
        """Its sequences, which do not see each other."""

    @abstractmethod
    def sides_of(self, index: int) -> list[int]:
        """CHOSEN or REJECTED, of each of its sequences."""

    @abstractmethod
    def reference_of(self, index: int) -> np.ndarray | None:
        """The reference's log-probability of each of its sequences."""
