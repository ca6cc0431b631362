"""May this config work in this run folder? A new folder, the same run to go on with, or a refusal that says why.

Asked by `duoka train` before anything starts. Two processes never work in one folder: a lock that the operating
system lets go of when its holder dies sees to it. Nothing that is there is overwritten or deleted.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from duoka.cluster.connection import SECRET
from duoka.config.changes import LENGTH_KEYS, allowed_changes, how_to_go_on, refused_changes
from duoka.config.load import load_config
from duoka.config.loaded import Loaded
from duoka.config.paths import given_path
from duoka.config.schema import RunConfig
from duoka.errors import ConfigError, DuokaError, StorageError, typed
from duoka.process.lifeline import parent_pid
from duoka.runs.events import read_steps
from duoka.runs.folder import RunFolder
from duoka.runs.manifest import CONFIG, find_requested, has_whole, list_checkpoints, requested_name
from duoka.runs.status import is_alive, read_status

ClaimKind = Literal["new", "resumed", "finished"]
JOIN_FOLDER = ".join"
MEETING_LOCK = f"{SECRET}.lock"
_OUR_NAMES = {
    "config.yaml", "plan.json", "env.json", "status.json", "progress.json", "events", "checkpoints", "tensorboard",
    "wandb", "logs", "final", "data.json", "memory.json", "evals", "report.html", ".lock", JOIN_FOLDER, SECRET,
    MEETING_LOCK,
}  # fmt: skip


def find_run_folder(loaded: Loaded) -> RunFolder:
    """The config's `output`; or, for a run's own stored config, the folder that it lies in."""
    own = loaded.path.name == "config.yaml" and (loaded.path.parent / "events").is_dir()
    if own and loaded.origins.get("output") != "command line":
        return RunFolder(loaded.path.parent)
    return RunFolder(given_path(loaded.config.output))


def check_claim(loaded: Loaded, run: RunFolder) -> ClaimKind:
    """What a start in this folder would be. Raises when it must not be; writes nothing."""
    if run.path.exists() and not run.path.is_dir():
        raise StorageError(f"output is {run.path}, which is a file", fix="set output: to a folder")
    if not run.path.is_dir():
        _check_resume(loaded, run)
        return "new"
    check_nobody_works(run)
    _check_resume(loaded, run)
    if not run.exists() and not list_checkpoints(run.checkpoints):  # without a config.yaml, checkpoints have theirs
        others = sorted(entry.name for entry in run.path.iterdir() if entry.name not in _OUR_NAMES)
        if others:
            raise ConfigError(
                f"output is {run.path}, which holds other files ({', '.join(others[:3])}) and no run",
                fix="set output: to a folder of its own",
            )
        return "new"
    if not _has_results(run):
        return "new"
    old = _check_same_settings(loaded, run)
    if loaded.config.checkpoint.resume == "never":
        raise ConfigError(
            f"{run.path} holds a run already, and checkpoint.resume is never",
            fix="write resume: auto to go on with it, or another output: for a new run",
        )
    status = read_status(run)
    if status is None or status.state != "done" or not run.final.is_dir():
        return "resumed"
    return "resumed" if _goes_on(old, loaded.config) else "finished"


def _goes_on(old: RunConfig, new: RunConfig) -> bool:
    """Whether a run that ended has something to do again: more epochs, or another place to begin from."""
    is_longer = any(one.key in LENGTH_KEYS for one in allowed_changes(old, new))
    return is_longer or new.checkpoint.resume not in ("auto", "never", old.checkpoint.resume)


def _check_resume(loaded: Loaded, run: RunFolder) -> None:
    """A named checkpoint that is not there, before anything is prepared."""
    resume = loaded.config.checkpoint.resume
    if resume in ("auto", "never") or find_requested(resume, run, loaded.base) is not None:
        return
    names = ", ".join(folder.name for folder in list_checkpoints(run.checkpoints))
    raise ConfigError(
        f"checkpoint.resume is {resume}, and there is no checkpoint, folder or run {requested_name(resume)}",
        fix=f"{run.checkpoints} has: {names or 'none'}",
    )


def check_nobody_works(run: RunFolder) -> None:
    status = read_status(run)
    if status is not None and status.state in ("starting", "running") and is_alive(status):
        if status.pid in (os.getpid(), parent_pid()):  # an elastic world's launcher leads its run
            return
        raise ConfigError(
            f"another process works in {run.path}: pid {status.pid}, at step {status.step}",
            fix=f"wait for it, or stop it:   duoka runs stop {typed(run.path)}",
        )


def _has_results(run: RunFolder) -> bool:
    """Results that a start with other settings would mix up: a step, a checkpoint, a final model."""
    checkpoints = run.checkpoints.is_dir() and any(run.checkpoints.iterdir())
    return checkpoints or run.final.is_dir() or bool(read_steps(run))


def _check_same_settings(loaded: Loaded, run: RunFolder) -> RunConfig:
    try:
        old = load_config(_settings_of(run))
    except DuokaError as error:
        raise ConfigError(
            f"{run.path} holds a run whose config.yaml this duoka cannot read",
            where="\n".join(error.lines()),
            fix="bring that file back to go on with the run, or write another output: for a new one",
        ) from None
    differences = refused_changes(old.config, loaded.config)
    if differences:
        raise ConfigError(
            f"{run.path} holds a run with other settings, and one run never mixes two",
            where="\n".join(f"{one.key}: {one.old} there, {one.new} now" for one in differences),
            fix=how_to_go_on(differences, old.config, str(run.path)),
        )
    return old.config


def _settings_of(run: RunFolder) -> Path:
    """What the newest checkpoint was written under; run.config may tell of a start that was refused after all.

    A damaged one is passed over here as it is when the run goes on.
    """
    found = (folder / CONFIG for folder in list_checkpoints(run.checkpoints) if has_whole(folder, CONFIG))
    settings = next(found, run.config)
    if not settings.is_file():  # reading a named pipe would wait for ever
        raise StorageError(f"{settings} is missing, or no file")
    return settings


@contextmanager
def hold_run(run: RunFolder) -> Iterator[None]:
    """Lock the folder against other processes as long as this one lives."""
    run.make()
    with _locked(run.lock, run) as file:
        with suppress(OSError):  # a full disk is said by who cannot do without
            os.ftruncate(file, 0)
            os.pwrite(file, uuid.uuid4().hex.encode(), 0)
        yield


@contextmanager
def hold_meeting(run: RunFolder) -> Iterator[None]:
    """The folder's only rendezvous of machines, between two worlds too: who holds it clears what ranks left there.

    The run's own lock is for rank 0 to take; here only whether somebody else has it is looked at.
    """
    run.make()
    with _locked(run.path / MEETING_LOCK, run):
        with _locked(run.lock, run):
            pass
        yield


@contextmanager
def _locked(path: Path, run: RunFolder) -> Iterator[int]:
    import fcntl

    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StorageError(
            f"cannot write in {run.path}: {error.strerror or error}",
            fix="set output: to a folder that you may write to",
        ) from None
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another process works in {run.path}",
                fix=f"wait for it, or stop it:   duoka runs stop {typed(run.path)}",
            ) from None
        except OSError:
            # Some network file systems have no locks; status.json is all there is then.
            check_nobody_works(run)
        yield file
    finally:
        os.close(file)
