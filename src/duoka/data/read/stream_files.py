"""Files that can only be read from their beginning: compressed ones, and tables of quoted cells (csv, tsv).

A piece of one is a run of its records. A process that reads piece after piece continues in its open stream, so
that each process unpacks the file once, however many pieces there are, and nothing is unpacked to disk.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import threading
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

from duoka.data.read.json_files import Element, holds_lines, parse_element, parse_json_line, walk_elements
from duoka.data.read.record import UTF8_BOM, FilePiece, Record, beginning, check_text
from duoka.errors import Fault
from duoka.runs.cache import file_version

PACKED = (".gz", ".zst")
_HEAD_BYTES = 1 << 16
_QUOTES = "put cells that hold a comma, a quote or a line break in double quotes, and write a quote in them twice"
_PACKED_DAMAGED = "the file was cut short or damaged on its way: copy it again"


def bare_suffix(path: Path) -> str:
    """The kind of a file by its name, without its packing: .jsonl of talk.jsonl.gz."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in PACKED else suffix


def open_bytes(path: Path) -> IO[bytes]:
    """The file's content, unpacked when its name ends in .gz or .zst."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return cast("IO[bytes]", gzip.open(path, "rb"))
    if suffix == ".zst":
        import pyarrow

        return cast("IO[bytes]", io.BufferedReader(_Raw(pyarrow.input_stream(str(path), compression="zstd"))))
    return path.open("rb")


class _Raw(io.RawIOBase):
    """Arrow's stream as Python's readers want it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()


def read_head(path: Path, count: int = _HEAD_BYTES) -> bytes | Fault:
    """The first bytes, unpacked; a Fault when that cannot be done."""
    try:
        with open_bytes(path) as file:
            return file.read(count)
    except (EOFError, zlib.error, OSError, ValueError) as error:
        return _cannot_unpack(path, error)


def _cannot_unpack(path: Path, error: Exception) -> Fault:
    reason = getattr(error, "strerror", None) or error
    packed = path.suffix.lower() in PACKED
    what = f"{path.name} cannot be unpacked ({reason})" if packed else f"{path} cannot be read: {reason}"
    return Fault(what, file=str(path), fix=_PACKED_DAMAGED if packed else "")


# ---------------------------------------------------------------------------------------------- pieces


def cut_stream(path: Path, piece_bytes: int) -> Iterator[FilePiece | Fault]:
    """Pieces of about `piece_bytes` of unpacked text."""
    start = count = size_bytes = 0
    line = 1
    for raw in _walk(path):
        if isinstance(raw, Fault) and _ends_stream(raw):
            if count > start:
                yield FilePiece(str(path), "stream", start, count, line, size_bytes)
            yield raw
            return
        if count == start:
            line = _line_of(raw)
        count += 1
        size_bytes += _size_of(raw)
        if size_bytes >= piece_bytes:
            yield FilePiece(str(path), "stream", start, count, line, size_bytes)
            start, size_bytes = count, 0
    if count > start:
        yield FilePiece(str(path), "stream", start, count, line, size_bytes)


_open = threading.local()


def read_stream(piece: FilePiece, max_record_bytes: int) -> Iterator[Record | Fault]:
    """The records of a piece, from where this thread's last piece of the same file ended when that is before it."""
    path = Path(piece.path)
    raws, at = _take_open(piece)
    for raw in itertools.islice(raws, piece.start - at, piece.end - at):
        yield _parse(path, raw, max_record_bytes)
    _open.kept = (piece.path, file_version(path), piece.end, raws)


def _take_open(piece: FilePiece) -> tuple[Iterator[Any], int]:
    kept = getattr(_open, "kept", None)
    _open.kept = None
    if kept is not None:
        path, version, at, raws = kept
        if path == piece.path and at <= piece.start and file_version(Path(path)) == version:
            return raws, at
        raws.close()
    return _walk(Path(piece.path)), 0


# ------------------------------------------------------------------------------------------------ raws
# A raw record is (line, bytes), an Element, (line, cells as an object), or a Fault.


def _walk(path: Path) -> Iterator[Any]:
    suffix = bare_suffix(path)
    try:
        with open_bytes(path) as file:
            if suffix in (".csv", ".tsv"):
                yield from _walk_cells(file, path, "\t" if suffix == ".tsv" else ",")
            elif suffix == ".json" and not _holds_lines(path):
                for element in walk_elements(file):
                    yield replace(element, file=str(path)) if isinstance(element, Fault) else element
            else:
                for number, line in enumerate(file, start=1):
                    stripped = (line.removeprefix(UTF8_BOM) if number == 1 else line).strip()
                    if stripped:
                        yield number, stripped
    except (EOFError, zlib.error, OSError, ValueError) as error:
        yield _cannot_unpack(path, error)


def _holds_lines(path: Path) -> bool:
    head = read_head(path)
    return isinstance(head, bytes) and holds_lines(head)


def _walk_cells(file: IO[bytes], path: Path, delimiter: str) -> Iterator[Any]:
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    csv.field_size_limit(1 << 30)  # sizes are checked with the record, with a message of our own
    rows = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        names = next(filter(None, rows), [])
    except csv.Error as error:
        yield Fault(f"the first line of {path.name} names no columns ({error})", file=str(path), line=1, fix=_QUOTES)
        return
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        yield Fault(f"two columns of {path.name} are named {doubled[0]!r}", file=str(path), line=1)
        return
    while True:
        line = rows.line_num + 1
        try:
            cells = next(rows)
        except StopIteration:
            return
        except csv.Error as error:  # as a quote that is never closed, which would take all rows behind it along
            yield Fault(f"the row has cells that cannot be read ({error})", file=str(path), line=line, fix=_QUOTES)
            continue
        if cells and len(cells) == len(names):
            yield line, {name: _cell(value) for name, value in zip(names, cells, strict=True)}
        elif cells:
            what = f"the row has {len(cells)} cells, and the first line names {len(names)} columns"
            shown = beginning(delimiter.join(cells))
            yield Fault(what, file=str(path), line=line, source=shown, fix=_QUOTES)


def _cell(value: str) -> Any:
    """A list of messages, or of [question, answer] pairs, arrives in a cell as JSON; any other cell is plain text."""
    if value.startswith("["):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            return value
        if isinstance(parsed, list) and parsed and all(map(_is_turn, parsed)):
            return parsed
    return value


def _is_turn(part: Any) -> bool:
    """Other lists are texts: answers may be JSON, and other columns are read where their names are known."""
    if isinstance(part, dict):
        return "role" in part or "from" in part
    return isinstance(part, list) and len(part) == 2 and all(isinstance(text, str) for text in part)


def _ends_stream(fault: Fault) -> bool:
    """True for faults of the file; a row's own fault is one record, and has the row's text."""
    return not fault.what.startswith("the row has")


def _line_of(raw: Any) -> int:
    if isinstance(raw, (Element, Fault)):
        return raw.line
    return int(raw[0])


def _size_of(raw: Any) -> int:
    if isinstance(raw, Element):
        return raw.end - raw.start
    if isinstance(raw, Fault):
        return len(raw.source)
    return len(raw[1]) if isinstance(raw[1], bytes) else sum(len(str(cell)) for cell in raw[1].values())


def _parse(path: Path, raw: Any, max_record_bytes: int) -> Record | Fault:
    if isinstance(raw, Fault):
        return raw
    if isinstance(raw, Element):
        return parse_element(str(path), raw, max_record_bytes)
    line, value = raw
    if isinstance(value, bytes):
        parse = parse_text_line if bare_suffix(path) == ".txt" else parse_json_line
        return parse(str(path), line, value, max_record_bytes)
    text = json.dumps(value, ensure_ascii=False)
    return check_text(text, str(path), line, max_record_bytes) or Record(value, line, beginning(text), str(path))


def parse_text_line(path: str, number: int, line: bytes, max_record_bytes: int) -> Record | Fault:
    """A line of a .txt file is a document."""
    text = line.decode("utf-8", "surrogateescape")
    fault = check_text(text, path, number, max_record_bytes)
    return fault or Record({"text": text}, number, beginning(text), path)
