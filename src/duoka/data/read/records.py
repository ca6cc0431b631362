"""Files of records: how a file of any kind is cut into pieces that processes can read by themselves.

`registry` peeks at files through it, `prepare` hands its pieces to workers. It knows files, not what a record means
(see formats.py). A new kind of file is a row in `KINDS` and a line in `find_pieces` and `read_piece`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from duoka.data.read.json_files import cut_elements, cut_lines, holds_lines, parse_json_line, read_elements, read_lines
from duoka.data.read.record import MAX_RECORD_BYTES, FilePiece, Record
from duoka.data.read.stream_files import PACKED, bare_suffix, cut_stream, parse_text_line, read_head, read_stream
from duoka.data.read.table_files import check_parquet, cut_rows, read_rows
from duoka.errors import Fault

__all__ = [
    "KINDS",
    "MAX_RECORD_BYTES",
    "FilePiece",
    "Record",
    "check_file",
    "find_pieces",
    "is_data_file",
    "read_piece",
    "told_by_name",
]

KINDS = (".json", ".jsonl", ".parquet", ".csv", ".tsv", ".txt")
_CONVERT = {
    ".bz2": "bunzip2 -k {name}",
    ".xz": "unxz -k {name}",
    ".zip": "unzip {name}",
    ".arrow": "datasets.Dataset.from_file({name!r}).to_parquet('data.parquet')",
    ".feather": "pandas.read_feather({name!r}).to_parquet('data.parquet')",
}
_CONVERT_ANY = "pandas.read_excel(...).to_json('data.jsonl', orient='records', lines=True, force_ascii=False)"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


def is_data_file(path: Path) -> bool:
    return bare_suffix(path) in KINDS and not (path.suffix.lower() in PACKED and bare_suffix(path) == ".parquet")


def told_by_name(path: Path) -> str:
    """What of a file's name says how it is read, where its content does not: a table's lines may be documents."""
    suffix = bare_suffix(path)
    if suffix == ".jsonl":  # by lines whatever they are, where .json would be one value over several
        head = read_head(path)
        return "" if isinstance(head, bytes) and holds_lines(head) else suffix
    return "" if suffix in (".json", ".parquet") else suffix


def check_file(path: Path) -> Fault | None:
    """The fault of a file that cannot be read as records at all, or None."""
    if not is_data_file(path):
        return Fault(
            f"{path.name!r} is of no kind that duoka reads: {', '.join(KINDS)} (also packed: {', '.join(PACKED)})",
            file=str(path),
            fix="convert it, for example: " + _CONVERT.get(path.suffix.lower(), _CONVERT_ANY).format(name=path.name),
        )
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        return Fault(f"{path} cannot be read: {error.strerror or error}", file=str(path))
    if path.stat().st_size == 0:
        return Fault(f"{path.name} is empty", file=str(path))
    if bare_suffix(path) == ".parquet":
        return check_parquet(path)
    head = read_head(path, 4)
    if isinstance(head, Fault):
        return head
    if head[:2] in _UTF16_BOMS or b"\0" in head[:2]:  # without a mark ASCII has a zero in every second place
        kind = "UTF-16" if head[:2] in _UTF16_BOMS else "UTF-16LE" if head[1:2] == b"\0" else "UTF-16BE"
        fix = f"write it as UTF-8: iconv -f {kind} -t UTF-8 {path.name} > new{path.suffix}"
        return Fault(f"{path.name} is UTF-16, and data must be UTF-8", file=str(path), fix=fix)
    return None if head else Fault(f"{path.name} is empty", file=str(path))


def find_pieces(path: Path, piece_bytes: int) -> Iterator[FilePiece | Fault]:
    """Cut a file into pieces of about `piece_bytes`, at record boundaries. A Fault stands for what has none."""
    suffix = bare_suffix(path)
    if suffix == ".parquet":
        return cut_rows(path, piece_bytes)
    if path.suffix.lower() in PACKED or suffix in (".csv", ".tsv"):
        return cut_stream(path, piece_bytes)
    if suffix == ".txt":
        return cut_lines(path, piece_bytes, "text")
    with path.open("rb") as file:
        head = file.read(1 << 16)
    starts_list = head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
    is_lines = holds_lines(head) or (suffix == ".jsonl" and not starts_list)
    return cut_lines(path, piece_bytes) if is_lines else cut_elements(path, piece_bytes)


def read_piece(piece: FilePiece, max_record_bytes: int = MAX_RECORD_BYTES) -> Iterator[Record | Fault]:
    """The records of a piece, in order; a Fault for each that is no JSON, no UTF-8 or far too large."""
    if piece.kind == "elements":
        return read_elements(piece, max_record_bytes)
    if piece.kind == "stream":
        return read_stream(piece, max_record_bytes)
    if piece.kind == "rows":
        return read_rows(piece, max_record_bytes)
    return read_lines(piece, parse_text_line if piece.kind == "text" else parse_json_line, max_record_bytes)
