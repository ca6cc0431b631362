"""Which signal asked a run to stop: logs/stop.json, written by its launcher, which passes every kind on as SIGTERM.

Read by rank 0 when it says why the run stopped. Ranks never get a Ctrl-C itself: a second one means "at once".
"""

from __future__ import annotations

import contextlib

from duoka.runs.folder import RunFolder, read_json, write_json_atomic

_NAME = "stop.json"


def write_stop_request(run: RunFolder, signal_name: str) -> None:
    with contextlib.suppress(OSError):  # a full disk: the run stops all the same, and calls it SIGTERM
        write_json_atomic(run.logs / _NAME, {"signal": signal_name}, durable=False)


def read_stop_request(run: RunFolder) -> str:
    """Empty when no launcher passed a request on."""
    return str((read_json(run.logs / _NAME) or {}).get("signal", ""))


def clear_stop_request(run: RunFolder) -> None:
    """One of an earlier start says nothing about this one."""
    with contextlib.suppress(OSError):
        (run.logs / _NAME).unlink(missing_ok=True)
