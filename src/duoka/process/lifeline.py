"""No orphans: a process that asks for it ends when the process that started it is gone, however that ended.

On Linux the kernel sees to it, also across exec and after SIGKILL; elsewhere a thread looks once a second. Used by
every rank, and by nobody who is started by hand. Knows no torch.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping

PARENT_PID = "DUOKA_PARENT_PID"  # who started this process; set by who starts ranks
WORLD_TOKEN = "DUOKA_WORLD"  # the same in every process of one world, so that only these are ever ended
ENDS_WITH = "DUOKA_ENDS_WITH"  # the pid of the program that a server was started for, and does not outlive
JOINS = "DUOKA_JOINS"  # set for a rank that nobody prepares: it joins its world as one that torchrun started
QUIET = "quiet"  # a value of it: the launcher reports the failure, once for all machines
MAY_BE_LEFT = "duoka-sink"  # threads whose names begin so may wait for a network for ever; no process waits for them
_PR_SET_PDEATHSIG = 1
_LOOK_EVERY_S = 1.0


def parent_pid(env: Mapping[str, str] = os.environ) -> int | None:
    """The pid of the supervising process, or None when nobody supervises us."""
    text = env.get(PARENT_PID, "")
    return int(text) if text.isdigit() else None


def launcher_speaks(env: Mapping[str, str] = os.environ) -> bool:
    """True in a rank of an elastic world: one launcher says for all machines how it ended."""
    return env.get(JOINS) == QUIET


def leaves_the_world(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment for a process that is to outlive the world of the rank that starts it: without the rank's place
    in it, and without the sign by which a launcher finds what it has to end."""
    of_ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", PARENT_PID, WORLD_TOKEN, JOINS)
    return {name: value for name, value in env.items() if name not in of_ranks}


def is_supervised(env: Mapping[str, str] = os.environ) -> bool:
    """True for a rank whose parent is duoka's supervisor, not for what such a rank starts."""
    return parent_pid(env) == os.getppid() and JOINS not in env


def leaves_thread_behind() -> bool:
    """True when a thread that nobody waits for is still at work, whose package would wait for it at Python's end."""
    return any(thread.name.startswith(MAY_BE_LEFT) for thread in threading.enumerate())


def die_with_parent(pid: int) -> None:
    """End this process with SIGKILL as soon as its parent `pid` is gone, also when it is gone already."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_look_for, args=(pid,), name="duoka-lifeline", daemon=True).start()
    # It may have died between our start and the line above.
    if os.getppid() != pid:
        os.kill(os.getpid(), signal.SIGKILL)


def _look_for(pid: int) -> None:
    while os.getppid() == pid:
        time.sleep(_LOOK_EVERY_S)
    os.kill(os.getpid(), signal.SIGKILL)


def leave_with_starter(env: Mapping[str, str] = os.environ) -> None:
    """Ask this process to end (SIGTERM) when the program that ENDS_WITH names is gone; without it, do nothing.

    A thread looks, for the kernel's own sign would come when the starter's thread ends, not the starter.
    """
    text = env.get(ENDS_WITH, "")
    if not text.isdigit():
        return

    def look() -> None:
        while os.getppid() == int(text):
            time.sleep(_LOOK_EVERY_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=look, name="duoka-starter", daemon=True).start()
