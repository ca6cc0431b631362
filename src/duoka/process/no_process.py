"""When the system starts no more processes or threads: how that shows, and what to say. Known to the command line, to
cluster/blame.py and to who meets. Clusters and containers limit both by one number, and each core wants a few threads.
"""

from __future__ import annotations

import errno
import re
import resource

from duoka.errors import DoctorError
from duoka.plan.hardware import read_process_limit
from duoka.process.no_memory import NO_THREAD, address_limit

# What is said of a thread or a fork. Of a connection the same words mean that nothing has come for a while.
_SAID = re.compile(
    r"(thread creation failed|pthread_create|fork|what\(\):)[^\n]*resource temporarily unavailable|"
    r"^\s*resource temporarily unavailable\s*$|threadpoolbuilderror",
    re.IGNORECASE,
)


def is_no_process(error: BaseException) -> bool:
    """Whether a fork or a thread was refused: to Python, or to a library in another language."""
    if isinstance(error, OSError):
        return error.errno == errno.EAGAIN
    # Of a library in Rust, whose kind of error is no Exception.
    is_told = isinstance(error, RuntimeError) or type(error).__name__ == "PanicException"
    return is_told and says_no_process(str(error))


def says_no_process(text: str) -> bool:
    return bool(_SAID.search(text)) or (NO_THREAD in text.lower() and address_limit() is None)


def no_process() -> DoctorError:
    limits = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY:
        limits.append(f"{soft} of this user (ulimit -u)")
    if (group := read_process_limit()) is not None:
        limits.append(f"{group} of this container or job (pids.max)")
    known = f": there may be {', '.join(limits)}" if limits else ""
    return DoctorError(
        f"the system started no more processes or threads{known}",
        fix="raise the limit (ulimit -u 65536; Docker: --pids-limit; Kubernetes: podPidsLimit), or start less: fewer "
        "processes (--nproc)\nand fewer threads (OMP_NUM_THREADS, RAYON_NUM_THREADS)",
    )
