"""Why a run is not whole: the cause that its launcher wrote down, or that it left none.

For the closing report (report.py). Reads a run's status only; who is to blame was judged by cluster/.
"""

from __future__ import annotations

import socket

from duoka.runs.status import Status, is_alive


def has_died(status: Status) -> bool:
    """It says that it runs, and its process on this machine is gone."""
    here = bool(status.pid) and status.host == socket.gethostname()
    return status.state in ("starting", "running") and here and not is_alive(status)


def cause_lines(status: Status | None) -> list[str]:
    """In the words that were on the screen when it ended; empty for a run that is whole or under way."""
    if status is None:
        return []
    if has_died(status):
        return [
            f"its process (pid {status.pid}) is gone without a word: killed, or the machine",
            "went down; the kernel kills when memory is short (see dmesg)",
        ]
    return status.cause.splitlines() if status.state in ("failed", "stopped") else []
