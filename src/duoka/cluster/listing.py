"""Which runs are here, how they stand, and how to stop one of them. For `duoka runs`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from duoka.cluster.patience import StopPatience
from duoka.errors import ConfigError, DuokaError, WorkerFailed
from duoka.runs.find import runs_in
from duoka.runs.folder import RunFolder
from duoka.runs.status import Status, is_alive, read_status, update_status

if TYPE_CHECKING:
    import psutil

    from duoka.cluster.slurm_jobs import QueuedJob

_LEADER_S = 30.0  # beside the ranks' own limit: to reap them and write the status


@dataclass(frozen=True)
class RunRow:
    """One run in the list. `state` is the status's, or "dead" when its process is gone and recorded no end."""

    name: str
    path: str
    state: str
    is_alive: bool
    step: int
    total_steps: int
    loss: float | None
    tokens_per_s: float | None
    world_size: int
    pid: int
    host: str
    age_s: float  # since the last sign of life
    exit_code: int | None
    cause: str


def list_runs(folder: Path) -> list[RunRow]:
    """The run that `folder` is, or the runs in it; the freshest first."""
    from duoka.cluster.slurm_jobs import jobs_in

    rows = {row.name: row for row in map(_read_row, runs_in(folder))}
    for job in jobs_in(folder):
        rows[job.run.name] = _with_job(rows.get(job.run.name), job)
    return sorted(rows.values(), key=lambda row: (row.age_s, row.name))


def _with_job(row: RunRow | None, job: QueuedJob) -> RunRow:
    """A run that waits in Slurm's queue: for the first time, or again."""
    why = f"job {job.number} is {job.state}{f' ({job.reason})' if job.reason not in ('', 'None') else ''}"
    state = "queued" if job.is_waiting else "running"
    if row is None:
        return RunRow(job.run.name, str(job.run), state, False, 0, 0, None, None, 0, 0, "", 0.0, None, why)
    return replace(row, state=state, cause=why)


def _read_row(run: RunFolder) -> RunRow:
    status = read_status(run) or Status(state="starting")
    alive = is_alive(status)
    state: str = status.state
    if status.state in ("starting", "running") and not alive:
        elsewhere = status.host and status.host != socket.gethostname()
        state = f"{status.state} on {status.host}?" if elsewhere else "dead" if status.pid else "not started"
    updated = status.updated or run.path.stat().st_mtime
    return RunRow(
        name=run.name or run.path.resolve().name,
        path=str(run.path),
        state=state,
        is_alive=alive and status.state in ("starting", "running"),
        step=status.step,
        total_steps=status.total_steps,
        loss=status.loss,
        tokens_per_s=status.tokens_per_s,
        world_size=status.world_size,
        pid=status.pid,
        host=status.host,
        age_s=round(max(0.0, time.time() - updated), 1),
        exit_code=status.exit_code,
        cause=status.cause,
    )


def stop_run(run: RunFolder, *, grace_s: float | None, at_once: bool, say: Callable[[str], None]) -> None:
    """End one run's processes and no others: its leader by pid and start time, then the leader's descendants.

    `grace_s`: how long it may take to save; None: what its launcher allows its ranks, and a little for itself.
    """
    import psutil

    status = read_status(run)
    if status is None or not is_alive(status) or status.state not in ("starting", "running"):
        elsewhere = status is not None and status.host and status.host != socket.gethostname()
        where = f"it was started on {status.host}" if status is not None and elsewhere else None
        raise ConfigError(f"no process of {run.path} lives on this machine", where=where)
    leader = psutil.Process(status.pid)
    _check_permission(run, leader)
    if not at_once:
        say(f"asked pid {status.pid} to save and leave{'' if grace_s is None else f' (at most {grace_s:g} s)'}")
        os.kill(status.pid, signal.SIGTERM)
        asked_at = time.monotonic()
        if _wait(run, status, grace_s):
            return
        say(f"pid {status.pid} did not leave within {time.monotonic() - asked_at:.0f} s; ending its processes")
    try:
        # psutil compares start times: a pid that was reused is left alone.
        family = [*leader.children(recursive=True), leader]
    except psutil.NoSuchProcess:
        return
    for process in family:
        try:
            process.kill()
        except psutil.Error:
            continue
    deadline = time.monotonic() + 10
    while left := [process.pid for process in family if _runs(process)]:
        if time.monotonic() > deadline:
            raise WorkerFailed(f"these processes could not be ended: {', '.join(map(str, left))}")
        time.sleep(0.05)
    update_status(run, state="stopped", cause="ended by duoka runs stop")


def _check_permission(run: RunFolder, leader: psutil.Process) -> None:
    try:
        os.kill(leader.pid, 0)
    except PermissionError:
        raise ConfigError(
            f"{run.path} is a run of {leader.username()} (pid {leader.pid}): this user may not stop it",
            fix="ask them, or stop it as that user",
        ) from None
    except ProcessLookupError:
        return


def _runs(process: psutil.Process) -> bool:
    """False also for a zombie: ended, and not reaped by its parent yet."""
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _wait(run: RunFolder, status: Status, grace_s: float | None) -> bool:
    """Whether the leader has left in its time."""
    from duoka.config.load import load_config

    asked_at = time.monotonic()
    patience, margin_s = StopPatience(run, grace_s), 0.0
    if grace_s is None:
        margin_s = _LEADER_S
        with contextlib.suppress(DuokaError):
            patience = StopPatience(run, load_config(run.config).config.faults.stop_within_s)
    while not patience.is_over(asked_at + margin_s):
        if not is_alive(status):
            return True
        time.sleep(0.1)
    return False
