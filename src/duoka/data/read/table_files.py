"""Parquet files: pieces are runs of row groups, records are rows.

Known by records.py for fine-tuning data; data/feed/row_packer.py reads row groups of pretraining text by itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from duoka.data.read.record import FilePiece, Record, beginning, check_text
from duoka.errors import Fault

_ROWS_AT_ONCE = 256


def check_parquet(path: Path) -> Fault | None:
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            if file.metadata.num_rows == 0:
                return Fault(f"{path.name} has no rows", file=str(path))
    except (ValueError, OSError) as error:
        reason = str(error).splitlines()[0]
        return Fault(f"{path.name} is no whole Parquet file ({reason})", file=str(path), fix="copy it again")
    return None


def cut_rows(path: Path, piece_bytes: int) -> Iterator[FilePiece | Fault]:
    import pyarrow.parquet as pq

    start, size_bytes, row, first_row = 0, 0, 1, 1
    with pq.ParquetFile(path) as file:
        groups = [file.metadata.row_group(index) for index in range(file.num_row_groups)]
        facts = [(group.num_rows, group.total_byte_size) for group in groups]
    for index, (num_rows, group_bytes) in enumerate(facts):
        size_bytes += group_bytes
        row += num_rows
        if size_bytes >= piece_bytes or index == len(facts) - 1:
            yield FilePiece(str(path), "rows", start, index + 1, first_row, size_bytes)
            start, size_bytes, first_row = index + 1, 0, row


def read_rows(piece: FilePiece, max_record_bytes: int) -> Iterator[Record | Fault]:
    import pyarrow.parquet as pq

    row = piece.line
    with pq.ParquetFile(piece.path) as file:
        try:
            for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=list(range(piece.start, piece.end))):
                for value in batch.to_pylist():
                    yield _record(value, f"{piece.path}, row {row}", max_record_bytes)
                    row += 1
        except (ValueError, OSError) as error:
            reason = str(error).splitlines()[0]
            what = f"the rows from here on cannot be read ({reason})"
            yield Fault(what, file=f"{piece.path}, row {row}", fix="copy or write the file again")


def _record(value: dict[str, object], where: str, max_record_bytes: int) -> Record | Fault:
    value = {name: _without_gaps(column, 0) for name, column in value.items()}
    text = json.dumps(value, ensure_ascii=False, default=str)
    return check_text(text, where, 0, max_record_bytes) or Record(value, 0, beginning(text), where)


def _without_gaps(value: Any, depth: int) -> Any:
    """Nested cells without the nulls of a column's schema: it gives every tool call the arguments of all others.

    What stands in a message itself keeps them, so that an empty `content` is said to be one.
    """
    if isinstance(value, list):
        return [_without_gaps(part, depth) for part in value]
    if isinstance(value, dict):
        inner = {name: _without_gaps(part, depth + 1) for name, part in value.items()}
        return inner if depth == 0 else {name: part for name, part in inner.items() if part is not None}
    return value
