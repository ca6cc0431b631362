"""Sample lengths of a run before its first step, and the fullest global batch that they make.

data/dataset_lengths.py finds it out: in tokens when the data is tokenized, else from a look into its files. The plan
asks here how many tokens one rank computes at once; where nothing is known it counts with the longest samples allowed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from duoka.config.schema import TrainConfig
from duoka.units import Amount, parse_amount

Basis = Literal["tokenized", "sampled"]


@dataclass(frozen=True)
class Lengths:
    """Samples in tokens. `batch` are those of the global batch that holds most, longest first; empty: rows are full."""

    basis: Basis
    num_samples: int | None  # of an epoch
    mean: float
    longest: int
    batch: tuple[int, ...] = ()
    shared: float = 0.0  # of a micro-batch's tokens: others of it begin with the same ones, and they are computed once
    least_shared: float = 0.0  # of some micro-batches that were looked at, the least
    document: float = 0.0  # of rows that hold several: how long is what a token's attention sees, on average; 0: rows

    def sentence(self, shared: float = 0.0) -> str:
        """Where the figures come from, as a plan says it; `shared`: as this, where the run computes prefixes once."""
        number = "" if self.num_samples is None else f"{self.num_samples:,} "
        about = "about " if self.basis == "sampled" else ""
        source = "tokenized samples" if self.basis == "tokenized" else "samples, by a look into the files"
        text = f"{about}{number}{source} (mean {about}{self.mean:,.0f} tokens, longest {self.longest:,})"
        return f"{text}; {shared:.0%} of these, in shared prefixes, are computed once for several" if shared else text

    def num_used(self, train: TrainConfig) -> float:
        """Samples that a run comes to at least once: of one that ends within its first epoch, fewer than there are."""
        every = float(self.num_samples or 0)
        if train.max_steps is None:
            return every
        batch = parse_amount(train.global_batch)
        return min(every, train.max_steps * batch.count / (1 if batch.unit == "samples" else self.mean))

    def cut(self, max_length: int) -> Lengths:
        """With samples cut at that length."""
        mean, longest, document = (min(one, max_length) for one in (self.mean, self.longest, self.document))
        batch = tuple(min(size, max_length) for size in self.batch)
        return replace(self, mean=mean, longest=int(longest), batch=batch, document=document)

    def doubled(self, max_length: int) -> Lengths:
        """If a look into the files was wrong by a factor of two, as it may be with unusual text or vocabularies."""
        return replace(
            self, mean=2 * self.mean, longest=2 * self.longest, batch=tuple(2 * size for size in self.batch)
        ).cut(max_length)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Lengths:
        """What `to_json` wrote. Raises KeyError, TypeError or ValueError for anything else."""
        # Runs of earlier versions wrote the other spelling.
        basis: Basis = "tokenized" if raw["basis"] in ("tokenized", "tokenised") else "sampled"
        number = None if raw["num_samples"] is None else int(raw["num_samples"])
        batch = tuple(int(length) for length in raw["batch"])
        others = (float(raw.get(name, 0.0)) for name in ("shared", "least_shared", "document"))
        return cls(basis, number, float(raw["mean"]), int(raw["longest"]), batch, *others)


@dataclass(frozen=True)
class Rows:
    """How a rank's micro-batches are laid out: end to end in one row, each in a row of its own, or in fixed rows."""

    max_length: int
    packing: bool = True
    fixed: bool = False


def rows_of_step(step: Amount, rows: Rows, lengths: Lengths | None = None) -> int:
    """Rows of exactly `max_length` that a step's samples take, whole samples only: what is left over stays empty.

    The loader puts long samples first; half a sample a row is what was seen to stay empty at most.
    """
    mean = lengths.mean if lengths else float(rows.max_length)
    samples = step.count if step.unit == "samples" else step.count / mean
    return max(1, math.ceil(min(samples, samples * mean / (rows.max_length - mean / 2))))


def rows_at_once(micro: Amount, max_length: int) -> int:
    """Of a micro-batch with rows of that length."""
    return micro.count if micro.unit == "samples" else max(1, micro.count // max_length)


def tokens_at_once(step: Amount, num_ranks: int, micro: Amount, rows: Rows, lengths: Lengths | None = None) -> int:
    """The most tokens, padding included, of one micro-batch: expected with `lengths`, else an upper bound."""
    if rows.fixed:
        return rows_at_once(micro, rows.max_length) * rows.max_length
    most = _bound(step, num_ranks, micro, rows.max_length)
    return min(most, _expected(lengths, num_ranks, micro, rows.packing)) if lengths and lengths.batch else most


def tokens_later(lengths: Lengths, num_ranks: int, micro: Amount, packing: bool) -> int:
    """The most tokens of a micro-batch that finds gradients of an earlier one; 0: a step has one micro-batch.

    The loader puts a step's fullest micro-batch first, so this one may be much smaller.
    """
    own = lengths.batch[::num_ranks]
    if packing and micro.unit == "tokens":
        share = max(own[0], math.ceil(sum(lengths.batch) / num_ranks))
        return min(micro.count, max(0, share - micro.count))
    at, sizes = 0, [0]
    while at < len(own):
        group = own[at : at + (micro.count if micro.unit == "samples" else max(1, micro.count // own[at]))]
        sizes.append(sum(group) if packing else len(group) * group[0])
        at += len(group)
    return sorted(sizes)[-2]


def _bound(step: Amount, num_ranks: int, micro: Amount, max_length: int) -> int:
    """Its own limit, or the rank's whole share when that is less, if all samples were as long as they may be."""
    if step.unit == "samples":
        share = math.ceil(step.count / num_ranks) * max_length
    else:
        share = max(max_length, math.ceil(step.count / num_ranks))
    limit = micro.count * max_length if micro.unit == "samples" else max(micro.count, max_length)
    return min(limit, share)


def _expected(lengths: Lengths, num_ranks: int, micro: Amount, packing: bool) -> int:
    """Of the fullest batch, or of the longest sample's micro-batch, whichever batch that lies in.

    Samples are dealt to ranks longest first, so shares are nearly equal.
    """
    batch = lengths.batch
    own = batch[::num_ranks]  # of the rank that gets the longest
    share = max(own[0], math.ceil(sum(batch) / num_ranks))
    if micro.unit == "samples":
        some = own[: micro.count]
        return max(lengths.longest, sum(some)) if packing else len(some) * max(lengths.longest, some[0])
    if packing:
        return max(lengths.longest, min(micro.count, share))
    return max(size * min(len(own), max(1, micro.count // size)) for size in (own[0], lengths.longest))
