"""The run folder: what lies where, and who may go on in it.

A run folder and the event log in it are the contract between training, supervising and watching. This room
knows paths and small JSON files only.

    config.yaml   the resolved config          events/run.jsonl        global numbers, one line per step
    plan.json     what was expected            events/rank00000.jsonl  each rank's own times and memory
    env.json      versions and machine         checkpoints/            step-00000050/ ...
    status.json, progress.json   where it stands: the launcher's word and rank 0's (see status.py)
    tensorboard/  wandb/  logs/  final/
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from duoka.errors import StorageError


@dataclass(frozen=True)
class RunFolder:
    """Names of everything in one run's folder. Making one touches no disk."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def env(self) -> Path:
        return self.path / "env.json"

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def progress(self) -> Path:
        return self.path / "progress.json"

    @property
    def events(self) -> Path:
        return self.path / "events"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def lock(self) -> Path:
        return self.path / ".lock"

    @property
    def final(self) -> Path:
        """The result in the field's own format: a PEFT folder (adapters) or a transformers folder."""
        return self.path / "final"

    def exists(self) -> bool:
        """True when a run was started here before."""
        return self.config.is_file()

    def make(self) -> None:
        """Create the folder and its subfolders; what is there stays."""
        try:
            for folder in (self.path, self.events, self.checkpoints, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"cannot make the run folder {self.path}: {_dead_link(self.path) or error.strerror or error}",
                fix="set output: to a folder that you may write to",
            ) from None


def _dead_link(path: Path) -> str:
    """A link to a disk that is not mounted, say; the system's own word for it is "File exists"."""
    for one in (path, *path.parents):
        if os.path.islink(one) and not os.path.exists(one):
            return f"{one} is a link to {os.readlink(one)}, which is not there"
    return ""


def read_owner(run: RunFolder) -> str:
    """The mark of the start that holds this folder, which it leaves in its lock; empty where nobody has left one."""
    try:
        with open_plain(run.lock) as file:
            return file.read().decode("ascii")
    except (OSError, ValueError):
        return ""


def apply_umask(folder: Path) -> None:
    """Give a draft folder and its files the modes that the user's umask asks for.

    Temporary folders, and files that safetensors writes, are for their owner alone; results follow the umask.
    """
    probe = folder / ".umask"
    os.close(os.open(probe, os.O_WRONLY | os.O_CREAT, 0o666))
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for path in folder.rglob("*"):
        path.chmod(mode | (mode & 0o444) >> 2 if path.is_dir() else mode)
    folder.chmod(mode | (mode & 0o444) >> 2)


def remove_folder(folder: Path) -> None:
    """Of a link (results were moved to another disk) the link alone; what stays behind is tried again."""
    with suppress(OSError):
        if folder.is_symlink():
            folder.unlink()
        else:
            shutil.rmtree(folder, ignore_errors=True)


def write_asked(path: Path, text: str) -> None:
    """A page or picture where a user wants it: its folder is made, and what is no place for it is said to be none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, text)
    except (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError) as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror or error}", fix="give a file in a folder that you may write to"
        ) from error


def write_text_atomic(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace a small file in one step, so that a reader never sees half of it; `durable`: also not after a crash."""
    # Not by mkstemp, whose files are for their owner alone: the umask says who may read this one.
    name = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:  # a Ctrl-C too must leave no half-written file behind; it goes on upwards
        name.unlink(missing_ok=True)
        raise


def open_plain(path: Path) -> BinaryIO:
    """For reading; what is no plain file is an OSError: a named pipe would wait for somebody to write into it."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
    return os.fdopen(handle, "rb")


def json_lines(text: str) -> list[Any]:
    """What stands on each line. str.splitlines would cut at U+2028 and its like too, which JSON leaves inside of texts.

    Raises ValueError.
    """
    return [json.loads(line) for line in text.split("\n") if line]


def write_json_atomic(path: Path, value: Mapping[str, Any], *, durable: bool = True) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_text_atomic(path, text, durable=durable)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a small JSON file, or None when it is missing or damaged."""
    try:
        if not path.is_file():  # opening a named pipe would wait for ever
            return None
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
