"""When the system gives a process no more memory: how that shows, and what to say. Known to the command line and to
cluster/blame.py, which may find no more than a dying rank's last words. Memory of a GPU is train/shortage.py's.
"""

from __future__ import annotations

import errno
import resource

from duoka.errors import DoesNotFit
from duoka.units import format_bytes

_WORDS = (
    "memoryerror", "std::bad_alloc", "cannot allocate memory", "can't allocate memory", "not enough memory",
    "unable to allocate", "memory allocation still failed", "failed to map segment from shared object", "os error 12",
)  # fmt: skip
# What Python says of a refused thread: its stack is memory too, but a limit on processes is refused alike.
NO_THREAD = "can't start new thread"
_NO_KERNEL = "could not create a primitive"  # oneDNN's only words, of an operation that it does not know too


def is_no_memory(error: BaseException) -> bool:
    """Whether an allocation or a mapping was refused: to Python, NumPy, a library's loading, or a file's reader."""
    is_refused = isinstance(error, OSError) and error.errno == errno.ENOMEM
    says_so = isinstance(error, (OSError, ImportError, RuntimeError)) and says_no_memory(str(error))
    return is_refused or says_so or isinstance(error, MemoryError)


def says_no_memory(text: str) -> bool:
    said = text.lower()
    is_doubtful = NO_THREAD in said or _NO_KERNEL in said
    return any(words in said for words in _WORDS) or (is_doubtful and address_limit() is not None)


def no_memory() -> DoesNotFit:
    """The fault, with the limit of this process where it has one: those of its ranks are the same."""
    limit = address_limit()
    if limit is None:
        return DoesNotFit(
            "the system gave a process no more memory",
            fix="end other programs, start fewer processes (--nproc), or see what a run needs:   duoka plan CONFIG",
        )
    return DoesNotFit(
        f"a process got no more memory: its address space is limited to {format_bytes(limit)} (ulimit -v)",
        fix="lift the limit:   ulimit -v unlimited   (libraries map several times of what they use)",
    )


def address_limit() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft
