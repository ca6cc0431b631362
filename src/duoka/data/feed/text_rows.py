"""Plain text for pretraining: documents end to end, cut into rows of one length, nothing thrown away.

`TextRows` stands where a TokenStore does: the epoch plan orders its rows, the loader builds batches of them. For text
too large to index, see row_packer.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from duoka.config.schema import RunConfig
from duoka.data.feed.answers import AnswerRows
from duoka.data.feed.labeled import LabeledRows
from duoka.data.feed.pairs import PairRows
from duoka.data.read.example import KIND_WORDS
from duoka.data.read.registry import ResolvedSet
from duoka.data.tokens.template import Sample
from duoka.data.tokens.token_store import TokenStore
from duoka.errors import DataError


class TextRows:
    """Row i holds tokens [i * (T - 1), i * (T - 1) + T) of all documents end to end, T being `row_tokens`.

    A row begins with the last token of the one before, so that every token that has one before it in its document is
    predicted exactly once, wherever the cut falls. The last row may be shorter.
    """

    def __init__(self, store: TokenStore, row_tokens: int) -> None:
        if row_tokens < 2:
            raise ValueError(f"a row of {row_tokens} token predicts nothing")
        if len(store) == 0 or not np.array_equal(store.num_targets, store.lengths - 1):
            raise ValueError("rows are cut from plain text, where every token is learned")
        self.store = store
        self.row_tokens = row_tokens
        self._ends = np.cumsum(store.lengths, dtype=np.int64)  # of documents, end to end
        num_tokens = int(self._ends[-1])
        count = max(1, -(-(num_tokens - 1) // (row_tokens - 1)))
        self._starts = np.arange(count, dtype=np.int64) * (row_tokens - 1)
        row_ends = np.minimum(self._starts + row_tokens, num_tokens)
        self.lengths = (row_ends - self._starts).astype(np.int32)
        begins = np.concatenate([[0], self._ends[:-1]])
        # A document's first token has nothing before it: neither predicted nor counted.
        num_begins = np.searchsorted(begins, row_ends, "left") - np.searchsorted(begins, self._starts, "right")
        self.num_targets = (self.lengths - 1 - num_begins).astype(np.int32)

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def fingerprint(self) -> str:
        text = f"{self.store.fingerprint}/rows/{self.row_tokens}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def segments(self, index: int) -> list[Sample]:
        """The parts of documents in a row; each sees only itself."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        at = int(self._starts[index])
        end = at + int(self.lengths[index])
        parts = []
        document = int(np.searchsorted(self._ends, at, "right"))
        while at < end:
            whole = self.store.sample(document)
            begin = int(self._ends[document]) - len(whole.input_ids)
            cut = slice(at - begin, end - begin)
            parts.append(Sample(whole.input_ids[cut], whole.is_target[cut]))
            at, document = int(self._ends[document]), document + 1
        return parts


def as_samples(
    store: TokenStore, sets: Sequence[ResolvedSet], config: RunConfig, *, held_out: bool = False
) -> TokenStore | TextRows | AnswerRows:
    """The samples of training or of evaluation: conversations as they are, plain text in rows, answers as judged."""
    kinds = {found.form.kind for found in sets}
    takes_labels = "labeled" in config.stage.kind.records
    if not kinds & {"text", "preference"} and not (takes_labels and "labeled" in kinds):
        return store
    if len(kinds) > 1:
        names = ", ".join(f"{found.name} ({KIND_WORDS[found.form.kind]})" for found in sets)
        what = "plain text, pairs, labeled answers and conversations cannot be mixed in one data set list"
        raise DataError(what, where=names)
    if kinds == {"text"}:
        return TextRows(store, config.data.max_length)
    if takes_labels:
        return LabeledRows(store, config.data.max_length, of_pairs=kinds == {"preference"}, held_out=held_out)
    return PairRows(store)
