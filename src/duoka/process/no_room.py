"""Disks that take no more: which errors say so, in whichever language a library is written, and what to tell a user.

Known to the command line, to checkpoints and to what writes results.
"""

from __future__ import annotations

import errno
import os
import re
import resource

from duoka.errors import DuokaError, StorageError
from duoka.units import format_bytes

_WORDS = {
    errno.ENOSPC: "there is no space left on the device",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EIO: "the device does not read or write (input/output error)",
    errno.EFBIG: "a file would be larger than files may be here",
}
# As Rust writes the system's number: safetensors raises a kind of its own, tokenizers a plain Exception.
_RUST = re.compile(r"\(os error ([0-9]+)\)")
# torch.save drops the system's number; what could not be written it counts, or says so.
_TORCH = re.compile(r"inline_container\.cc.*(unexpected pos|failed writing|file write failed)", re.DOTALL)


def disk_error(error: BaseException) -> OSError | None:
    """The same as an OSError, when `error` says that a disk did not take what was written to it."""
    if isinstance(error, OSError):
        return error if error.errno in _WORDS else None
    if not isinstance(error, Exception) or isinstance(error, DuokaError):
        return None
    text = str(error)
    if isinstance(error, RuntimeError) and _TORCH.search(text):
        return OSError(0, "a file could not be written whole: the disk is full, or there is a limit")
    is_rust = type(error) is Exception or type(error).__name__ == "SafetensorError"
    found = _RUST.search(text) if is_rust else None
    number = int(found[1]) if found else 0
    return OSError(number, os.strerror(number)) if number in _WORDS else None


def file_limit() -> int | None:
    """Bytes that a file of this process may have (ulimit -f); None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if soft == resource.RLIM_INFINITY else soft


def more_room(error: OSError) -> str:
    """What gives room to what `error` refused."""
    if error.errno == errno.EROFS:
        return "mount it for writing"
    if error.errno == errno.EIO:
        return "look after the device (dmesg)"
    limit = file_limit() if error.errno == errno.EFBIG else None
    return "free some space" if limit is None else f"lift the limit of {format_bytes(limit)} a file (ulimit -f)"


def no_room(error: OSError) -> StorageError:
    """The fault of an error that `disk_error` gave."""
    where = f"at {error.filename}" if error.filename else None
    what = _WORDS.get(error.errno or 0) or error.strerror or str(error)
    return StorageError(what, where=where, fix=f"{more_room(error)}, or write elsewhere")
