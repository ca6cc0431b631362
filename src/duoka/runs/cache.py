"""The folder that keeps work between runs (converted models, tokenized data), and the lock that guards one piece.

Everything in it can be made again: deleting the folder costs time, never results.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path

from duoka.errors import StorageError


def cache_folder(env: Mapping[str, str] = os.environ) -> Path:
    """DUOKA_CACHE, or duoka's part of the user's cache folder."""
    if env.get("DUOKA_CACHE"):
        return Path(env["DUOKA_CACHE"]).expanduser()
    if env.get("XDG_CACHE_HOME"):
        return Path(env["XDG_CACHE_HOME"]) / "duoka"
    try:
        return Path.home() / ".cache" / "duoka"
    except RuntimeError:  # a container's user that passwd does not know, without HOME
        raise StorageError(
            "this user has no home folder: HOME is not set, and the system does not know the user's number",
            fix="set DUOKA_CACHE to a folder that you may write to, or HOME",
        ) from None


def make_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"cannot make the cache folder {folder}: {error.strerror or error}",
            fix="set DUOKA_CACHE to a folder that you may write to",
        ) from None
    return folder


def lend_temporary_folder(env: MutableMapping[str, str] = os.environ) -> None:
    """TMPDIR in the cache folder, where a system has no place for temporary files, as containers with a read-only root:
    without one torch cannot be imported. What can be written Python finds in the same order."""
    places = [*(env.get(name, "") for name in ("TMPDIR", "TEMP", "TMP")), "/tmp", "/var/tmp", "/usr/tmp", os.curdir]
    if any(place and os.access(place, os.W_OK | os.X_OK) for place in places):
        return
    with suppress(OSError, StorageError):  # who needs one says so
        folder = cache_folder(env) / "tmp"
        folder.mkdir(parents=True, exist_ok=True)
        env["TMPDIR"] = str(folder)


def storage_fault(error: BaseException, env: Mapping[str, str] = os.environ) -> StorageError | None:
    """The fault of a file that this user may not use, a cache folder that cannot be written, or a system without a
    place for temporary files; else None."""
    if not isinstance(error, OSError):
        return None
    if error.errno == errno.ENOENT and "No usable temporary directory" in str(error):
        return StorageError(
            "there is no place for temporary files: /tmp and its like cannot be written, or are full",
            fix="set TMPDIR to a folder that you may write to",
        )
    if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS) or not isinstance(error.filename, str):
        return None
    with suppress(StorageError):
        folder = cache_folder(env)
        if Path(error.filename).is_relative_to(folder):
            return StorageError(
                f"cannot write in the cache folder {folder}: {error.strerror}",
                where=f"at {error.filename}",
                fix="set DUOKA_CACHE to a folder that you may write to",
            )
    if error.errno == errno.EROFS:
        return None  # of a disk, not of a user
    fix = f"let this user (number {os.getuid()}) read or write it, or name another"
    return StorageError(f"{error.filename} cannot be used: {error.strerror}", fix=fix)


# Of network file systems that know no locks, or were mounted without them.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)
_CLOCK_TICK_NS = 2_000_000_000  # the coarsest clock of a file system in use


def file_version(path: Path) -> list[int]:
    """What changes whenever a file's content may have: its size, inode, and times of change.

    ctime and inode too: tools that copy or unpack set the size and mtime that a file had elsewhere.
    """
    facts = path.stat()
    return [facts.st_size, facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns]


def is_settled(version: list[int]) -> bool:
    """False for a file changed a moment ago: it may change again within the same tick of its clock, unseen.

    Not so for one of the future (a clock was set back, an archive had such dates): a change would give it today's.
    """
    return min(abs(time.time_ns() - stamp) for stamp in version[2:]) > _CLOCK_TICK_NS


def try_lock(file: int) -> bool:
    """Lock an open file until it is closed; False where another process holds it, True too where there are no locks."""
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


@contextmanager
def hold_lock(path: Path, *, on_wait: Callable[[], None], poll_s: float = 0.1) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`; `on_wait` is called once when another process holds it.

    The operating system lets go of it when its holder dies, so a killed run never leaves a lock behind.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        said = False
        while not try_lock(file):  # without locks the work may be done twice; what it makes appears whole all the same
            if not said:
                on_wait()
                said = True
            time.sleep(poll_s)
        yield
    finally:
        os.close(file)
