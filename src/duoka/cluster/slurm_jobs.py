"""Which of a folder's runs are jobs of Slurm, how these stand, and how one is stopped. For `duoka runs`.

A submitted job is noted beside its run folder (RUN.slurm.json): before it starts there is no run to be found.
"""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from duoka.cluster.slurm import GOING_ON, job_states
from duoka.errors import ConfigError
from duoka.runs.folder import read_json, write_json_atomic

_SUFFIX = ".slurm.json"
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")
MOST_POINTS = 1000


@dataclass(frozen=True)
class QueuedJob:
    """A job that has not ended, and the run that it is."""

    run: Path
    number: str  # of an array's task: 4711_3
    state: str  # in Slurm's words, lower case
    reason: str

    @property
    def is_waiting(self) -> bool:
        return self.state.upper() in WAITING


def note_job(run: Path, number: str) -> None:
    """To be found again by `duoka runs`."""
    write_json_atomic(_note(run), {"job": number}, durable=False)


def _note(run: Path) -> Path:
    return run.with_name(run.name + _SUFFIX)


def jobs_in(folder: Path) -> list[QueuedJob]:
    """Those that Slurm still has; none where there is no Slurm."""
    notes = {path.name.removesuffix(_SUFFIX): read_json(path) for path in sorted(folder.glob(f"*{_SUFFIX}"))}
    return [job for name, note in notes.items() if note for job in _find(folder / name, str(note.get("job", "")))]


def find_job(run: Path) -> QueuedJob | None:
    note = read_json(_note(run))
    return next(iter(_find(run, str(note.get("job", "")))), None) if note else None


def _find(run: Path, number: str) -> list[QueuedJob]:
    try:
        states = job_states(number)
    except ConfigError:  # no Slurm on this machine
        return []
    task = number.partition("_")[2]
    for one in states:
        # An array that waits is one line with all its tasks: 0-3.
        if one.state in GOING_ON and (not task or one.task in ("", task) or _has_task(one.task, task)):
            return [QueuedJob(run, number, one.state.lower(), one.reason)]
    return []


def _has_task(tasks: str, task: str) -> bool:
    """Whether `0-3,7%2` has 3 in it."""
    for part in tasks.partition("%")[0].split(","):
        low, _, high = part.partition("-")
        if low.isdecimal() and (high or low).isdecimal() and int(low) <= int(task) <= int(high or low):
            return True
    return False


def stop_job(job: QueuedJob, say: Callable[[str], None]) -> None:
    """A job that waits is taken back; one that runs saves and leaves, and is not queued again."""
    command = ["scancel", job.number] if job.is_waiting else ["scancel", "--signal=USR2", job.number]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise ConfigError(f"scancel refused job {job.number}", where=done.stderr.strip(), fix="squeue --me shows yours")
    what = "is taken back: it had not begun" if job.is_waiting else "was asked to save and leave"
    say(f"job {job.number} {what}")


def read_sweep(texts: Sequence[str]) -> list[tuple[str, ...]]:
    """Of `optim.lr=[1e-4,3e-4]` and `optim.name=[adamw,muon]`: all four pairs of overrides."""
    axes = []
    for text in texts:
        key, _, value = text.partition("=")
        inner = value.removeprefix("[").removesuffix("]")
        values = [word.strip() for word in inner.split(",") if word.strip()]
        if not key or len(values) < 2 or len(set(values)) < len(values):
            fix = "write two or more different values:   --sweep 'optim.lr=[1e-4,3e-4]'"
            raise ConfigError(f"--sweep is {json.dumps(text)}", fix=fix)
        axes.append([f"{key}={value}" for value in values])
    keys = [text.partition("=")[0] for text in texts]
    if len(set(keys)) < len(keys):
        raise ConfigError("--sweep names a key twice", fix="write all its values in one list")
    points = list(itertools.product(*axes))
    if len(points) > MOST_POINTS:
        raise ConfigError(f"--sweep makes {len(points):,} runs", fix=f"at most {MOST_POINTS:,} are submitted at once")
    return points


def point_name(point: Sequence[str]) -> str:
    """`lr=1e-4,name=muon`: of each key its last word. A model of the Hub or a path is no folder in a folder."""
    words = (one.partition("=") for one in point)
    return ",".join(f"{key.rpartition('.')[2]}={value.replace('/', '-')}" for key, _, value in words)
