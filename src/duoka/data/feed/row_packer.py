"""Pretraining text too large to index: Parquet row groups, read once per epoch, in an order that no rank decides.

V virtual streams share the row groups; a rank serves every num_ranks-th of them, and a stream's place is one cursor.
V does not depend on the world size, so the rows of step s are the same on 1 rank or 64, and so is going on. Every
token of every document is used: the rest that does not fit into a row begins a later one, after a begin token of its
own, or after the token before it where the tokenizer has none. stream_feed.py makes global batches of the rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from duoka.data.feed.epoch_plan import shuffled
from duoka.data.tokens.template import Sample
from duoka.errors import ConfigError, DataError

Tokenize = Callable[[list[str]], list[list[int]]]
_DOCUMENTS_AT_ONCE = 64
_BARE_EPOCHS = 8


@dataclass(frozen=True)
class Unit:
    """A run of documents inside one row group: rows [start, end) of a column of texts."""

    file: str
    group: int
    start: int
    end: int
    column: str = "text"


@dataclass(frozen=True)
class Cursor:
    """A stream's place: the next token that it gives. `unit` and `document` count those of the stream's epoch."""

    epoch: int = 0
    unit: int = 0
    document: int = 0
    token: int = 0


@dataclass
class Usage:
    """Counts of the tokens that were read."""

    num_tokens: int = 0  # of documents
    num_begins: int = 0  # begin tokens, of documents and of their later parts
    num_cut: int = 0  # documents that go on in a later row
    num_padding: int = 0
    num_empty: int = 0  # documents without text
    num_discarded: int = 0  # always 0: no token is lost; reported since other packers discard a third

    def line(self) -> str:
        total = max(1, self.num_tokens + self.num_begins + self.num_padding)
        parts = [
            f"{self.num_tokens:,} tokens of text, {self.num_discarded} discarded",
            f"{self.num_cut:,} documents go on in a later row",
        ]
        more = ((self.num_begins, "begin tokens"), (self.num_padding, "padding"))
        parts += [f"{words} {count / total:.1%} of all" for count, words in more if count]
        return "; ".join([*parts, *([f"{self.num_empty:,} documents without text"] if self.num_empty else [])])


def find_units(files: Sequence[Path], column: str = "text") -> list[Unit]:
    """Every row group of the files, from their footers alone."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    units = []
    for path in files:
        try:
            with pq.ParquetFile(path) as file:
                schema = file.schema_arrow
                sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        except (ValueError, OSError) as error:
            raise DataError(f"{path} is no whole Parquet file", where=str(error), fix="copy it again") from None
        if column not in schema.names:
            raise DataError(f"{path} has no column {column!r}", fix=f"it has: {', '.join(schema.names)}")
        kind = schema.field(column).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind  # as pandas' categories
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise DataError(f"column {column!r} of {path} holds {kind}, and must hold text")
        units += [Unit(str(path), group, 0, size, column) for group, size in enumerate(sizes) if size]
    return units


class StreamPlan:
    """Which stream reads which units in which epoch: a pure function of the files, V and the seed."""

    def __init__(self, units: Sequence[Unit], *, num_streams: int, seed: int) -> None:
        self.num_streams = num_streams
        self.seed = seed
        # With fewer row groups than streams, several streams share one: all have data, no document is read twice.
        parts = -(-num_streams // max(1, len(units)))
        self.units = [cut for unit in units for cut in _cut_unit(unit, parts)]
        largest = max((unit.end - unit.start for unit in units), default=0)
        while len(self.units) < num_streams and parts < largest:  # small groups give fewer parts than large ones
            parts += 1
            self.units = [cut for unit in units for cut in _cut_unit(unit, parts)]
        if len(self.units) < num_streams:
            raise DataError(
                f"{len(self.units)} documents cannot feed {num_streams} streams",
                fix=f"use at most {len(self.units)} streams, or add data",
            )

    def units_of(self, stream: int, epoch: int) -> list[Unit]:
        order = shuffled(len(self.units), f"stream/{self.seed}/{epoch}")
        return [self.units[int(place)] for place in order[stream :: self.num_streams]]


def _cut_unit(unit: Unit, parts: int) -> Iterator[Unit]:
    borders = [unit.start + (unit.end - unit.start) * part // parts for part in range(parts + 1)]
    for start, end in itertools.pairwise(borders):
        if start < end:
            yield replace(unit, start=start, end=end)


@dataclass(frozen=True)
class Packing:
    """How documents become rows."""

    row_tokens: int
    tokenize: Tokenize
    begin_id: int | None  # stands before every document, and before every later part of one


@dataclass
class VirtualStream:
    """Rows of one stream, from its cursor on, epoch after epoch without an end."""

    plan: StreamPlan
    number: int
    packing: Packing
    cursor: Cursor = Cursor()
    usage: Usage = field(default_factory=Usage)
    _documents: Iterator[tuple[Cursor, list[int]]] | None = None
    _open: tuple[Cursor, list[int]] | None = None  # the place in a document that was begun, and all of its tokens

    def row(self, *, only_epoch: int | None = None) -> list[Sample]:
        """The next row as documents end to end, `row_tokens` together. With `only_epoch`, that epoch's last row is
        shorter, and empty rows follow it."""
        segments: list[Sample] = []
        room = self.packing.row_tokens
        while room:
            place, tokens = self._open = self._open or self._next_document()
            if only_epoch is not None and place.epoch != only_epoch:
                break
            at = place.token
            lead = self._lead(tokens, at)
            taken = tokens[at : at + room - len(lead)]
            if at + len(taken) < len(tokens) and room <= len(lead):
                # Too little room for any text: the begin token stands alone, and is never a target.
                segments.append(_segment(lead[:room]))
                self.usage.num_begins += room
                break
            segments.append(_segment(lead + taken))
            room -= len(lead) + len(taken)
            self.usage.num_tokens += len(taken)
            self.usage.num_begins += len(lead)
            is_cut = at + len(taken) < len(tokens)
            self.usage.num_cut += is_cut
            self._open = (replace(place, token=at + len(taken)), tokens) if is_cut else None
        if segments:
            self.cursor = self._open[0] if self._open else replace(self._after)
        return segments

    def _lead(self, tokens: list[int], at: int) -> list[int]:
        """The token before a document or a later part of it, so that its first token has a context."""
        if self.packing.begin_id is not None:
            return [self.packing.begin_id]
        return tokens[at - 1 : at] if at else []

    def _next_document(self) -> tuple[Cursor, list[int]]:
        if self._documents is None:
            self._documents = self._read(self.cursor)
        return next(self._documents)

    def _read(self, start: Cursor) -> Iterator[tuple[Cursor, list[int]]]:
        """(place, tokens) of documents from a place on. `_after` is the place behind the last one given."""
        epoch, first_unit = start.epoch, start.unit
        num_bare = 0  # units in a row without any text
        while True:
            for index, unit in enumerate(self.plan.units_of(self.number, epoch)[first_unit:], start=first_unit):
                place = Cursor(epoch, index)
                skip = start.document if (epoch, index) == (start.epoch, start.unit) else 0
                num_bare += 1
                for document, tokens in self.read_unit(unit, skip):
                    is_first = (epoch, index, document) == (start.epoch, start.unit, start.document)
                    token = start.token if is_first else 0
                    self._after = replace(place, document=document + 1)
                    num_bare = 0 if tokens else num_bare
                    if len(tokens) > token:
                        yield replace(place, document=document, token=token), tokens
                    else:
                        self.usage.num_empty += not tokens
            if num_bare > _BARE_EPOCHS * len(self.plan.units):  # its units are others in each epoch
                what = f"stream {self.number} found no text in {num_bare} row groups or parts of them"
                raise DataError(what, fix="look at the files' texts: their documents are empty")
            epoch, first_unit = epoch + 1, 0
            self._after = Cursor(epoch)
            start = Cursor(epoch)

    def read_unit(self, unit: Unit, skip: int) -> Iterator[tuple[int, list[int]]]:
        # Arrow keeps a group's text once, and packed; Python gets a few documents at a time.
        texts = _read_texts(unit)
        for at in range(skip, len(texts), _DOCUMENTS_AT_ONCE):
            some = [text or "" for text in texts.slice(at, _DOCUMENTS_AT_ONCE).to_pylist()]
            yield from enumerate(self.packing.tokenize(some), start=at)

    _after: Cursor = Cursor()


def _segment(ids: list[int]) -> Sample:
    return Sample(np.asarray(ids, np.int32), np.ones(len(ids), bool))


def _read_texts(unit: Unit) -> Any:
    """The texts of a unit as Arrow's column."""
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(unit.file) as file:
            values = file.read_row_group(unit.group, columns=[unit.column]).column(unit.column)
    except (ValueError, OSError, KeyError) as error:
        raise DataError(f"row group {unit.group} of {unit.file} cannot be read", where=str(error)) from None
    return values.slice(unit.start, unit.end - unit.start)


class StreamRows:
    """One rank's streams: the rows of each step, in the order of stream numbers, and their cursors."""

    def __init__(
        self, plan: StreamPlan, packing: Packing, *, rank: int, num_ranks: int, rows_per_stream: int = 1
    ) -> None:
        if not 0 <= rank < num_ranks:
            raise ConfigError(f"rank {rank} of {num_ranks} cannot be")
        self.plan = plan
        self.packing = packing
        self.rows_per_stream = rows_per_stream
        # Equally many on every rank, so that none waits for another; a missing one gives empty rows.
        self.places_per_rank = -(-plan.num_streams // num_ranks)
        numbers = range(rank, plan.num_streams, num_ranks)
        self.streams = {number: VirtualStream(plan, number, packing) for number in numbers}

    def step(self) -> list[list[Sample]]:
        """This rank's rows of the next step: always as many, empty where it has no stream."""
        rows = [stream.row() for stream in self.streams.values() for _ in range(self.rows_per_stream)]
        return rows + [[]] * (self.places_per_rank * self.rows_per_stream - len(rows))

    def rest_of_epoch(self, any_left: Callable[[bool], bool] = lambda mine: mine) -> Iterator[list[list[Sample]]]:
        """Steps to the end of the epoch. `any_left` answers for all ranks, so that all make equally many steps."""
        epoch = min((stream.cursor.epoch for stream in self.streams.values()), default=0)
        while True:
            rows = [
                stream.row(only_epoch=epoch) for stream in self.streams.values() for _ in range(self.rows_per_stream)
            ]
            if not any_left(any(rows)):
                return
            yield rows + [[]] * (self.places_per_rank * self.rows_per_stream - len(rows))

    def usage(self) -> Usage:
        total = Usage()
        for stream in self.streams.values():
            for name, value in asdict(stream.usage).items():
                setattr(total, name, getattr(total, name) + value)
        return total

    def state_dict(self) -> dict[str, Any]:
        """The cursors of this rank's streams; `merge_states` joins those of all ranks."""
        cursors = {str(number): asdict(stream.cursor) for number, stream in self.streams.items()}
        facts = {"num_streams": self.plan.num_streams, "seed": self.plan.seed, "num_units": len(self.plan.units)}
        return {**facts, "cursors": cursors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from merged cursors, on any number of ranks."""
        here = self.state_dict()
        for name in ("num_streams", "seed", "num_units"):
            if state[name] != here[name]:
                what = f"the saved place belongs to other streams: {name} is {state[name]}, here it is {here[name]}"
                raise ConfigError(what)
        self.go_to({int(number): Cursor(**cursor) for number, cursor in state["cursors"].items()})

    def go_to(self, cursors: Mapping[int, Cursor]) -> None:
        """Put every stream of this rank to its place."""
        for number in self.streams:
            self.streams[number] = VirtualStream(self.plan, number, self.packing, cursors[number])


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One state of what all ranks saved."""
    cursors = {number: cursor for state in states for number, cursor in state["cursors"].items()}
    return {**states[0], "cursors": cursors}
