"""Answers labeled good or bad (KTO): one sequence a sample, and beside it the prompt with an answer to another prompt.

Which other answer is fixed by the data: the answers to a prompt stand in, in turn, for those to the prompt before it,
in the order of the data set and round its end. So neither the split over ranks nor the order of an epoch changes a
pair, and what the reference says of it is computed once. In turn, not the first one for all: of pairs the first is
always the good one, and z0 would be that of good answers alone.
"""

from __future__ import annotations

import hashlib
from functools import cached_property

import numpy as np

from duoka.data.feed.answers import CHOSEN, REJECTED, AnswerRows
from duoka.data.feed.pairs import split_pair
from duoka.data.tokens.template import Sample
from duoka.data.tokens.token_store import TokenStore
from duoka.errors import DataError


class LabeledRows(AnswerRows):
    """Sample i is answer i with its prompt; `of_pairs`: samples 2i and 2i + 1 are the sides of preference pair i."""

    noun = "answers"

    def __init__(self, store: TokenStore, max_length: int, *, of_pairs: bool, held_out: bool = False) -> None:
        """`held_out`: they are data.eval's, of which there may be few."""
        self.store = store
        self.max_length = max_length
        self.of_pairs = of_pairs
        if of_pairs:
            sizes = np.stack([store.marks, store.lengths - store.marks], axis=1)
            self.lengths = sizes.reshape(-1).astype(np.int32)
            self.num_targets = np.array([self._answer(i).num_targets for i in range(len(self.lengths))], np.int32)
            self.is_good = np.arange(len(self.lengths)) % 2 == 0
        else:
            self.lengths, self.num_targets, self.is_good = store.lengths, store.num_targets, store.marks == 1
        self.prompt_sizes = np.zeros(len(self.lengths), np.int64)  # tokens before the first target
        self.partners = self._find_partners(held_out)  # (samples,) whose answer stands in for each one's own
        self.mismatched = MismatchedRows(self)

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def fingerprint(self) -> str:
        text = f"{self.store.fingerprint}/labeled/{self.of_pairs}/{self.max_length}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def segments(self, index: int) -> list[Sample]:
        return [self._answer(index)]

    def sides_of(self, index: int) -> list[int]:
        return [CHOSEN if self.is_good[index] else REJECTED]

    def reference_of(self, index: int) -> np.ndarray | None:
        return None if self.reference is None else self.reference[index, :1]

    @cached_property
    def packed_lengths(self) -> np.ndarray:
        """Of the longer one of both sequences: each micro-batch is computed with the one, and with the other."""
        longer: np.ndarray = np.maximum(self.lengths, self.mismatched.lengths)
        return longer

    @property
    def row_lengths(self) -> np.ndarray:
        return self.packed_lengths

    def _answer(self, index: int) -> Sample:
        return split_pair(self.store, index // 2)[index % 2] if self.of_pairs else self.store.sample(index)

    def _find_partners(self, held_out: bool) -> np.ndarray:
        digests = np.empty(len(self), np.uint64)
        for index in range(len(self)):
            answer = self._answer(index)
            self.prompt_sizes[index] = size = int(answer.is_target.argmax())
            name = hashlib.blake2b(answer.input_ids[:size].tobytes(), digest_size=8).digest()
            digests[index] = np.frombuffer(name, np.uint64)[0]
        # Where another prompt begins, seen as a ring: its last neighbor may be the first sample's.
        begins = np.flatnonzero(digests != np.roll(digests, 1))
        if not len(begins):
            where = " of data.eval" if held_out else ""
            raise DataError(
                f"all labeled answers{where} are to one prompt, and KTO compares each with an answer to another prompt",
                where=f"held out: {len(self):,}" if held_out else None,
                fix="hold out answers to a second prompt too, a larger share or number of them, or write   eval: 0"
                if held_out
                else "add answers to a second prompt, or take preference pairs:   stage: dpo",
            )
        places = np.arange(len(self))
        run = np.searchsorted(begins, places, side="right") - 1  # of answers to one prompt; -1: the last one, round
        following = (run + 1) % len(begins)
        sizes = np.roll(begins, -1) - begins
        sizes[-1] += len(self)
        partners: np.ndarray = (begins[following] + (places - begins[run]) % len(self) % sizes[following]) % len(self)
        return partners


class MismatchedRows:
    """Sample i: the prompt of answer i, and the answer of its partner, cut at its end where both are too long."""

    def __init__(self, own: LabeledRows) -> None:
        self.own = own
        answers = (own.lengths - own.prompt_sizes)[own.partners]
        self.lengths: np.ndarray = np.minimum(own.prompt_sizes + answers, own.max_length).astype(np.int32)

    def __len__(self) -> int:
        return len(self.own)

    def segments(self, index: int) -> list[Sample]:
        own, partner = self.own, int(self.own.partners[index])
        (prompt,), (answer,) = own.segments(index), own.segments(partner)
        here, there, most = own.prompt_sizes[index], own.prompt_sizes[partner], own.max_length
        return [
            Sample(
                np.concatenate([prompt.input_ids[:here], answer.input_ids[there:]])[:most],
                np.concatenate([prompt.is_target[:here], answer.is_target[there:]])[:most],
            )
        ]

    def sides_of(self, index: int) -> list[int]:
        return self.own.sides_of(index)

    @property
    def reference(self) -> np.ndarray | None:
        return self.own.reference

    def reference_of(self, index: int) -> np.ndarray | None:
        return None if self.own.reference is None else self.own.reference[index, 1:]
