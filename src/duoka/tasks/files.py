"""Files of published tasks: records of JSON lines (also gzip), Parquet and CSV, found in a folder by their split."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from duoka.errors import DataError

_TEXT = "utf-8-sig"  # with or without the mark that Windows' programs begin a file with
_KINDS = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".csv")


def find_files(place: Path, words: Sequence[str]) -> list[Path]:
    """Files whose name, or a folder between `place` and them, has one of `words` in it."""
    found = [path for path in sorted(place.rglob("*")) if path.is_file() and path.name.lower().endswith(_KINDS)]
    return [path for path in found if set(words) & set(words_of(path.relative_to(place)))]


def words_of(path: Path) -> list[str]:
    """`test`, `test-00000-of-00001`, `arc-easy-test`: all are read as parts between - and _ ."""
    return [part for name in path.parts for part in name.lower().replace("_", "-").replace(".", "-").split("-")]


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Raises DataError, with file and line."""
    name = path.name.lower()
    if name.endswith(".parquet"):
        import pyarrow.parquet as pq

        yield from pq.read_table(path).to_pylist()
        return
    if name.endswith(".csv"):
        with path.open(encoding=_TEXT, newline="") as rows:
            for row in filter(None, csv.reader(rows)):  # spreadsheets end with a blank line
                yield {"row": row}
        return
    try:
        with gzip.open(path, "rt", encoding=_TEXT) if name.endswith(".gz") else path.open(encoding=_TEXT) as file:
            if name.endswith(".json"):
                yield from json.load(file)
                return
            yield from _read_lines(path, file)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} cannot be unpacked ({error})", fix="it was cut short: copy it again") from None


def _read_lines(path: Path, file: Iterable[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise DataError(f"{path} is no JSON lines: {error}", where=f"line {number}") from None


def wrong_record(task: str, path: Path, error: Exception) -> DataError:
    return DataError(
        f"{path} is not in the format that task {task} is published in: {type(error).__name__} {error}",
        fix="docs/tasks.md says which fields it has",
    )
