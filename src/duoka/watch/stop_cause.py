"""Why a run did not finish: the cause that its launcher recorded, or that there is none.

For the closing report (report.py). Reads a run's status only; cluster/blame.py has found the root cause.
"""

from __future__ import annotations

import socket

from duoka.runs.status import Status, is_alive


def has_died(status: Status) -> bool:
    """Its status is running, and its process on this machine is gone."""
    here = bool(status.pid) and status.host == socket.gethostname()
    return status.state in ("starting", "running") and here and not is_alive(status)


def cause_lines(status: Status | None) -> list[str]:
    """The message printed when it ended; empty for a run that is finished or running."""
    if status is None:
        return []
    if has_died(status):
        return [
            f"its process (pid {status.pid}) is gone and recorded no cause: killed, or the machine",
            "went down; the kernel kills when memory is short (see dmesg)",
        ]
    return status.cause.splitlines() if status.state in ("failed", "stopped") else []
