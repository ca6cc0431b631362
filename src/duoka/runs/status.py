"""Where a run stands: status.json is its leader's file, progress.json rank 0's; `read_status` puts the two together.

The leader is the launcher, or rank 0 where no launcher of ours started it. Each file has one writer, so that nothing
one of them says is lost to the other's reading, changing and writing. Readers never open the files themselves.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from duoka.runs.folder import RunFolder, read_json, write_json_atomic

State = Literal["starting", "running", "done", "failed", "stopped"]

# What rank 0 counts. Runs from before there was a progress.json have these in status.json.
_NUMBERS = ("step", "total_steps", "loss", "tokens_per_s")
# How often the leader has written. Progress notes the number it found when it began, so that a reader knows which of
# the two spoke last about the run's state: clocks of two machines could not tell.
_VERSION = "version"
_FOLDER = "folder"
_OLDEST_DATE = 1e9  # what is larger is no time since a boot: of an older duoka, or another system than Linux


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
    pid_started: float = 0.0  # against a reused pid: seconds after the machine's boot (elsewhere than on Linux, a date)
    host: str = ""
    boot: str = ""  # of the machine, as the kernel calls it: names of machines change
    updated: float = 0.0  # wall clock
    exit_code: int | None = None
    cause: str = ""
    is_copy: bool = False  # of a folder that was copied: the process leads the run that it is a copy of


def read_status(run: RunFolder) -> Status | None:
    """Both files as one; None for a run that has written neither."""
    leader, progress = read_json(run.status), read_json(run.progress)
    if leader is None and progress is None:
        return None
    merged = {**_merge(leader or {}, progress or {}), "is_copy": _is_copy(run, leader or {})}
    told = {field.name: merged[field.name] for field in fields(Status) if _is_told(field, merged)}
    return Status(**{"state": "starting"} | told)


def _is_told(field: Field[Any], values: Mapping[str, Any]) -> bool:
    """A value of another kind than its field's is damage: one such run must not end a list of all."""
    value, default = values.get(field.name), field.default
    if field.name == "state":
        return value in get_args(State)
    if default is None or isinstance(default, float):
        return isinstance(value, (int, float))
    return isinstance(value, type(default))


def _merge(leader: Mapping[str, Any], progress: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers are rank 0's; the state is that of who spoke last: a leader's "stopped" outlasts a late "running"."""
    merged = {**leader, **{key: progress[key] for key in _NUMBERS if key in progress}}
    merged["updated"] = max(_number(leader, "updated"), _number(progress, "updated"))
    if progress and _number(progress, "after") >= _number(leader, _VERSION):
        return {**merged, **progress, "updated": merged["updated"]}
    merged.setdefault("world_size", progress.get("world_size", 1))
    if not leader.get("cause") and leader.get("state") == progress.get("state"):
        merged["cause"] = progress.get("cause", "")  # rank 0 knows which signal it was
    return merged


def _number(values: Mapping[str, Any], key: str) -> float:
    value = values.get(key, 0)
    return value if isinstance(value, (int, float)) else 0


def _identity_of(run: RunFolder) -> list[Any]:
    """What tells a folder from a copy of it."""
    return [str(run.path.resolve()), run.path.stat().st_ino]


def _is_copy(run: RunFolder, leader: Mapping[str, Any]) -> bool:
    """Not for a new path alone (it was moved, or another machine mounts it elsewhere), nor for a new inode alone (some
    network file systems give out new ones)."""
    told = leader.get(_FOLDER)
    if not isinstance(told, list) or len(told) != 2:
        return False
    try:
        return all(one != there for one, there in zip(_identity_of(run), told, strict=True))
    except OSError:
        return False


def write_status(run: RunFolder, status: Status) -> None:
    """The leader's file, anew."""
    _write_leader(run, {key: value for key, value in asdict(status).items() if key != "is_copy"})


def update_status(run: RunFolder, **changes: Any) -> None:
    """The leader's word: some fields change, the others stay; of an earlier start only rank 0's numbers do."""
    before = read_json(run.status) or {}
    if changes.get("state") in ("starting", "running"):
        before = {key: before[key] for key in (*_NUMBERS, _VERSION) if key in before}
    _write_leader(run, {**before, **changes})


def _write_leader(run: RunFolder, values: Mapping[str, Any]) -> None:
    version = int(_number(read_json(run.status) or {}, _VERSION)) + 1
    stamp = {"host": values.get("host") or socket.gethostname(), "updated": time.time(), _FOLDER: _identity_of(run)}
    # Beside a checkpoint that is being written: waiting for the disk would hold training up.
    write_json_atomic(run.status, {**values, **stamp, _VERSION: version}, durable=False)


class ProgressFile:
    """progress.json: rank 0 makes one at its start and writes it from then on; nobody else does."""

    def __init__(self, run: RunFolder) -> None:
        self._path = run.progress
        self._values: dict[str, Any] = {"after": int(_number(read_json(run.status) or {}, _VERSION))}

    def update(self, **changes: Any) -> None:
        self._values |= changes
        write_json_atomic(self._path, {**self._values, "updated": time.time()}, durable=False)


def leader_identity(pid: int | None = None) -> dict[str, Any]:
    """The fields that name a process for good: its pid, when it started and where."""
    import psutil

    pid = os.getpid() if pid is None else pid
    since_boot_s = _started_since_boot_s(pid)
    started = psutil.Process(pid).create_time() if since_boot_s is None else since_boot_s
    return {"pid": pid, "pid_started": started, "host": socket.gethostname(), "boot": _boot_id()}


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _may_be_here(status: Status) -> bool:
    """A machine may have got another name since; containers of one machine share its boot, and no processes."""
    return status.host == socket.gethostname() or bool(status.boot and status.boot == _boot_id())


def _started_since_boot_s(pid: int) -> float | None:
    """A process's date of birth moves when the system's clock is set; the kernel's own count does not."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def is_alive(status: Status) -> bool:
    """True when the process that leads the run still lives on this machine."""
    import psutil

    if not status.pid or status.is_copy or not _may_be_here(status):
        return False
    try:
        process = psutil.Process(status.pid)
        since_boot_s = _started_since_boot_s(status.pid)
        if since_boot_s is None or status.pid_started > _OLDEST_DATE:
            is_same = abs(process.create_time() - status.pid_started) < 2.0
        else:
            is_same = abs(since_boot_s - status.pid_started) < 0.005
        return process.status() != psutil.STATUS_ZOMBIE and is_same
    except psutil.Error:
        return False
