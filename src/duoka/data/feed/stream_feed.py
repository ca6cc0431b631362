"""Global batches of text that is read while training: one rank's dataloader over a StreamSource, prefetched.

build_feed.py makes a `StreamFeed`, and the training loop iterates over it. row_packer.py holds the streams.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np

from duoka.data.feed.ahead import prefetched
from duoka.data.feed.loader import Batch, GlobalBatch, Place, empty_batch, pack_segments, with_keys
from duoka.data.feed.row_packer import Cursor, StreamRows, Usage
from duoka.data.feed.stream_source import StreamSource, rows_per_batch
from duoka.data.feed.token_keys import end_to_end, step_key
from duoka.data.tokens.template import Sample
from duoka.units import Amount

_STEPS_AHEAD = 2


@dataclass(frozen=True)
class _Ahead:
    """A prefetched step of this rank."""

    micro_batches: list[Batch]
    cursors: dict[int, Cursor]
    usage: tuple[int, ...]
    num_rows: int


class StreamFeed:
    """One rank's part of each global batch. `sum_over_ranks` is called once a step, by all ranks together: how many
    targets a row holds is known only to the rank that read it."""

    steps_per_epoch: int | None = None

    def __init__(
        self,
        source: StreamSource,
        *,
        rank: int,
        num_ranks: int,
        micro: Amount,
        pad_id: int,
        sum_over_ranks: Callable[[list[float]], list[float]],
        pin_memory: bool = False,
    ) -> None:
        self.source = source
        self.rank = rank
        self.num_ranks = num_ranks
        self.pad_id = pad_id
        self.pin_memory = pin_memory
        self.sum_over_ranks = sum_over_ranks
        self.rows_per_micro = rows_per_batch(micro, source.packing.row_tokens)
        self.usage = Usage()

    def num_steps(self, num_epochs: float) -> int | None:
        return None

    def num_samples_between(self, start: int, end: int) -> int:
        return (end - start) * self.source.rows_per_step

    def summary(self) -> str:
        return self.usage.line()

    def batches(self, place: Place, num_epochs: float) -> Generator[GlobalBatch]:
        """Endless: streams continue from epoch to epoch, and train.max_steps ends the run."""
        with contextlib.closing(prefetched(self._walk(place), _STEPS_AHEAD)) as walk:
            for step, ahead in enumerate(walk, start=place.index):
                yield self._global_batch(step, ahead)

    def _walk(self, place: Place) -> Iterator[_Ahead]:
        source = self.source
        rows = StreamRows(
            source.plan, source.packing, rank=self.rank, num_ranks=self.num_ranks,
            rows_per_stream=source.rows_per_stream,
        )  # fmt: skip
        if place.streams:
            rows.go_to({number: Cursor(*cursor) for number, cursor in enumerate(place.streams)})
        per_stream = source.rows_per_stream
        numbers = [stream * per_stream + row for stream in rows.streams for row in range(per_stream)]
        for step_index in itertools.count(place.index):
            step = rows.step()
            cursors = {number: stream.cursor for number, stream in rows.streams.items()}
            # A row's number in the step, whatever rank reads it; the empty ones at the end need none.
            numbered = list(zip(step, itertools.chain(numbers, itertools.repeat(0)), strict=False))
            groups = [numbered[at : at + self.rows_per_micro] for at in range(0, len(step), self.rows_per_micro)]
            key = step_key(source.plan.seed, step_index)
            micro_batches = [self._micro_batch(group, key) for group in groups]
            yield _Ahead(micro_batches, cursors, astuple(rows.usage()), sum(map(bool, step)))

    def _micro_batch(self, rows: Sequence[tuple[Sequence[Sample], int]], key: int) -> Batch:
        segments = [segment for row, _ in rows for segment in row]
        packed = empty_batch(self.pad_id, packing=True)
        if segments:
            owners = [(number, sum(len(one.input_ids) for one in row)) for row, number in rows]
            packed = with_keys(pack_segments(segments, sum(bool(row) for row, _ in rows)), end_to_end(key, owners))
        return packed.pinned() if self.pin_memory else packed

    def _global_batch(self, step: int, ahead: _Ahead) -> GlobalBatch:
        num_streams = self.source.plan.num_streams
        facts: list[float] = [
            sum(micro.num_targets for micro in ahead.micro_batches),
            sum(micro.num_tokens for micro in ahead.micro_batches),
            ahead.num_rows,
        ]
        places = np.zeros((num_streams, len(fields(Cursor))))
        for number, cursor in ahead.cursors.items():
            places[number] = astuple(cursor)
        # A stream belongs to one rank and is zero on the others: the sum is every stream's cursor, on every rank.
        summed = [int(value) for value in self.sum_over_ranks([*facts, *ahead.usage, *places.ravel().tolist()])]
        num_targets, num_tokens, num_rows = summed[: len(facts)]
        self.usage = Usage(*summed[len(facts) : len(facts) + len(ahead.usage)])
        cursors = np.array(summed[-places.size :], np.int64).reshape(places.shape)
        after = Place(int(cursors[:, 0].min()), step + 1, tuple(tuple(map(int, cursor)) for cursor in cursors))
        rows_per_step = self.source.rows_per_step
        return GlobalBatch(
            micro_batches=ahead.micro_batches,
            global_targets=num_targets,
            num_samples=num_rows,
            num_tokens=num_tokens,
            epoch=after.epoch,
            index=step,
            sample_ids=np.arange(step * rows_per_step, (step + 1) * rows_per_step),
            after=after,
            epochs_done=self._epochs_done(cursors),
        )

    def _epochs_done(self, cursors: np.ndarray) -> float:
        """By documents begun, as the mean over streams."""
        plan = self.source.plan
        units = np.array([len(range(n, len(plan.units), plan.num_streams)) for n in range(plan.num_streams)])
        in_unit = np.minimum(1.0, cursors[:, 2] * len(plan.units) / self.source.num_documents)
        return float(np.mean(cursors[:, 0] + (cursors[:, 1] + in_unit) / units))
