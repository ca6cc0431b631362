"""The body of a request: so many bytes, or in chunks. What leaves its end in doubt is refused, and its connection ends:
bytes that one program takes for a body are another's next request."""

from __future__ import annotations

import re
from collections.abc import Iterator
from email.message import Message
from io import BufferedIOBase

from duoka.serve.api.fields import BadRequest

MOST_BYTES = 32 << 20  # of a request
_LONGEST_LINE = 4096  # of a chunk's size, or of a line behind the last one
_MOST_LINES = 64
_SIZE = re.compile(rb"([0-9a-fA-F]{1,16})[ \t]*(?:;.*)?\r?\n")


def has_body(headers: Message) -> bool:
    return "Transfer-Encoding" in headers or headers.get("Content-Length", "0").strip() != "0"


def read_body(headers: Message, file: BufferedIOBase) -> bytes:
    """Raises BadRequest, with nothing more to be read from `file`."""
    lengths, codings = headers.get_all("Content-Length", []), headers.get_all("Transfer-Encoding", [])
    if codings:
        if [one.strip().lower() for one in codings] != ["chunked"]:
            raise BadRequest("of Transfer-Encoding chunked alone is read here", status=501)
        if lengths:
            raise BadRequest("a request has Content-Length or Transfer-Encoding, not both")
        return b"".join(_chunks(file))
    if not lengths:
        raise BadRequest("a request needs a Content-Length, or Transfer-Encoding: chunked", status=411)
    if len(set(lengths)) > 1 or not re.fullmatch("[0-9]{1,18}", lengths[0].strip()):
        raise BadRequest(f"Content-Length is {', '.join(lengths)}; it must be the number of the body's bytes")
    return _read(file, _bounded(int(lengths[0])))


def _bounded(size: int) -> int:
    if size > MOST_BYTES:
        raise BadRequest(f"a request has at most {MOST_BYTES >> 20} MiB", status=413)
    return size


def _read(file: BufferedIOBase, size: int) -> bytes:
    try:
        found = file.read(size)
    except TimeoutError:
        raise BadRequest(f"of the body's {size:,} bytes some did not come", status=408) from None
    if len(found) < size:
        raise BadRequest(f"the body ends after {len(found):,} of its {size:,} bytes")
    return found


def _line(file: BufferedIOBase) -> bytes:
    try:
        return file.readline(_LONGEST_LINE)
    except TimeoutError:
        raise BadRequest("the body's next chunk did not come", status=408) from None


def _chunks(file: BufferedIOBase) -> Iterator[bytes]:
    total = 0
    while True:
        found = _SIZE.fullmatch(_line(file))
        if found is None:
            raise BadRequest("a chunk of the body does not begin with its size")
        size = int(found.group(1), 16)
        if size == 0:
            break
        total = _bounded(total + size)
        yield _read(file, size)
        if _line(file) not in (b"\r\n", b"\n"):
            raise BadRequest("a chunk of the body is longer than its size says")
    for _ in range(_MOST_LINES):
        if _line(file) in (b"\r\n", b"\n"):
            return
    raise BadRequest("the lines behind the body do not end")
