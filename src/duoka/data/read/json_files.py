"""JSON in files: a value a line, or an array over any number of lines, read in bounded memory.

records.py asks for pieces and reads them; stream_files.py walks what can only be read from its beginning.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from duoka.data.read.record import CUT, UTF8_BOM, FilePiece, Record, beginning, check_text
from duoka.errors import Fault

BLOCK_BYTES = 1 << 20
# A value that is not whole after this much is broken; the largest record that is accepted is far smaller.
_LARGEST_CHARACTERS = 64 << 20
_BETWEEN = re.compile(r"[\s,]*")
_REST_OF_NUMBER = re.compile(r"[-+.\deE]*\Z")
_ONE_PER_LINE = "a .jsonl file holds one whole JSON object a line; a .json file holds [ {...}, {...} ]"


class Once:
    """How objects are read: a key that stands twice in one is remembered, since of its values one is lost."""

    def __init__(self) -> None:
        self.doubled = ""

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs) and not self.doubled:
            names = [name for name, _ in pairs]
            self.doubled = next(name for name in names if names.count(name) > 1)
        return found

    def fault(self, path: str, line: int, text: str) -> Fault | None:
        """What is to be said of a record that was read so."""
        if not self.doubled:
            return None
        what = f"the key {self.doubled!r} stands twice in one object, and one of its values would be lost"
        return Fault(what, file=path, line=line, source=beginning(text), fix="keep one of them")


@dataclass(frozen=True)
class Element:
    """A value of an array: its text, its line, and where in the file it begins and ends (bytes)."""

    value: Any
    text: str
    line: int
    start: int
    end: int
    once: Once


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Part:
    """The bytes of a piece, as a file of its own."""

    def __init__(self, file: Readable, left: int) -> None:
        self.file = file
        self.left = left

    def read(self, size: int, /) -> bytes:
        data = self.file.read(min(size, self.left))
        self.left -= len(data)
        return data


def holds_lines(head: bytes) -> bool:
    """True for JSON lines, whatever the file is called; False for an object written over several lines, or a list."""
    body = head.removeprefix(UTF8_BOM).lstrip()
    if body.startswith(b"["):
        return False
    line, newline, _ = body.partition(b"\n")
    if not newline:
        return len(head) >= 1 << 16  # one very long first line: a record a line
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def why_no_json(error: Exception) -> str:
    """What Python's reader says, or means where it speaks of itself: text may be whole JSON that it does not take."""
    deep = "it is nested too deeply" if isinstance(error, RecursionError) else "a number in it is too long"
    return str(getattr(error, "msg", deep))


# ---------------------------------------------------------------------------------------------- lines


def cut_lines(path: Path, piece_bytes: int, kind: Literal["lines", "text"] = "lines") -> Iterator[FilePiece]:
    line = 1
    with path.open("rb") as file:
        start = len(UTF8_BOM) if file.read(len(UTF8_BOM)) == UTF8_BOM else 0
        file.seek(start)
        while block := file.read(piece_bytes):
            block += file.readline()
            yield FilePiece(str(path), kind, start, start + len(block), line, len(block))
            start += len(block)
            line += block.count(b"\n")


def read_lines(piece: FilePiece, parse: Callable[[str, int, bytes, int], Record | Fault], most: int) -> Iterator[Any]:
    """`parse` of every line of a piece that is not blank."""
    with open(piece.path, "rb") as file:
        file.seek(piece.start)
        data = file.read(piece.end - piece.start)
    for number, line in enumerate(data.split(b"\n"), start=piece.line):
        stripped = line.strip()
        if stripped:
            yield parse(piece.path, number, stripped, most)


def parse_json_line(path: str, number: int, line: bytes, max_record_bytes: int) -> Record | Fault:
    text = line.decode("utf-8", "surrogateescape")
    fault = check_text(text, path, number, max_record_bytes)
    if fault is not None:
        return fault
    once = Once()
    try:
        value = json.loads(line, object_pairs_hook=once)
        return once.fault(path, number, text) or Record(value, number, beginning(text), path)
    except (ValueError, RecursionError) as error:
        reason = why_no_json(error)
        where = f", character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else ""
        fix = _ONE_PER_LINE if len(text) < 3 else CUT
        what = f"the line is no whole JSON value ({reason}{where})"
        return Fault(what, file=path, line=number, source=beginning(text), fix=fix)


# ------------------------------------------------------------------------------------------- elements


def cut_elements(path: Path, piece_bytes: int) -> Iterator[FilePiece | Fault]:
    """Pieces of a JSON array. Its element boundaries are known only by parsing, so one process does that."""
    first: Element | None = None
    last: Element | None = None
    with path.open("rb") as file:
        for found in walk_elements(file):
            if isinstance(found, Element):
                first, last = first or found, found
            if first and last and (isinstance(found, Fault) or last.end - first.start >= piece_bytes):
                yield _piece_of(path, first, last)
                first = None
            if isinstance(found, Fault):
                yield replace(found, file=str(path))
                return
    if first and last:
        yield _piece_of(path, first, last)


def _piece_of(path: Path, first: Element, last: Element) -> FilePiece:
    return FilePiece(str(path), "elements", first.start, last.end, first.line, last.end - first.start)


def read_elements(piece: FilePiece, max_record_bytes: int) -> Iterator[Record | Fault]:
    with open(piece.path, "rb") as file:
        file.seek(piece.start)
        part = _Part(file, piece.end - piece.start)
        for element in _walk(part, piece.line, is_array=False, at_byte=0):
            yield parse_element(piece.path, element, max_record_bytes)


def parse_element(path: str, element: Element | Fault, max_record_bytes: int) -> Record | Fault:
    if isinstance(element, Fault):
        return replace(element, file=path)
    fault = check_text(element.text, path, element.line, max_record_bytes)
    fault = fault or element.once.fault(path, element.line, element.text)
    return fault or Record(element.value, element.line, beginning(element.text), path)


def walk_elements(file: Readable) -> Iterator[Element | Fault]:
    """Every element of an array, or a lone value, from a file's beginning; a Fault ends the walk."""
    return _walk(file, 1, is_array=None, at_byte=0)


def _walk(file: Readable, line: int, *, is_array: bool | None, at_byte: int) -> Iterator[Element | Fault]:
    window = _Window(file)
    if is_array is None:
        window.fill()
        if window.text.startswith("\ufeff"):
            window.at, at_byte = 1, len(UTF8_BOM)
        skipped = window.skip(re.compile(r"\s*"))
        is_array = window.text[window.at : window.at + 1] == "["
        if is_array:
            skipped += window.skip(re.compile(r"\["))
        line += skipped.count("\n")
        at_byte += _num_bytes(skipped)
    ended_on = line
    while True:
        between = window.skip(_BETWEEN)
        line += between.count("\n")
        at_byte += len(between)
        if window.at == len(window.text) and window.fill():
            continue
        start = window.at
        if start == len(window.text) or window.text[start] == "]":
            break
        once = Once()
        try:
            value, end = json.JSONDecoder(object_pairs_hook=once).raw_decode(window.text, start)
        except (ValueError, RecursionError) as error:
            is_small = len(window.text) - start < _LARGEST_CHARACTERS
            if isinstance(error, ValueError) and is_small and window.fill():
                continue  # it may only be cut at the window's end
            yield _broken(window.text, start, line, error)
            return
        if type(value) in (int, float) and _REST_OF_NUMBER.match(window.text, end) and window.fill():
            continue  # it may go on behind the window
        text = window.text[start:end]
        line_after, size_bytes = line + text.count("\n"), _num_bytes(text)
        yield Element(value, text, line, at_byte, at_byte + size_bytes, once)
        line, at_byte, window.at = line_after, at_byte + size_bytes, end
        ended_on = line
    ended = _check_end(window, line, ended_on, is_array)
    if ended is not None:
        yield ended


class _Window:
    """A moving part of a file as text; what is no UTF-8 stays in it as lone surrogates."""

    def __init__(self, file: Readable) -> None:
        self.file = file
        self.text = ""
        self.at = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._is_ended = False

    def fill(self) -> bool:
        """Read on; False at the file's end. Reads as much as is there already, so that retries cost little."""
        if self._is_ended:
            return False
        data = self.file.read(max(BLOCK_BYTES, len(self.text) - self.at))
        new = self._decoder.decode(data, final=not data)
        if data:
            self.text, self.at = self.text[self.at :] + new, 0
        else:  # places in the text stay what they are; half a character may be left
            self.text += new
            self._is_ended = True
        return bool(data) or bool(new)

    def skip(self, pattern: re.Pattern[str]) -> str:
        """What the pattern finds here, left behind."""
        found = pattern.match(self.text, self.at)
        self.at = found.end() if found else self.at
        return found.group() if found else ""


def _broken(text: str, start: int, line: int, error: Exception) -> Fault:
    reason = why_no_json(error)
    broken_at = line + text.count("\n", start, getattr(error, "pos", start))
    what = f"broken JSON ({reason} in line {broken_at}); nothing after it can be read"
    return Fault(what, line=line, source=beginning(text[start : start + 1000]), fix=CUT)


def _check_end(window: _Window, line: int, ended_on: int, is_array: bool) -> Fault | None:
    closed = window.skip(re.compile(r"\]"))
    if is_array and not closed:
        return Fault("the file ends before its list does: no closing ]", line=ended_on, fix=CUT)
    while True:
        line += window.skip(re.compile(r"\s*")).count("\n")
        if window.at < len(window.text):
            source = beginning(window.text[window.at : window.at + 1000])
            return Fault("there is more text after the end of the list", line=line, source=source, fix=CUT)
        if not window.fill():
            return None


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogateescape"))
