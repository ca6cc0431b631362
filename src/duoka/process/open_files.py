"""How many files and connections a process may have open: raised to what the system grants it, and what to say when
that was too few. Called before a process joins others; the words are known to the command line and cluster/blame.py.
"""

from __future__ import annotations

import contextlib
import errno
import resource

from duoka.errors import DoctorError, DuokaError

_ENOUGH = 65536
_WORDS = ("too many open files", "failed to init uv loop")  # the latter of torch's store, which has no other reason


def raise_open_files() -> None:
    """The soft limit up to the hard one: every rank is connected with every other, once per process group."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a system may grant less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def is_too_many_files(error: BaseException) -> bool:
    """Also of what a reader made a fault of a file from: not by its words, which may quote a user's."""
    if isinstance(error, DuokaError):
        inner = error.__cause__ or error.__context__
        return inner is not None and is_too_many_files(inner)
    is_refused = isinstance(error, OSError) and error.errno == errno.EMFILE
    # Libraries in other languages raise a plain Exception.
    is_told = isinstance(error, (OSError, RuntimeError)) or type(error) is Exception
    return is_refused or (is_told and says_too_many_files(str(error)))


def says_too_many_files(text: str) -> bool:
    said = text.lower()
    return any(words in said for words in _WORDS)


def too_many_files() -> DoctorError:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return DoctorError(
        f"a process may have {soft} files and connections open at once (ulimit -n), and wanted more",
        fix="raise the limit:   ulimit -n 65536   (Slurm: PropagateResourceLimits; a container: --ulimit nofile=65536)",
    )
