"""A file's whole room on its disk, taken before it is written."""

from __future__ import annotations

import errno
import os


def reserve_disk(handle: int, num_bytes: int) -> None:
    """Give every byte of an open file its place: a mapped page that finds none there would be a SIGBUS. OSError where
    there is none. On systems without such a call (macOS), the file is given its size if the disk has that much free."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, num_bytes)
        return
    size, disk = os.fstat(handle).st_size, os.fstatvfs(handle)
    if disk.f_bavail * disk.f_frsize < num_bytes - size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(handle, max(size, num_bytes))
