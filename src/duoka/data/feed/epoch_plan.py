"""The order of training, and how one global batch is laid out: pure functions of numbers, NumPy only.

`EpochPlan` decides which samples each optimizer step learns from; it knows nothing of ranks. `share_batch` decides
which rank computes which of them, in what rows; it changes speed and memory, never results. The split is there so that
losses do not depend on the layout, and each rank knows the global token count before the step, without a collective.
"""

from __future__ import annotations

import bisect
import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from duoka.config.schema import TrainConfig
from duoka.units import Amount, parse_amount, steps_of_epochs

ORDER_VERSION = 2  # raise it when the same data, seed and batch would give another order: old checkpoints are refused
# For a sample of so many tokens, attention's quadratic cost equals everything that is linear in its length.
# About 6 x hidden size: 3.5k for a 135M model, 24k for a 7B one. It only balances ranks, so one number serves.
SQUARE_EQUALS_LINEAR_AT = 8192
_PARTS_OF_A_RANK = 4  # at least, of samples that begin alike and are dealt to ranks together


class EpochPlan:
    """Which samples make up each global batch of each epoch; the same on every rank and for every world size."""

    def __init__(
        self, lengths: np.ndarray, num_targets: np.ndarray, *, fingerprint: str, seed: int, global_batch: Amount
    ) -> None:
        if len(lengths) != len(num_targets):
            raise ValueError(f"{len(lengths)} lengths, but {len(num_targets)} target counts")
        if len(lengths) == 0:
            raise ValueError("there is no sample to plan with")
        self.lengths = lengths
        self.num_targets = num_targets
        self.fingerprint = fingerprint
        self.seed = seed
        self.global_batch = global_batch
        self._num_tokens = int(lengths.sum(dtype=np.int64))
        self._known: tuple[int, np.ndarray, np.ndarray] = (-1, np.zeros(0, np.uint32), np.zeros(1, np.int64))

    @property
    def num_samples(self) -> int:
        return len(self.lengths)

    def num_batches(self, epoch: int = 0) -> int:
        """Optimizer steps in an epoch; every epoch has as many, so that total steps are known ahead."""
        if self.global_batch.unit == "samples":
            return -(-self.num_samples // self.global_batch.count)
        nearest = (2 * self._num_tokens + self.global_batch.count) // (2 * self.global_batch.count)
        return min(max(nearest, 1), self.num_samples)

    def num_steps(self, num_epochs: float) -> int:
        """Optimizer steps in so many epochs; a part of an epoch counts its batches, rounded up."""
        return steps_of_epochs(num_epochs, self.num_batches())

    def num_samples_between(self, first: int, last: int) -> int:
        """Samples of the steps from `first` to before `last`, counted from the run's first as 0."""
        per_epoch, count = self.num_batches(), 0
        for epoch in range(first // per_epoch, -(-last // per_epoch)):
            start, end = max(first - epoch * per_epoch, 0), min(last - epoch * per_epoch, per_epoch)
            if (start, end) == (0, per_epoch):
                count += self.num_samples
            else:
                _, starts = self._plan(epoch)
                count += int(starts[end] - starts[start])
        return count

    def ids_before(self, last: int) -> np.ndarray:
        """The samples of a run's steps before `last`, each once, in order of their numbers."""
        per_epoch = self.num_batches()
        if last >= per_epoch:
            return np.arange(self.num_samples)
        order, starts = self._plan(0)
        return np.sort(order[: starts[max(0, last)]].astype(np.int64))

    def batch(self, epoch: int, index: int) -> np.ndarray:
        """The ids of the samples in one global batch."""
        order, starts = self._plan(epoch)
        if not 0 <= index < self.num_batches(epoch):
            raise IndexError(f"batch {index} of {self.num_batches(epoch)} in epoch {epoch}")
        return order[starts[index] : starts[index + 1]].astype(np.int64)

    def batch_tokens(self, epoch: int) -> np.ndarray:
        """How many tokens each global batch of an epoch holds."""
        order, starts = self._plan(epoch)
        tokens: np.ndarray = np.add.reduceat(self.lengths[order].astype(np.int64), starts[:-1])
        return tokens

    def global_targets(self, epoch: int, index: int) -> int:
        """Target tokens of one global batch, over all ranks."""
        return int(self.num_targets[self.batch(epoch, index)].sum(dtype=np.int64))

    def _plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """An epoch's order, and where each batch starts in it; that of the last epoch asked for is kept.

        As one value: the thread that builds batches ahead may be in another epoch than the one that trains.
        """
        known, order, starts = self._known
        if epoch != known:
            order = shuffled(self.num_samples, f"{self.fingerprint}/{self.seed}/{epoch}")
            starts = self._cut(order)
            self._known = (epoch, order, starts)
        return order, starts

    def _cut(self, order: np.ndarray) -> np.ndarray:
        """Where each batch starts in the order, and where the last one ends."""
        num_batches = self.num_batches()
        if self.global_batch.unit == "samples":
            starts = np.arange(num_batches, dtype=np.int64) * self.global_batch.count
            return np.append(starts, self.num_samples)
        # Windows of equal token counts; a sample belongs to the window that holds its middle. Twice the middle, so
        # that it is a whole number: floats would cut in other places on other machines.
        lengths = self.lengths[order].astype(np.int64)
        middles = np.cumsum(lengths)
        middles *= 2
        middles -= lengths
        borders = np.array([2 * self._num_tokens * place // num_batches for place in range(num_batches)], np.int64)
        starts = np.searchsorted(middles, borders, side="left")
        # Samples longer than a window would leave the next one empty: each batch gets at least one.
        places = np.arange(num_batches)
        starts = np.maximum.accumulate(starts - places) + places
        starts = np.minimum(starts, self.num_samples - num_batches + places)
        return np.append(starts, self.num_samples)


class Sized(Protocol):
    """A TokenStore, or text_rows.TextRows."""

    lengths: np.ndarray
    num_targets: np.ndarray

    @property
    def fingerprint(self) -> str: ...


def plan_epochs(samples: Sized, train: TrainConfig, some: slice = slice(None)) -> EpochPlan:
    """The epoch plan of a run; of `some` samples only, batches like those of the run."""
    return EpochPlan(
        samples.lengths[some], samples.num_targets[some], fingerprint=samples.fingerprint, seed=train.seed,
        global_batch=parse_amount(train.global_batch),
    )  # fmt: skip


def shuffled(count: int, name: str) -> np.ndarray:
    """A permutation of 0 to count - 1 that `name` alone decides, on any machine and NumPy version."""
    start = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    keys = np.arange(count, dtype=np.uint64)
    keys += np.uint64(start)
    mix_keys(keys)
    # The lowest bits of each key are replaced by its number: sorting the keys in place then sorts the numbers, several
    # times faster than an argsort, and no two keys are equal, so any algorithm gives the same order.
    num_bits = max(1, (count - 1).bit_length())
    keys >>= np.uint64(num_bits)
    keys <<= np.uint64(num_bits)
    keys |= np.arange(count, dtype=np.uint64)
    keys.sort()
    keys &= np.uint64((1 << num_bits) - 1)
    return keys.astype(np.uint32 if count < 1 << 32 else np.uint64)


def mix_keys(keys: np.ndarray) -> None:
    """splitmix64's finalizer, in place: neighbors in, unrelated numbers out, one to one."""
    keys *= np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        keys ^= keys >> np.uint64(shift)
        keys *= np.uint64(factor)
    keys ^= keys >> np.uint64(31)


# ------------------------------------------------------------------------------------------ one batch


@dataclass(frozen=True)
class MicroPlan:
    """What a rank computes at once: rows of sample ids. Packed: one row, samples end to end. Padded: one a row."""

    rows: tuple[tuple[int, ...], ...]

    @property
    def sample_ids(self) -> tuple[int, ...]:
        return tuple(sample for row in self.rows for sample in row)


EMPTY = MicroPlan(())


def share_batch(
    sample_ids: np.ndarray,
    lengths: np.ndarray,
    num_ranks: int,
    micro: Amount,
    *,
    packing: bool,
    max_length: int,
    alike: np.ndarray | None = None,
) -> list[list[MicroPlan]]:
    """Lay one global batch out: [rank][micro-batch], of equal cost, and equally many micro-batches on every rank.

    `lengths` are those of all samples. A sample longer than a micro-batch's tokens gets one of its own. Samples with
    the same number in `alike` begin alike, and are packed side by side as far as micro-batches and ranks allow.
    """
    own_lengths = np.asarray(lengths)[sample_ids]
    if len(own_lengths) and int(own_lengths.max()) > max_length:
        raise ValueError(f"a sample of {int(own_lengths.max())} tokens, and max_length is {max_length}")
    # Longest first, and by id among equals: the same on every rank, whatever order the ids came in.
    longest_first = np.lexsort((sample_ids, -own_lengths.astype(np.int64)))
    pairs = list(zip(sample_ids[longest_first].tolist(), own_lengths[longest_first].tolist(), strict=True))
    if alike is not None and packing and micro.unit == "tokens":
        plans = _share_together(pairs, alike, num_ranks, micro)
    else:
        plans = [_cut_share(share, micro, packing) for share in _share_by_cost(pairs, num_ranks)]
    most = max(1, max(len(plan) for plan in plans))
    return [plan + [EMPTY] * (most - len(plan)) for plan in plans]


def share_rows(
    sample_ids: np.ndarray, lengths: np.ndarray, num_ranks: int, rows_per_micro: int, *, max_length: int
) -> list[list[MicroPlan]]:
    """Lay one global batch out in rows of up to `max_length` tokens, whole samples only: [rank][micro-batch].

    For fixed shapes (compile, pipelines). Rows differ in attention's quadratic cost: the costliest row
    goes to the least loaded rank, as long as none gets more micro-batches than it must.
    """
    own_lengths = np.asarray(lengths)[sample_ids]
    if len(own_lengths) and int(own_lengths.max()) > max_length:
        raise ValueError(f"a sample of {int(own_lengths.max())} tokens, and max_length is {max_length}")
    longest_first = np.lexsort((sample_ids, -own_lengths.astype(np.int64)))
    pairs = list(zip(sample_ids[longest_first].tolist(), own_lengths[longest_first].tolist(), strict=True))
    rows = fill_bins(pairs, max_length)
    costs = [row_cost([length for _, length in row], max_length) for row in rows]
    most = max(1, -(-len(rows) // (num_ranks * rows_per_micro)))
    shares: list[list[tuple[int, ...]]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for place in sorted(range(len(rows)), key=lambda place: (-costs[place], place)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(tuple(sample for sample, _ in rows[place]))
        if len(shares[rank]) < most * rows_per_micro:
            heapq.heappush(loads, (load + costs[place], rank))
    return [
        [MicroPlan(tuple(share[at * rows_per_micro : (at + 1) * rows_per_micro])) for at in range(most)]
        for share in shares
    ]


def row_cost(lengths: Sequence[int], row_tokens: int) -> int:
    """The work of a row of fixed length, padding included, in the units of `cost_of`."""
    padding = row_tokens - sum(lengths)
    return SQUARE_EQUALS_LINEAR_AT * row_tokens + sum(length * length for length in (*lengths, padding))


def cost_of(length: int) -> int:
    """A sample's work, in units that only compare: linear in its length, plus attention's square."""
    return length * (SQUARE_EQUALS_LINEAR_AT + length)


def _share_by_cost(pairs: Sequence[tuple[int, int]], num_ranks: int) -> list[list[tuple[int, int]]]:
    """Each sample, longest first, to the least loaded rank so far."""
    shares: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for pair in pairs:
        load, rank = loads[0]
        shares[rank].append(pair)
        heapq.heapreplace(loads, (load + cost_of(pair[1]), rank))
    return shares


def _share_together(
    pairs: Sequence[tuple[int, int]], alike: np.ndarray, num_ranks: int, micro: Amount
) -> list[list[MicroPlan]]:
    """Parts of what begins alike are shared out as samples are, each small enough that ranks have equal work."""
    families: dict[int, list[tuple[int, int]]] = {}
    for pair in pairs:
        families.setdefault(int(alike[pair[0]]), []).append(pair)
    share = sum(length for _, length in pairs) // num_ranks
    most = micro.count if num_ranks == 1 else min(micro.count, max(1, share // _PARTS_OF_A_RANK))
    parts = [part for family in families.values() for part in fill_bins(family, most)]
    parts.sort(key=lambda part: -sum(length for _, length in part))
    sizes = [(place, sum(length for _, length in part)) for place, part in enumerate(parts)]
    cut = ([plan.rows[0] for plan in _cut_share(own, micro, True)] for own in _share_by_cost(sizes, num_ranks))
    return [
        [MicroPlan((tuple(sample for place in row for sample, _ in parts[place]),)) for row in rows] for rows in cut
    ]


def _cut_share(share: Sequence[tuple[int, int]], micro: Amount, packing: bool) -> list[MicroPlan]:
    """A rank's samples, longest first, into micro-batches, the fullest first, while no gradients are allocated yet."""
    if micro.unit == "samples":
        groups: Sequence[Sequence[tuple[int, int]]] = [
            share[at : at + micro.count] for at in range(0, len(share), micro.count)
        ]
    elif packing:
        groups = fill_bins(share, micro.count)
    else:
        groups = _group_rows(share, micro.count)

    def size(group: Sequence[tuple[int, int]]) -> int:
        lengths = [length for _, length in group]
        return sum(lengths) if packing else len(lengths) * max(lengths)

    groups = sorted(groups, key=size, reverse=True)
    ids = [tuple(sample for sample, _ in group) for group in groups]
    return [MicroPlan((row,)) if packing else MicroPlan(tuple((sample,) for sample in row)) for row in ids]


def fill_bins(share: Sequence[tuple[int, int]], num_tokens: int) -> list[list[tuple[int, int]]]:
    """Best fit: each sample, longest first, to the fullest bin that has room for it, the first of equally full ones."""
    bins: list[list[tuple[int, int]]] = []
    # Every rank packs the whole global batch at every step: scanning all bins per sample would be quadratic.
    rooms: list[int] = []  # free sizes of bins, sorted, each once
    bins_with: dict[int, list[int]] = {}  # a heap of the bins with that free size
    for pair in share:
        at = bisect.bisect_left(rooms, pair[1])
        if at < len(rooms):
            room = rooms[at]
            place = heapq.heappop(bins_with[room])
            if not bins_with[room]:
                del bins_with[room], rooms[at]
            bins[place].append(pair)
        else:
            room, place = num_tokens, len(bins)
            bins.append([pair])
        left = room - pair[1]
        if left not in bins_with:
            bisect.insort(rooms, left)
            bins_with[left] = []
        heapq.heappush(bins_with[left], place)
    return bins


def _group_rows(share: Sequence[tuple[int, int]], num_tokens: int) -> list[Sequence[tuple[int, int]]]:
    """Padded rows, longest first: as many rows as fit when all are as long as the first."""
    groups = []
    at = 0
    while at < len(share):
        num_rows = max(1, num_tokens // max(1, share[at][1]))
        groups.append(share[at : at + num_rows])
        at += num_rows
    return groups
