"""What a checkpoint consists of: manifest.json, written and fsynced last, names every file with size and hash.

A folder counts as a checkpoint only under its final name and with a manifest that its files agree with.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from duoka.errors import StorageError
from duoka.runs.folder import read_json

MANIFEST = "manifest.json"
FORMAT = 1
_FOLDER = re.compile(r"^step-(\d{8})$")


@dataclass(frozen=True)
class FileRecord:
    size_bytes: int
    blake2b: str


@dataclass(frozen=True)
class Manifest:
    """`layout` and `world_size` say how it was written; any layout can read it."""

    step: int
    layout: dict[str, Any]
    world_size: int
    config_hash: str
    versions: dict[str, str]
    files: dict[str, FileRecord]
    format: int = FORMAT


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """Folders under their final names, newest first; their content is not looked at."""
    if not checkpoints.is_dir():
        return []
    return sorted((p for p in checkpoints.iterdir() if _FOLDER.match(p.name) and p.is_dir()), reverse=True)


def hash_file(path: Path) -> FileRecord:
    digest = hashlib.blake2b(digest_size=20)
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return FileRecord(path.stat().st_size, digest.hexdigest())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """The last file of a checkpoint; everything before it is on the disk when it is."""
    path = folder / MANIFEST
    with path.open("w", encoding="utf-8") as file:
        json.dump(asdict(manifest), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make names in a folder durable (a rename alone is not, on power loss)."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint; StorageError says what is wrong with it."""
    raw: dict[str, Any] | None = read_json(folder / MANIFEST)
    if raw is None:
        raise StorageError(f"the checkpoint {folder} has no readable {MANIFEST}")
    try:
        files = {name: FileRecord(**record) for name, record in raw.pop("files").items()}
        manifest = Manifest(files=files, **raw)
    except (KeyError, TypeError, AttributeError):
        raise StorageError(f"the checkpoint {folder} has a {MANIFEST} that is damaged") from None
    if manifest.format != FORMAT:
        raise StorageError(
            f"the checkpoint {folder} has format {manifest.format}, this duoka reads {FORMAT}",
            fix="use the duoka version that wrote it",
        )
    return manifest


def check_files(folder: Path, manifest: Manifest) -> list[str]:
    """What is wrong with the files of a checkpoint: missing, cut, or changed; empty when it is whole."""
    wrong = []
    for name, wanted in manifest.files.items():
        path = folder / name
        if Path(name).name != name:
            wrong.append(f"{name}: not a name inside the folder")
        elif not path.is_file():
            wrong.append(f"{name}: missing")
        elif path.stat().st_size != wanted.size_bytes:
            wrong.append(f"{name}: {path.stat().st_size} bytes, {wanted.size_bytes} were written")
        elif hash_file(path) != wanted:
            wrong.append(f"{name}: content changed")
    return wrong
