"""Files of records: how a .json or .jsonl file is cut into pieces that processes can read by themselves.

`registry` peeks at files through it, `prepare` hands its pieces to workers. It knows JSON and lines, not what a
record means (see formats.py). A new kind of file is a row in `KINDS`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from duoka.errors import Fault

MAX_RECORD_BYTES = 1 << 20
SHOWN_CHARACTERS = 100
KINDS = (".json", ".jsonl")
_LATER = (".parquet", ".csv", ".txt", ".gz", ".zst", ".arrow", ".tsv")
_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_BETWEEN = re.compile(r"[\s,]*")
_ONE_PER_LINE = "a .jsonl file holds one whole JSON object a line; a .json file holds [ {...}, {...} ]"


@dataclass(frozen=True)
class Piece:
    """A run of whole records in a file: bytes [start, end), of which the first stands on `line`."""

    path: str
    kind: Literal["lines", "elements"]
    start: int
    end: int
    line: int


@dataclass(frozen=True)
class Record:
    """One parsed record. `text` is its beginning as it stands in the file."""

    value: Any
    line: int
    text: str


def check_file(path: Path) -> Fault | None:
    """The fault of a file that cannot be read as records at all, or None."""
    suffix = path.suffix.lower()
    if suffix not in KINDS:
        also = "; this kind comes later" if suffix in _LATER else ""
        return Fault(
            f"duoka reads {' and '.join(KINDS)} files, and {path.name!r} is neither{also}",
            file=str(path),
            fix="convert it, for example: pandas.read_parquet(...).to_json('data.jsonl', orient='records', "
            "lines=True, force_ascii=False)",
        )
    try:
        with path.open("rb") as file:
            head = file.read(4)
    except OSError as error:
        return Fault(f"{path} cannot be read: {error.strerror or error}", file=str(path))
    if head[:2] in _UTF16_BOMS:
        fix = f"write it as UTF-8: iconv -f UTF-16 -t UTF-8 {path.name} > new{suffix}"
        return Fault(f"{path.name} is UTF-16, and data must be UTF-8", file=str(path), fix=fix)
    if not head:
        return Fault(f"{path.name} is empty", file=str(path))
    return None


def find_pieces(path: Path, piece_bytes: int) -> list[Piece | Fault]:
    """Cut a file into pieces of about `piece_bytes`, at record boundaries. A Fault stands for what has none."""
    with path.open("rb") as file:
        head = file.read(1 << 16)
    skipped = len(_UTF8_BOM) if head.startswith(_UTF8_BOM) else 0
    body = head[skipped:].lstrip()
    is_lines = path.suffix.lower() == ".jsonl" or _first_line_is_whole(head[skipped:])
    if body.startswith(b"[") or not is_lines:
        return _cut_elements(path, piece_bytes)
    return list(_cut_lines(path, skipped, piece_bytes))


def _first_line_is_whole(head: bytes) -> bool:
    """True for JSON lines, whatever the file is called; False for an object written over several lines."""
    line, newline, _ = head.lstrip().partition(b"\n")
    if not newline:
        return len(head) >= 1 << 16  # one very long first line: a record a line
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _cut_lines(path: Path, start: int, piece_bytes: int) -> Iterator[Piece]:
    line = 1
    with path.open("rb") as file:
        file.seek(start)
        while block := file.read(piece_bytes):
            block += file.readline()
            yield Piece(str(path), "lines", start, start + len(block), line)
            start += len(block)
            line += block.count(b"\n")


def _cut_elements(path: Path, piece_bytes: int) -> list[Piece | Fault]:
    """Pieces of a JSON array. Its element boundaries are known only by parsing, so one process does that."""
    data = path.read_bytes()
    text = data.decode("utf-8", "surrogateescape").removeprefix("\ufeff")
    offset = len(_UTF8_BOM) if data.startswith(_UTF8_BOM) else 0
    is_array = text.lstrip().startswith("[")
    at = text.index("[") + 1 if is_array else 0
    line = 1 + text.count("\n", 0, at)
    offset += _num_bytes(text[:at])
    pieces: list[Piece | Fault] = []
    first, first_line = at, line
    broken: Fault | None = None
    for _, start, end, line_after, fault in _walk(text, at, line):
        at, broken = end, fault
        if end - first >= piece_bytes or (fault and start > first):
            size = _num_bytes(text[first:end])
            pieces.append(Piece(str(path), "elements", offset, offset + size, first_line))
            first, first_line, offset = end, line_after, offset + size
    if first < at:
        pieces.append(Piece(str(path), "elements", offset, offset + _num_bytes(text[first:at]), first_line))
    broken = broken or _check_end(text, at, is_array)
    if broken is not None:
        pieces.append(replace(broken, file=str(path)))
    return pieces


def _check_end(text: str, at: int, is_array: bool) -> Fault | None:
    rest = text[at:].strip().removeprefix(",").strip()
    line = 1 + text.count("\n", 0, at)
    if is_array and not rest.startswith("]"):
        return Fault("the file ends before its list does: no closing ]", line=line, fix=_CUT)
    if rest.removeprefix("]" if is_array else "").strip():
        return Fault("there is more text after the end of the list", line=line, source=_beginning(rest), fix=_CUT)
    return None


_CUT = "the file was cut short, or a bracket, quote or comma is missing: write it again with a JSON library"
_DECODER = json.JSONDecoder()


def _walk(text: str, at: int, line: int) -> Iterator[tuple[Any, int, int, int, Fault | None]]:
    """Every JSON value from `at` on: (value, start, end, line after it, fault). Ends after a fault, or at a ]."""
    while True:
        between = _BETWEEN.match(text, at)
        start = between.end() if between else at
        line += text.count("\n", at, start)
        if start >= len(text) or text[start] == "]":
            return
        try:
            value, end = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", "it is nested too deeply")
            broken_at = line + text.count("\n", start, getattr(error, "pos", start))
            what = f"broken JSON ({reason} in line {broken_at}); nothing after it can be read"
            yield None, start, start, line, Fault(what, line=line, source=_beginning(text[start:]), fix=_CUT)
            return
        line_after = line + text.count("\n", start, end)
        yield value, start, end, line_after, None
        at, line = end, line_after


def read_piece(piece: Piece, max_record_bytes: int = MAX_RECORD_BYTES) -> Iterator[Record | Fault]:
    """The records of a piece, in order; a Fault for each that is no JSON, no UTF-8 or far too large."""
    with open(piece.path, "rb") as file:
        file.seek(piece.start)
        data = file.read(piece.end - piece.start)
    if piece.kind == "elements":
        yield from _read_elements(piece, data.decode("utf-8", "surrogateescape"), max_record_bytes)
        return
    for number, line in enumerate(data.split(b"\n"), start=piece.line):
        stripped = line.strip()
        if stripped:
            yield _read_line(piece.path, number, stripped, max_record_bytes)


def _read_line(path: str, number: int, line: bytes, max_record_bytes: int) -> Record | Fault:
    text = line.decode("utf-8", "surrogateescape")
    fault = _check_text(text, path, number, max_record_bytes)
    if fault is not None:
        return fault
    try:
        return Record(json.loads(line), number, _beginning(text))
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", "it is nested too deeply")
        where = f", character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else ""
        fix = _ONE_PER_LINE if len(text) < 3 else _CUT
        what = f"the line is no whole JSON value ({reason}{where})"
        return Fault(what, file=path, line=number, source=_beginning(text), fix=fix)


def _read_elements(piece: Piece, text: str, max_record_bytes: int) -> Iterator[Record | Fault]:
    line_before, at = piece.line, 0
    for value, start, end, line_after, fault in _walk(text, 0, piece.line):
        line = line_before + text.count("\n", at, start)
        shown = text[start:end]
        line_before, at = line_after, end
        fault = fault or _check_text(shown, piece.path, line, max_record_bytes)
        if fault is not None:
            yield Fault(fault.what, file=piece.path, line=line, source=fault.source, fix=fault.fix)
        else:
            yield Record(value, line, _beginning(shown))


def _check_text(text: str, path: str, line: int, max_record_bytes: int) -> Fault | None:
    if len(text) > max_record_bytes:
        what = f"the record has {len(text):,} characters, and {max_record_bytes:,} is the most"
        fix = "a line break or a closing quote may be missing; cut true documents into parts"
        return Fault(what, file=path, line=line, source=_beginning(text), fix=fix)
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raw = text.encode("utf-8", "surrogateescape")
            found = f"bytes {text[error.start : error.start + 2].encode('utf-8', 'surrogateescape').hex(' ')}"
            fix = f"write the file as UTF-8{_guess_encoding(raw)}"
            shown = _beginning(raw.decode("utf-8", "replace"))
            return Fault(f"the record is not UTF-8 ({found})", file=path, line=line, source=shown, fix=fix)
    return None


def _guess_encoding(raw: bytes) -> str:
    try:
        text = raw.decode("gb18030")
    except UnicodeDecodeError:
        return ""
    if any("\u4e00" <= character <= "\u9fff" for character in text):
        return "; it looks like GB18030: iconv -f GB18030 -t UTF-8 old > new"
    return ""


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogateescape"))


def _beginning(text: str) -> str:
    text = text.lstrip()
    shown = " ".join(text[: SHOWN_CHARACTERS + 1].split())
    return shown if len(text) <= SHOWN_CHARACTERS else f"{shown[:SHOWN_CHARACTERS]}..."
