"""Types shared by all readers of files: pieces that one process reads, and records in them.

The readers of each kind of file (json_files.py, stream_files.py, table_files.py) build on these; records.py chooses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from duoka.errors import Fault

MAX_RECORD_BYTES = 1 << 20
SHOWN_CHARACTERS = 100
UTF8_BOM = b"\xef\xbb\xbf"
CUT = "the file was cut short, or a bracket, quote or comma is missing: write it again with a JSON library"


@dataclass(frozen=True)
class FilePiece:
    """A run of whole records in a file; `start` and `end` count what `kind` says, the first stands on `line`.

    lines, text, elements: bytes of the file. stream: records, for files that can only be read from their beginning.
    rows: row groups of a Parquet file, `line` being the first row's number.
    """

    path: str
    kind: Literal["lines", "text", "elements", "stream", "rows"]
    start: int
    end: int
    line: int
    size_bytes: int


@dataclass(frozen=True)
class Record:
    """One parsed record. `text` is its beginning as it stands in the file; tables name the row in `file`."""

    value: Any
    line: int
    text: str
    file: str


def check_text(text: str, path: str, line: int, max_record_bytes: int) -> Fault | None:
    """The fault of a record that is far too large, or no UTF-8 (bytes that are none arrive as surrogates)."""
    if len(text) > max_record_bytes:
        what = f"the record has {len(text):,} characters, and {max_record_bytes:,} is the most"
        fix = "a line break or a closing quote may be missing; cut true documents into parts"
        return Fault(what, file=path, line=line, source=beginning(text), fix=fix)
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            found = text[error.start : error.start + 2].encode("utf-8", "surrogatepass")
            try:
                raw = text.encode("utf-8", "surrogateescape")
                found = text[error.start : error.start + 2].encode("utf-8", "surrogateescape")
            except UnicodeEncodeError:  # half an emoji as a JSON escape, not a byte of the file
                raw = text.encode("utf-8", "replace")
            fix = f"write the file as UTF-8{_guess_encoding(raw)}"
            shown = beginning(raw.decode("utf-8", "replace"))
            what = f"the record is not UTF-8 (bytes {found.hex(' ')})"
            return Fault(what, file=path, line=line, source=shown, fix=fix)
    return None


def _guess_encoding(raw: bytes) -> str:
    try:
        text = raw.decode("gb18030")
    except UnicodeDecodeError:
        return ""
    if any("\u4e00" <= character <= "\u9fff" for character in text):
        return "; it looks like GB18030: iconv -f GB18030 -t UTF-8 old > new"
    return ""


def beginning(text: str) -> str:
    text = text[: 2 * SHOWN_CHARACTERS + 2].lstrip() if len(text) > 4 * SHOWN_CHARACTERS else text.lstrip()
    shown = " ".join(text[: SHOWN_CHARACTERS + 1].split())
    return shown if len(text) <= SHOWN_CHARACTERS else f"{shown[:SHOWN_CHARACTERS]}..."
