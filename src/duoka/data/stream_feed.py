"""A config's stream of unread text, and the global batches that training walks through.

`StreamSource` is what `prepare` makes of `data.stream: true`: which files, how many virtual streams, what a row is.
`StreamFeed` is one rank's walk through it, built ahead by a thread. stream.py holds the streams themselves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import numpy as np

from duoka.config.schema import RunConfig
from duoka.data.encode import frame_text
from duoka.data.epoch_plan import ORDER_VERSION
from duoka.data.library import prefetched
from duoka.data.loader import Batch, GlobalBatch, Place, empty_batch, pack_segments
from duoka.data.registry import ResolvedSet
from duoka.data.stream import Cursor, Packing, StreamPlan, StreamRows, Unit, Usage, VirtualStream, find_units
from duoka.data.template import Sample
from duoka.data.tokenizer import ChatTokenizer
from duoka.errors import ConfigError
from duoka.units import Amount, format_bytes, parse_amount

_MOST_STREAMS = 64  # each keeps a row group's text in memory
_STEPS_AHEAD = 2


@dataclass(frozen=True)
class StreamSource:
    """Text that is read and tokenised while it is learned: where a TokenStore stands for other data."""

    files: tuple[Path, ...]
    plan: StreamPlan
    packing: Packing
    rows_per_stream: int
    tokenizer_fingerprint: str

    @property
    def rows_per_step(self) -> int:
        return self.plan.num_streams * self.rows_per_stream

    @property
    def fingerprint(self) -> str:
        """Of the order: files by name, size and shape (reading all of them for a hash would take as long as an epoch),
        the tokenizer, and how rows are made and handed out."""
        units = [[Path(u.file).name, u.group, u.start, u.end, u.column] for u in self.plan.units]
        sizes = [path.stat().st_size for path in self.files]
        facts = [
            ORDER_VERSION, units, sizes, self.plan.num_streams, self.plan.seed, self.rows_per_stream,
            self.packing.row_tokens, self.tokenizer_fingerprint,
        ]  # fmt: skip
        return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()

    def sentence(self) -> str:
        groups = len({(unit.file, unit.group) for unit in self.plan.units})
        documents = sum(unit.end - unit.start for unit in self.plan.units)
        size = format_bytes(sum(path.stat().st_size for path in self.files))
        return (
            f"{documents:,} documents in {groups:,} row groups of {len(self.files):,} files ({size}), read while they "
            f"are learned by {self.plan.num_streams} streams; {self.rows_per_step:,} rows of "
            f"{self.packing.row_tokens:,} tokens per step"
        )

    def check_world(self, num_ranks: int) -> None:
        """Refuse a world in which ranks would have no stream to read."""
        if num_ranks > self.plan.num_streams:
            what = f"{num_ranks} processes are asked for, and {self.plan.num_streams} streams feed them"
            fix = f"set data.streams: {num_ranks} (it must divide the rows of a global batch, {self.rows_per_step})"
            raise ConfigError(what, where="a process without a stream would only wait", fix=fix)

    def first_row(self, number: int) -> list[Sample]:
        """What a stream gives first, to be looked at."""
        return VirtualStream(self.plan, number % self.plan.num_streams, self.packing).row()


def build_source(sets: Sequence[ResolvedSet], config: RunConfig, tokenizer: ChatTokenizer) -> StreamSource:
    """The stream of a config's training sets. Raises DataError or ConfigError."""
    units = [unit for found in sets for unit in find_units(found.files, found.form.columns["text"])]
    row_tokens = config.data.max_length
    rows = rows_per_batch(parse_amount(config.train.global_batch), row_tokens)
    num_streams = _count_streams(rows, config.data.streams, units)

    def tokenise(texts: list[str]) -> list[list[int]]:
        # In one call, because it lets other threads work meanwhile: the one that trains.
        encodings = tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False)
        skip = int(tokenizer.bos_id is not None)  # the stream writes it itself
        return [
            frame_text(encoding.ids, tokenizer)[skip:] if text.strip() else []
            for text, encoding in zip(texts, encodings, strict=True)
        ]

    return StreamSource(
        files=tuple(path for found in sets for path in found.files),
        plan=StreamPlan(units, num_streams=num_streams, seed=config.train.seed),
        packing=Packing(row_tokens, tokenise, tokenizer.bos_id),
        rows_per_stream=rows // num_streams,
        tokenizer_fingerprint=tokenizer.fingerprint,
    )


def rows_per_batch(batch: Amount, row_tokens: int) -> int:
    """Rows of a global batch; of one in tokens, the nearest number."""
    return batch.count if batch.unit == "samples" else max(1, round(batch.count / row_tokens))


def _count_streams(rows: int, asked: int | None, units: Sequence[Unit]) -> int:
    """As many streams as the batch's rows and the documents allow; a function of the config and the files alone."""
    if asked is None:
        most = min(_MOST_STREAMS, sum(unit.end - unit.start for unit in units), rows)
        return max((count for count in range(1, most + 1) if rows % count == 0), default=1)
    if rows % asked:
        what = f"data.streams is {asked}, and the {rows} rows of a global batch cannot be shared equally by so many"
        raise ConfigError(what, fix="make it a divisor, or leave it out")
    return asked


@dataclass(frozen=True)
class _Ahead:
    """A step of this rank, made before it is asked for."""

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
    ) -> None:
        self.source = source
        self.rank = rank
        self.num_ranks = num_ranks
        self.pad_id = pad_id
        self.sum_over_ranks = sum_over_ranks
        self.rows_per_micro = rows_per_batch(micro, source.packing.row_tokens)
        self.usage = Usage()

    def num_steps(self, num_epochs: float) -> int | None:
        return None

    def summary(self) -> str:
        return self.usage.line()

    def batches(self, place: Place, num_epochs: float) -> Iterator[GlobalBatch]:
        """Without an end: streams flow from epoch to epoch, and train.max_steps ends the run."""
        for step, ahead in enumerate(prefetched(self._walk(place), _STEPS_AHEAD), start=place.index):
            yield self._global_batch(step, ahead)

    def _walk(self, place: Place) -> Iterator[_Ahead]:
        source = self.source
        rows = StreamRows(
            source.plan, source.packing, rank=self.rank, num_ranks=self.num_ranks,
            rows_per_stream=source.rows_per_stream,
        )  # fmt: skip
        if place.streams:
            rows.go_to({number: Cursor(*cursor) for number, cursor in enumerate(place.streams)})
        while True:
            step = rows.step()
            cursors = {number: stream.cursor for number, stream in rows.streams.items()}
            groups = [step[at : at + self.rows_per_micro] for at in range(0, len(step), self.rows_per_micro)]
            micro_batches = [self._micro_batch(group) for group in groups]
            yield _Ahead(micro_batches, cursors, astuple(rows.usage()), sum(map(bool, step)))

    def _micro_batch(self, rows: Sequence[Sequence[Sample]]) -> Batch:
        segments = [segment for row in rows for segment in row]
        return pack_segments(segments, sum(map(bool, rows))) if segments else empty_batch(self.pad_id, packing=True)

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
        """By row groups begun, as the mean over streams."""
        plan = self.source.plan
        units = np.array([len(range(n, len(plan.units), plan.num_streams)) for n in range(plan.num_streams)])
        return float(np.mean(cursors[:, 0] + cursors[:, 1] / units))
