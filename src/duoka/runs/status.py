"""The heartbeat of a run: status.json, replaced in one step by whoever leads the run.

The launcher writes the state of processes (starting, failed, stopped), rank 0 the progress (running, done).
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from duoka.runs.folder import RunFolder, read_json, write_json_atomic

State = Literal["starting", "running", "done", "failed", "stopped"]


@dataclass(frozen=True)
class Status:
    """Where a run stands. `pid` and `pid_started` name the process to signal (the launcher, or rank 0)."""

    state: State
    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    tokens_per_s: float | None = None
    world_size: int = 1
    pid: int = 0
    pid_started: float = 0.0  # seconds since boot clock of psutil: guards against a reused pid
    host: str = ""
    updated: float = 0.0  # wall clock
    exit_code: int | None = None
    cause: str = ""


def read_status(run: RunFolder) -> Status | None:
    raw = read_json(run.status)
    if raw is None:
        return None
    known = {field.name for field in fields(Status)}
    try:
        return Status(**{key: value for key, value in raw.items() if key in known})
    except TypeError:
        return None


def write_status(run: RunFolder, status: Status) -> None:
    stamped = replace(status, updated=time.time(), host=status.host or socket.gethostname())
    # Once a second, beside a checkpoint that is being written: waiting for the disk would hold training up.
    write_json_atomic(run.status, asdict(stamped), durable=False)


def update_status(run: RunFolder, **changes: Any) -> None:
    """Change some fields and keep the others; the first call makes the file."""
    now = read_status(run) or Status(state="starting")
    write_status(run, replace(now, **changes))


def leader_identity(pid: int | None = None) -> dict[str, Any]:
    """The fields that name a process for good: its pid and when it started."""
    import psutil

    pid = os.getpid() if pid is None else pid
    return {"pid": pid, "pid_started": psutil.Process(pid).create_time()}


def is_alive(status: Status) -> bool:
    """True when the process that leads the run still lives on this machine."""
    import psutil

    if not status.pid or status.host != socket.gethostname():
        return False
    try:
        process = psutil.Process(status.pid)
        return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - status.pid_started) < 2.0
    except psutil.Error:
        return False
