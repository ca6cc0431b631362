"""What a checkpoint consists of: manifest.json, written and fsynced last, names every file with size and checksum.

A folder counts as a checkpoint only under its final name and with a manifest that its files agree with. Knows names
and files, no tensors; train writes and reads checkpoints through it, cluster looks for them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from duoka.config.paths import given_path, is_folder
from duoka.errors import StorageError
from duoka.runs.folder import RunFolder, read_json

MANIFEST = "manifest.json"
CONFIG = "config.yaml"
FORMAT = 2
_BLOCK_BYTES = 1 << 22
_FOLDER = re.compile(r"^step-(\d{8})$")


class OtherFormat(StorageError):
    """A checkpoint of another version, which may be whole: passed over as damaged it would be removed later."""


@dataclass(frozen=True)
class FileRecord:
    size_bytes: int
    crc32: str


@dataclass(frozen=True)
class Manifest:
    """`layout` and `world_size` say how it was written; any layout can read it. `data`: the samples' fingerprint.

    `base`: which model training began with (hub/base.py); empty in checkpoints of older versions and of own loops.
    """

    step: int
    layout: dict[str, Any]
    world_size: int
    config_hash: str
    data: str
    versions: dict[str, str]
    files: dict[str, FileRecord]
    base: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """The step in a checkpoint's name, also of one that was moved out of the way (step-00000004.damaged-2)."""
    return int(folder.name.partition(".")[0].split("-")[1])


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """Folders under their final names, newest first; their content is not looked at."""
    if not checkpoints.is_dir():
        return []
    return sorted((p for p in checkpoints.iterdir() if _FOLDER.match(p.name) and p.is_dir()), reverse=True)


def find_requested(resume: str, run: RunFolder, base: Path) -> Path | None:
    """The folder that `checkpoint.resume` names: a checkpoint, or a folder with checkpoints; None when there is none.

    A path from here or from the config's folder, a step or a checkpoint's name of this run, or the name of a run.
    """
    given, own = given_path(resume), run.checkpoints / requested_name(resume)
    # A number is a step of this run before it is a folder that happens to have that name.
    places: list[Path] = [own] if own.name != resume else []
    places += [given, base / given, own, run.path.parent / given, Path("runs") / given]
    for place in places:
        if is_folder(place):
            return place / "checkpoints" if (place / "checkpoints").is_dir() else place
    return None


def requested_name(resume: str) -> str:
    """What `checkpoint.resume` asks for, in words for people: `resume: 4` is step-00000004."""
    return folder_name(int(resume)) if resume.isdecimal() and len(resume) < 20 else resume


def is_checkpoint(folder: Path) -> bool:
    """True for a folder under a checkpoint's name; whether it is whole is another question."""
    return bool(_FOLDER.match(folder.resolve().name))


def check_file(path: Path) -> FileRecord:
    """Size and CRC-32 of a file. A checksum against damage, not against forgers, at memory's speed."""
    checksum = size_bytes = 0
    blocks = [bytearray(_BLOCK_BYTES), bytearray(_BLOCK_BYTES)]
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(1) as ahead:
        reading = ahead.submit(file.readinto, blocks[0])
        # The next block is read while this one is summed.
        while size := reading.result():
            reading = ahead.submit(file.readinto, blocks[1])
            checksum = zlib.crc32(memoryview(blocks[0])[:size], checksum)
            size_bytes += size
            blocks.reverse()
    return FileRecord(size_bytes, f"{checksum:08x}")


def write_file(path: Path, content: bytes) -> FileRecord:
    """A small file of a checkpoint, on the disk when this returns."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(len(content), f"{zlib.crc32(content):08x}")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """The last file of a checkpoint; everything before it is on the disk when it is."""
    facts = asdict(manifest)
    text = json.dumps(facts | {"digest": _digest(facts)}, indent=1, sort_keys=True)
    write_file(folder / MANIFEST, (text + "\n").encode())
    sync_folder(folder)


def _digest(facts: dict[str, Any]) -> str:
    """A changed digit in a manifest would still be JSON: it answers for itself too."""
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


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
        raise StorageError(f"{MANIFEST} is missing or no JSON")
    if raw.get("format", 0) != FORMAT and isinstance(raw.get("format"), int) and "files" in raw:
        raise OtherFormat(
            f"{folder.name}: {MANIFEST} has format {raw['format']}, and this duoka reads {FORMAT}",
            fix="go on with the version of duoka that wrote it, or start a new run with another output:",
        )
    digest = raw.pop("digest", None)
    if digest != _digest(raw):
        raise StorageError(f"{MANIFEST}: content changed")
    try:
        files = {name: FileRecord(**record) for name, record in raw.pop("files").items()}
        return Manifest(files=files, **raw)
    except (KeyError, TypeError, AttributeError):
        raise StorageError(f"{MANIFEST} is damaged") from None


def check_files(folder: Path, manifest: Manifest, names: Iterable[str] | None = None) -> list[str]:
    """What is wrong with the files of a checkpoint: missing, cut, or changed; empty when they are whole."""
    wrong = []
    for name in manifest.files if names is None else names:
        fault = _file_fault(folder, name, manifest.files[name])
        if fault:
            wrong.append(f"{name}: {fault}")
    return wrong


def has_whole(folder: Path, name: str) -> bool:
    """Whether a checkpoint holds this file as it was written, under its own step's name."""
    try:
        manifest = read_manifest(folder)
    except StorageError:
        return False
    is_other_steps = bool(find_misnaming(folder, manifest))
    return name in manifest.files and not is_other_steps and not check_files(folder, manifest, [name])


def find_misnaming(folder: Path, manifest: Manifest) -> str:
    """What is wrong with a checkpoint's name: a copy under another step's name would pass for the newest."""
    name = folder.name if _FOLDER.match(folder.name) else folder.resolve().name
    if _FOLDER.match(name) and name != folder_name(manifest.step):
        return f"{MANIFEST} is that of step {manifest.step}: somebody renamed or copied {folder_name(manifest.step)}"
    return ""


def _file_fault(folder: Path, name: str, wanted: FileRecord) -> str:
    path = folder / name
    if Path(name).name != name:
        return "not a name inside the folder"
    try:
        if not path.is_file():
            return "missing"
        if path.stat().st_size != wanted.size_bytes:
            return f"{path.stat().st_size:,} bytes, {wanted.size_bytes:,} were written"
        return "" if check_file(path) == wanted else "content changed"
    except OSError as error:
        return error.strerror or str(error)
