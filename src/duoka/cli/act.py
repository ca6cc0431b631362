"""What the page of `duoka board --control` does, as the commands do it. Not a command itself."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duoka.cli.act_chat import Chat
from duoka.cli.act_draft import OUTPUT, form_fields, plan_draft, prepare_start
from duoka.cluster.listing import stop_run
from duoka.errors import ConfigError, DuokaError
from duoka.runs.find import is_run
from duoka.runs.folder import RunFolder
from duoka.runs.status import is_alive, read_status
from duoka.watch.control import Draft

EXPORTS = {
    "folder": [], "f16": ["--gguf", "f16"], "q8_0": ["--gguf", "q8_0"], "q4_0": ["--gguf", "q4_0"],
    "ollama": ["--to", "ollama"],
}  # fmt: skip
_TAIL_LINES, _TAIL_BYTES = 12, 4096


@dataclass(frozen=True)
class Job:
    """A process that was begun from a page, which outlives the board."""

    kind: str
    run: RunFolder
    process: subprocess.Popen[bytes]
    log: Path
    begins_at: int  # in the log

    def to_json(self) -> dict[str, Any]:
        code = self.process.poll()
        state = "running" if code is None else "done" if code == 0 else "failed"
        return {"kind": self.kind, "run": self.run.name, "state": state, "text": "" if code is None else self._said()}

    def _said(self) -> str:
        with self.log.open("rb") as log:
            size = log.seek(0, 2)
            log.seek(max(self.begins_at, size - _TAIL_BYTES))
            lines = log.read().decode("utf-8", "replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])


class Acts:
    """Takes a page's wishes. What trains or exports runs on when the board ends; the chat ends with it."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []
        self._chat = Chat()
        self._lock = threading.Lock()

    def form(self) -> Mapping[str, Any]:
        return form_fields()

    def plan(self, draft: Draft) -> Mapping[str, Any]:
        with self._lock:  # a form that is typed in asks often: one plan at a time
            try:
                return plan_draft(draft)
            except DuokaError as error:
                return {"yaml": "", "faults": error.lines()}

    def start(self, folder: Path, draft: Draft) -> str:
        with self._lock:
            run, command = prepare_start(folder, draft)
            if any(job.run.path == run.path and job.process.poll() is None for job in self._jobs):
                raise ConfigError(f"{run.name} is being started already")
            self._begin("start", run, command, OUTPUT)
        return f"{run.name} is starting; what it prints is in {run.logs / OUTPUT}"

    def stop(self, run: RunFolder) -> str:
        return stop(run)

    def go_on(self, run: RunFolder) -> str:
        return go_on(run)

    def export(self, run: RunFolder, kind: str) -> str:
        if kind not in EXPORTS:
            raise ConfigError(f"export to {kind!r} is not known", fix=f"known: {', '.join(EXPORTS)}")
        target = run.path / f"export-{kind}"
        with self._lock:
            is_busy = any(job.kind == f"export {kind}" and job.run.path == run.path and job.process.poll() is None
                          for job in self._jobs)  # fmt: skip
            if target.exists() or is_busy:
                raise ConfigError(f"{target} exists, and nothing is overwritten", fix="move it away, then export again")
            command = [sys.executable, "-m", "duoka", "export", str(run.path), "-o", str(target), *EXPORTS[kind]]
            self._begin(f"export {kind}", run, command, "board-export.log")
        return f"exporting {run.name} to {target}"

    def chat(self, run: RunFolder) -> str:
        return self._chat.open(run)

    def jobs(self) -> Sequence[Mapping[str, Any]]:
        """Runs that came up speak for themselves, in the list."""
        self._jobs = [job for job in self._jobs if job.kind != "start" or not is_run(job.run.path)]
        return [*self._chat.jobs(), *(job.to_json() for job in self._jobs[-8:])]

    def chat_address(self) -> tuple[int, str] | None:
        return self._chat.address()

    def close(self) -> None:
        self._chat.close()

    def _begin(self, kind: str, run: RunFolder, command: Sequence[str], log: str) -> None:
        path = run.logs / log
        begins_at = path.stat().st_size if path.is_file() else 0
        self._jobs = [job for job in self._jobs if (job.kind, job.run.path) != (kind, run.path)]
        self._jobs.append(Job(kind, run, _start_apart(command, path), path, begins_at))


def stop(run: RunFolder) -> str:
    """Ask it to save and leave. That may take minutes: the answer does not wait for it, and its limit is kept here."""
    status = read_status(run)
    if status is None or not is_alive(status) or status.state not in ("starting", "running"):
        raise ConfigError(f"no process of {run.path} lives on this machine")
    said: list[str] = []

    def work() -> None:
        try:
            stop_run(run, grace_s=None, at_once=False, say=said.append)
        except DuokaError as error:  # it ended by itself meanwhile
            said.extend(error.lines())

    threading.Thread(target=work, name="duoka-stop", daemon=True).start()
    return f"asked pid {status.pid} to save and leave"


def go_on(run: RunFolder) -> str:
    """Start the run's own config again, on as many processes as it had, in a session of its own."""
    status = read_status(run)
    if status is not None and is_alive(status) and status.state in ("starting", "running"):
        raise ConfigError(f"{run.name} is running already")
    if not run.config.is_file():
        raise ConfigError(f"{run.name} has no config.yaml to go on with")
    nproc = max(1, status.world_size if status else 1)
    command = [sys.executable, "-m", "duoka", "train", str(run.config.resolve()), f"output={run.path.resolve()}"]
    _start_apart([*command, "--nproc", str(nproc)], run.logs / OUTPUT)
    return f"started with {nproc} {'process' if nproc == 1 else 'processes'}; what it prints is in logs/{OUTPUT}"


def _start_apart(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """In a session of its own: it outlives the board, and a Ctrl-C there does not reach it."""
    log.parent.mkdir(exist_ok=True)
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    # Reaped when it ends: a zombie would count as a run's process.
    threading.Thread(target=process.wait, name="duoka-reap", daemon=True).start()
    return process
