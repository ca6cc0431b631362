"""Batches of tensors: the samples that the epoch plan chose, laid out as `share_batch` says, for one rank.

The training loop walks `Loader.batches` (or stream_feed's); evaluation walks `eval_batches`. Labels are shifted here,
once: position t holds the id of token t + 1 of the same sample, so that no loss has to know where samples begin.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from duoka.data.feed.ahead import prefetched
from duoka.data.feed.answers import PADDING, AnswerRows
from duoka.data.feed.epoch_plan import EpochPlan, MicroPlan, share_batch, share_rows
from duoka.data.feed.labeled import LabeledRows, MismatchedRows
from duoka.data.feed.token_keys import PADDING_KEY, end_to_end, sample_keys, step_key
from duoka.data.tokens.template import Sample
from duoka.units import Amount

IGNORED = -100  # the label of a token without loss
_EVAL_SAMPLES_PER_RANK = 256


class Samples(Protocol):
    """What batches are built from: a TokenStore of samples, or text_rows.TextRows."""

    lengths: np.ndarray

    def __len__(self) -> int: ...

    def segments(self, index: int) -> list[Sample]:
        """The parts of sample `index` that lie end to end and must not see each other."""
        ...


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank."""

    input_ids: Tensor  # (rows, tokens) long
    labels: Tensor  # (rows, tokens) long, already shifted
    position_ids: Tensor  # (rows, tokens) long, from 0 in each sample
    boundaries: Tensor | None  # (samples + 1,) int32: where samples start in a packed row, and its end
    attention_mask: Tensor | None  # (rows, tokens) bool, of padded rows
    num_targets: int
    num_tokens: int  # real ones
    num_samples: int
    token_keys: Tensor | None = None  # (rows, tokens) long, what dropout counts from (token_keys.py); training only
    target_places: Tensor | None = None  # (targets,) long, among all tokens, for devices that are slow to be asked
    sides: Tensor | None = None  # (documents,) long, of answers: CHOSEN or REJECTED (of a pair: in this order); PADDING
    reference: Tensor | None = None  # (documents,) double: log-probability of each where the run began
    margins: Tensor | None = None  # (pairs,) double: by how much the better answer is to score higher
    mismatched: Batch | None = None  # of labeled answers: the same prompts, each with an answer to another one

    def pinned(self) -> Batch:
        """The same in pinned memory, for a GPU, which is told where targets are."""
        known = replace(self, target_places=(self.labels.reshape(-1) != IGNORED).nonzero().squeeze(1))
        tensors: dict[str, Any] = {
            name: value.pin_memory() for name, value in vars(known).items() if isinstance(value, Tensor)
        }
        if self.mismatched is not None:
            tensors["mismatched"] = self.mismatched.pinned()
        return replace(known, **tensors)


@dataclass(frozen=True)
class Place:
    """The dataloader state, the same on every rank: the next global batch of an epoch; of streams, their cursors."""

    epoch: int = 0
    index: int = 0
    streams: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class GlobalBatch:
    """One optimizer step: this rank's micro-batches, and what all ranks together learn from."""

    micro_batches: list[Batch]
    global_targets: int
    num_samples: int
    num_tokens: int
    epoch: int
    index: int
    sample_ids: np.ndarray
    after: Place = field(default_factory=Place)  # where the next one is
    epochs_done: float = 0.0  # with this one
    facts: Mapping[str, float] = field(default_factory=dict)  # of all of it, logged beside what the step measures


class Loader:
    """One rank's dataloader over the epoch plan. Cheap to start at any place: nothing is replayed."""

    def __init__(
        self,
        store: Samples,
        plan: EpochPlan,
        *,
        rank: int,
        num_ranks: int,
        micro: Amount,
        packing: bool,
        max_length: int,
        pad_id: int,
        fixed_rows: bool = False,
        pin_memory: bool = False,
    ) -> None:
        """`fixed_rows`: every micro-batch is whole rows of `max_length`, end to end, so that shapes never change.

        `pin_memory`: batches are in page-locked memory, for asynchronous copies to a GPU.
        """
        if fixed_rows and not packing:
            raise ValueError("fixed rows are packed: packing=False contradicts them")
        self.store = store
        self.plan = plan
        self.rank = rank
        self.num_ranks = num_ranks
        self.micro = micro
        self.packing = packing
        self.max_length = max_length
        self.pad_id = pad_id
        self.pin_memory = pin_memory
        rows = micro.count // max_length if micro.unit == "tokens" else micro.count
        self.rows_per_micro = max(1, rows) if fixed_rows else 0

    @property
    def steps_per_epoch(self) -> int:
        return self.plan.num_batches()

    def num_steps(self, num_epochs: float) -> int:
        return self.plan.num_steps(num_epochs)

    def num_samples_between(self, start: int, end: int) -> int:
        return self.plan.num_samples_between(start, end)

    def summary(self) -> str:
        return ""

    def batches(self, place: Place, num_epochs: float) -> Generator[GlobalBatch]:
        """`from_cursor`, with the next batch built by a thread while one is learned from."""
        while True:
            micro = self.micro
            with contextlib.closing(prefetched(self.from_cursor(place.epoch, place.index, num_epochs), 1)) as ahead:
                for batch in ahead:
                    yield batch
                    if self.micro != micro:
                        break
                else:
                    return
            # After an OOM: prefetched batches were cut for the micro-batch size that did not fit.
            place = batch.after

    def from_cursor(self, epoch: int, index: int, num_epochs: float) -> Iterator[GlobalBatch]:
        """Every global batch from batch `index` of `epoch` to the end of `num_epochs`."""
        per_epoch = self.plan.num_batches()
        for step in range(epoch * per_epoch + index, self.num_steps(num_epochs)):
            yield self.global_batch(*divmod(step, per_epoch))

    def global_batch(self, epoch: int, index: int) -> GlobalBatch:
        """This rank's part of one global batch."""
        sample_ids = self.plan.batch(epoch, index)
        per_epoch = self.steps_per_epoch
        return GlobalBatch(
            micro_batches=self._micro_batches(sample_ids, step_key(self.plan.seed, epoch * per_epoch + index)),
            global_targets=self.plan.global_targets(epoch, index),
            num_samples=len(sample_ids),
            num_tokens=int(self.plan.lengths[sample_ids].sum(dtype=np.int64)),
            epoch=epoch,
            index=index,
            sample_ids=sample_ids,
            after=Place(*divmod(epoch * per_epoch + index + 1, per_epoch)),
            epochs_done=(epoch * per_epoch + index + 1) / per_epoch,
        )

    def shares(self, sample_ids: np.ndarray) -> list[list[MicroPlan]]:
        """The samples of a global batch by rank and micro-batch: [rank][micro-batch]."""
        lengths, num_ranks, max_length = laid_lengths(self.store, self.packing), self.num_ranks, self.max_length
        if self.rows_per_micro:
            return share_rows(sample_ids, lengths, num_ranks, self.rows_per_micro, max_length=max_length)
        return share_batch(sample_ids, lengths, num_ranks, self.micro, packing=self.packing, max_length=max_length)

    def _micro_batches(self, sample_ids: np.ndarray, key: int) -> list[Batch]:
        own = self.shares(sample_ids)[self.rank]
        if self.rows_per_micro:
            shape = (self.rows_per_micro, self.max_length)
            micro_batches = [build_rows(self.store, micro, shape, self.pad_id, key) for micro in own]
        else:
            micro_batches = [build_batch(self.store, micro, self.packing, self.pad_id, key) for micro in own]
        return [micro.pinned() for micro in micro_batches] if self.pin_memory else micro_batches


def eval_batches(
    store: Samples,
    *,
    rank: int,
    num_ranks: int,
    micro: Amount,
    packing: bool,
    max_length: int,
    pad_id: int,
) -> Iterator[Batch]:
    """Every sample exactly once over all ranks, none added; equally many micro-batches on every rank."""
    for plan in eval_plans(store, rank, num_ranks, micro, packing=packing, max_length=max_length):
        yield build_batch(store, plan, packing, pad_id)


def eval_plans(
    store: Samples, rank: int, num_ranks: int, micro: Amount, *, packing: bool, max_length: int,
    some: np.ndarray | None = None,
) -> Iterator[MicroPlan]:  # fmt: skip
    """Which samples each of these micro-batches has; of `some` only, where not all are asked for."""
    # Like lengths together: rows of about one length need little padding.
    order = np.argsort(-store.lengths.astype(np.int64), kind="stable")
    order = order if some is None else order[np.isin(order, some)]
    step = num_ranks * _EVAL_SAMPLES_PER_RANK
    for at in range(0, len(order), step):
        lengths = laid_lengths(store, packing)
        shares = share_batch(order[at : at + step], lengths, num_ranks, micro, packing=packing, max_length=max_length)
        yield from shares[rank]


def laid_lengths(store: Samples, packing: bool) -> np.ndarray:
    """What each sample takes of a micro-batch's tokens."""
    if not isinstance(store, AnswerRows):
        return store.lengths
    return store.packed_lengths if packing else store.row_lengths


def build_batch(store: Samples, plan: MicroPlan, packing: bool, pad_id: int, key: int | None = None) -> Batch:
    """The tensors of one micro-batch; with the `key` of a training step, its tokens' keys."""
    own = _build_batch(store, plan, packing, pad_id, key)
    if not isinstance(store, LabeledRows):
        return own
    return replace(own, mismatched=_build_batch(store.mismatched, plan, packing, pad_id, None))


def _build_batch(store: Samples, plan: MicroPlan, packing: bool, pad_id: int, key: int | None) -> Batch:
    sample_ids = plan.sample_ids
    parts = [store.segments(index) for index in sample_ids]
    if not parts:
        return empty_batch(pad_id, packing=packing)
    lengths = [_count_tokens(segments) for segments in parts]
    if packing:
        packed = pack_segments([segment for segments in parts for segment in segments], len(sample_ids))
        packed = with_sides(packed, store, sample_ids)
        return packed if key is None else with_keys(packed, end_to_end(key, zip(sample_ids, lengths, strict=True)))
    if any(len(segments) > 1 for segments in parts) and not isinstance(store, AnswerRows):
        raise ValueError("rows that hold several documents need packing: padded rows have no boundaries")
    padded = replace(_padded([segment for segments in parts for segment in segments], pad_id), num_samples=len(parts))
    padded = with_sides(padded, store, sample_ids)
    if key is None:
        return padded
    keys = np.full(padded.input_ids.shape, PADDING_KEY, np.int64)
    rows = iter(keys)
    for sample, segments, length in zip(sample_ids, parts, lengths, strict=True):
        own, at = sample_keys(key, sample, length), 0
        for segment in segments:
            end = at + len(segment.input_ids)
            next(rows)[: end - at] = own[at:end]
            at = end
    return with_keys(padded, keys)


def with_sides(batch: Batch, store: Samples, sample_ids: Sequence[int | None]) -> Batch:
    """A batch of answers knows which document is whose; None stands for a document that fills a row."""
    if not isinstance(store, (AnswerRows, MismatchedRows)):
        return batch
    sides = [side for index in sample_ids for side in ([PADDING] if index is None else store.sides_of(index))]
    reference = None
    if store.reference is not None:
        known = [store.reference_of(index) if index is not None else np.zeros(1) for index in sample_ids]
        reference = torch.from_numpy(np.concatenate([np.zeros(0), *known]))
    margins = None
    if isinstance(store, AnswerRows) and store.margins is not None:
        margins = torch.from_numpy(store.margins[[index for index in sample_ids if index is not None]])
    return replace(batch, sides=torch.tensor(sides, dtype=torch.long), reference=reference, margins=margins)


def build_rows(store: Samples, plan: MicroPlan, shape: tuple[int, int], pad_id: int, key: int | None = None) -> Batch:
    """Rows of exactly `shape[1]` tokens, end to end as one packed row; a short one ends in a document of padding."""
    own = _build_rows(store, plan, shape, pad_id, key)
    if not isinstance(store, LabeledRows):
        return own
    return replace(own, mismatched=_build_rows(store.mismatched, plan, shape, pad_id, None))


def _build_rows(store: Samples, plan: MicroPlan, shape: tuple[int, int], pad_id: int, key: int | None) -> Batch:
    num_rows, row_tokens = shape
    segments: list[Sample] = []
    owners: list[tuple[int | None, int]] = []
    for row in (*plan.rows, *((),) * (num_rows - len(plan.rows))):
        free = row_tokens
        for index in row:
            own = store.segments(index)
            segments += own
            owners.append((index, _count_tokens(own)))
            free -= owners[-1][1]
        if free:
            segments.append(Sample(np.full(free, pad_id, np.int32), np.zeros(free, bool)))
            owners.append((None, free))
    num_tokens = sum(length for index, length in owners if index is not None)
    packed = replace(pack_segments(segments, len(plan.sample_ids)), num_tokens=num_tokens)
    packed = with_sides(packed, store, [index for index, _ in owners])
    return packed if key is None else with_keys(packed, end_to_end(key, owners))


def _count_tokens(segments: Sequence[Sample]) -> int:
    return sum(len(segment.input_ids) for segment in segments)


def with_keys(batch: Batch, keys: np.ndarray) -> Batch:
    """The batch of a training step, whose tokens have keys."""
    return replace(batch, token_keys=torch.from_numpy(keys).view(batch.input_ids.shape))


def pack_segments(samples: Sequence[Sample], num_samples: int) -> Batch:
    lengths = [len(sample.input_ids) for sample in samples]
    ids = np.concatenate([sample.input_ids for sample in samples]).astype(np.int64)
    labels = np.concatenate([shifted_labels(sample) for sample in samples])
    positions = np.concatenate([np.arange(length) for length in lengths])
    return Batch(
        input_ids=torch.from_numpy(ids)[None],
        labels=torch.from_numpy(labels)[None],
        position_ids=torch.from_numpy(positions)[None],
        boundaries=torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)),
        attention_mask=None,
        num_targets=int(np.count_nonzero(labels != IGNORED)),
        num_tokens=sum(lengths),
        num_samples=num_samples,
    )


def _padded(samples: Sequence[Sample], pad_id: int) -> Batch:
    lengths = [len(sample.input_ids) for sample in samples]
    shape = (len(samples), max(lengths))
    ids = np.full(shape, pad_id, np.int64)
    labels = np.full(shape, IGNORED, np.int64)
    for row, sample in enumerate(samples):
        ids[row, : lengths[row]] = sample.input_ids
        labels[row, : lengths[row]] = shifted_labels(sample)
    places = np.broadcast_to(np.arange(shape[1]), shape)
    is_real = places < np.array(lengths)[:, None]
    return Batch(
        input_ids=torch.from_numpy(ids),
        labels=torch.from_numpy(labels),
        position_ids=torch.from_numpy(np.where(is_real, places, 0)),  # padding is no part of a text, nor of its length
        boundaries=None,
        attention_mask=torch.from_numpy(is_real),
        num_targets=int(np.count_nonzero(labels != IGNORED)),
        num_tokens=sum(lengths),
        num_samples=len(samples),
    )


def shifted_labels(sample: Sample) -> np.ndarray:
    """Labels: the next token where that is a target, else IGNORED."""
    labels = np.full(len(sample.input_ids), IGNORED, np.int64)
    labels[:-1] = np.where(sample.is_target[1:], sample.input_ids[1:], IGNORED)
    return labels


def empty_batch(pad_id: int, *, packing: bool) -> Batch:
    """For a rank without samples: it still runs the model, since the collectives of the pass need every rank."""
    one = torch.zeros((1, 1), dtype=torch.long)
    return Batch(
        input_ids=torch.full_like(one, pad_id),
        labels=torch.full_like(one, IGNORED),
        position_ids=one,
        boundaries=torch.tensor([0, 1], dtype=torch.int32) if packing else None,
        # The one token may attend to itself: a fully masked row gives NaN in a softmax.
        attention_mask=None if packing else torch.ones((1, 1), dtype=torch.bool),
        num_targets=0,
        num_tokens=0,
        num_samples=0,
        token_keys=torch.full_like(one, PADDING_KEY),
    )
