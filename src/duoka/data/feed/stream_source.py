"""A config's text that is read while training: which files, how many streams read them, what a row is.

`prepare` makes a `StreamSource` for `data.stream: true`; stream_feed.py iterates over it. No torch here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from duoka.config.schema import RunConfig
from duoka.data.feed.epoch_plan import ORDER_VERSION
from duoka.data.feed.row_packer import Packing, StreamPlan, Unit, VirtualStream, find_units
from duoka.data.read.registry import ResolvedSet
from duoka.data.tokens.encode import frame_text
from duoka.data.tokens.template import Sample
from duoka.data.tokens.tokenizer import ChatTokenizer
from duoka.errors import ConfigError
from duoka.units import Amount, format_bytes, parse_amount

_MOST_STREAMS = 64  # each keeps a row group's text in memory
_FRAMED = "/ends"  # documents end in the token that begins them: they were without an end in earlier versions


@dataclass(frozen=True)
class StreamSource:
    """Text that is read and tokenized during training; takes the place that a TokenStore has for other data."""

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

    @property
    def num_documents(self) -> int:
        return sum(unit.end - unit.start for unit in self.plan.units)

    def sentence(self) -> str:
        groups = len({(unit.file, unit.group) for unit in self.plan.units})
        size = format_bytes(sum(path.stat().st_size for path in self.files))
        rows = f"{self.plan.num_streams} streams, {self.rows_per_step:,} rows of {self.packing.row_tokens:,} a step"
        return f"{self.num_documents:,} documents in {groups:,} row groups ({size}), read while learned; {rows}"

    def check_world(self, num_ranks: int) -> None:
        """Refuse a world in which ranks would have no stream to read."""
        if num_ranks > self.plan.num_streams:
            what = f"{num_ranks} processes are asked for, and {self.plan.num_streams} streams feed them"
            fix = f"set data.streams: {num_ranks}"
            if self.rows_per_step % num_ranks:
                fix += f", and train.global_batch to a multiple of that many rows (now {self.rows_per_step})"
            raise ConfigError(what, where="a process without a stream would only wait", fix=fix)

    def first_row(self, number: int) -> list[Sample]:
        """A stream's first row, to be shown."""
        return VirtualStream(self.plan, number % self.plan.num_streams, self.packing).row()


def build_source(sets: Sequence[ResolvedSet], config: RunConfig, tokenizer: ChatTokenizer) -> StreamSource:
    """The stream of a config's training sets. Raises DataError or ConfigError."""
    units = [unit for found in sets for unit in find_units(found.files, found.form.columns["text"])]
    row_tokens = config.data.max_length
    rows = rows_per_batch(parse_amount(config.train.global_batch), row_tokens)
    num_streams = _count_streams(rows, config.data.streams, units)

    is_one = tokenizer.bos_id is not None and tokenizer.bos_id == tokenizer.eos_id

    def tokenize(texts: list[str]) -> list[list[int]]:
        # In one call, because it releases the GIL meanwhile, for the training thread.
        encodings = tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False)
        skip = int(tokenizer.bos_id is not None)  # the stream writes it itself
        return [
            frame_text(encoding.ids, tokenizer)[skip:] if text.strip() else []
            for text, encoding in zip(texts, encodings, strict=True)
        ]

    return StreamSource(
        files=tuple(path for found in sets for path in found.files),
        plan=StreamPlan(units, num_streams=num_streams, seed=config.train.seed),
        packing=Packing(row_tokens, tokenize, tokenizer.bos_id),
        rows_per_stream=rows // num_streams,
        tokenizer_fingerprint=tokenizer.fingerprint + _FRAMED * is_one,
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
