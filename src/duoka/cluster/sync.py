"""`duoka sync run.yaml --hosts a,b`: code, the config, small data and the list of packages, brought to other machines.

Called by cli/sync.py. Files of the working folder go to the same path there, over ssh, to a receiver that writes below
that folder only (node_receive.py); what is alike already is not sent again. Nothing is deleted or installed there.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from duoka.cluster import node_receive
from duoka.cluster.node_receive import digest_of
from duoka.cluster.ssh import CONNECT_S, Connection, Reader, ask, run_sent_python, silent, why_lost
from duoka.config.hosts import Host
from duoka.errors import Fault, Faults
from duoka.units import format_bytes

LOCK = "duoka-lock.txt"
MOST_FILES = 20_000
_COMPARE_S, _WRITE_S = CONNECT_S + 300.0, 120.0
_CHUNK = 1 << 18
_SHOWN = 5
# Made by programs, and made again where they are missing.
_MADE = {"__pycache__", "node_modules", "venv", "build", "dist"}


@dataclass(frozen=True)
class Cargo:
    """Files by name below `folder`: (size, digest)."""

    folder: Path
    files: Mapping[str, tuple[int, str]]
    left_out: Sequence[str] = ()  # why which path is not brought

    @property
    def num_bytes(self) -> int:
        return sum(size for size, _ in self.files.values())


@dataclass(frozen=True)
class Brought:
    """What one machine got."""

    host: Host
    num_files: int
    num_bytes: int
    num_alike: int


def pack(folder: Path, named: Sequence[str], output: Path, limit_bytes: int) -> Cargo:
    """What is to be brought: what git does not ignore, and the files and folders that the config names.

    Nothing that lies elsewhere, or that a link leads to. Raises Faults for more than `limit_bytes`, with the largest.
    """
    root = folder.resolve()
    left_out: list[str] = []
    found = dict.fromkeys(_code_files(root))
    for path in named:
        full = Path(os.path.abspath(root / path))
        if not full.is_relative_to(root) or not full.resolve().is_relative_to(root):
            left_out.append(f"{full} is not below {root}: it is not brought, and must be on the others under that path")
        elif full.is_dir():
            inner = (name for name in _walk(full) if (full / name).is_file() and not _is_hidden(name))
            found |= dict.fromkeys(str((full / name).relative_to(root)) for name in inner)
        elif full.is_file():
            found[str(full.relative_to(root))] = None
    names = [name for name in found if not (root / name).is_relative_to(output.resolve())]
    inside = [name for name in names if (root / name).resolve().is_relative_to(root)]
    left_out += [
        f"{name} is a link to {(root / name).resolve()}, out of {root}: it is not brought"
        for name in names
        if name not in inside
    ]
    sizes = {name: (root / name).stat().st_size for name in inside}
    _check_size(sizes, root, limit_bytes)
    return Cargo(root, {name: (size, digest_of(str(root / name))) for name, size in sizes.items()}, left_out)


def _check_size(sizes: Mapping[str, int], root: Path, limit_bytes: int) -> None:
    total = sum(sizes.values())
    if total <= limit_bytes and len(sizes) <= MOST_FILES:
        return
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:_SHOWN]
    shown = ", ".join(f"{name} ({format_bytes(sizes[name])})" for name in largest)
    what = (
        f"{len(sizes):,} files of {format_bytes(total)}, and at most {MOST_FILES:,} of {format_bytes(limit_bytes)} go"
    )
    fix = "put large data on a shared disk, list it in .gitignore, or raise the limit:   --limit 20GiB"
    raise Faults([Fault(f"{what}; the largest: {shown}", file=str(root), fix=fix)], title="too much to bring")


def _code_files(root: Path) -> Iterator[str]:
    """Without hidden files: none is needed to train, and some hold secrets."""
    for name in _listed(root):
        if not _is_hidden(name) and not _MADE.intersection(name.split("/")) and (root / name).is_file():
            yield name


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _listed(root: Path) -> Iterable[str]:
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=60, check=True)
        return sorted(name.decode(errors="surrogateescape") for name in done.stdout.split(b"\0") if name)
    except (OSError, subprocess.SubprocessError):
        return _walk(root)


def _walk(root: Path) -> Iterator[str]:
    for here, folders, names in os.walk(root):
        folders[:] = sorted(one for one in folders if not one.startswith(".") and one not in _MADE)
        for name in sorted(names):
            yield os.path.relpath(os.path.join(here, name), root)


def write_lock(folder: Path) -> Path:
    """The packages of this environment with their versions, as pip reads them; duoka itself is code."""
    found = {str(one.name): str(one.version) for one in metadata.distributions() if one.name}
    lines = sorted(f"{name}=={version}" for name, version in found.items() if name.lower() not in ("duoka", "pip"))
    path = folder / LOCK
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def bring(hosts: Sequence[Host], cargo: Cargo, to: str = "") -> list[Brought]:
    """To the folder `to` on each machine, by default the same path as here. Raises Faults with all machines' faults."""
    reader = Reader()
    source = Path(node_receive.__file__).read_bytes()
    nodes = [Connection(host, run_sent_python(len(source))) for host in hosts]
    try:
        for node in nodes:
            reader.add(node)
            node.send_bytes(source)
        return _bring(nodes, reader, cargo, to or str(cargo.folder))
    finally:
        for node in nodes:
            node.hang_up()
        for node in nodes:
            node.close(2)
        reader.close()


def _bring(nodes: list[Connection], reader: Reader, cargo: Cargo, to: str) -> list[Brought]:
    have = {"have": {"folder": to, "files": {name: list(facts) for name, facts in cargo.files.items()}}}
    answers = ask(nodes, reader, [have] * len(nodes), _COMPARE_S) or []
    wanted: dict[Connection, list[str]] = {}
    faults = []
    for node, answer in zip(nodes, answers, strict=True):
        if isinstance(answer, str):
            faults.append(_lost(node, answer, _COMPARE_S))
        elif answer.get("error"):
            faults.append(Fault(f"{node.host}: {answer['error']}", fix="see who owns the folder there"))
        else:  # no name that was not offered: it would be read from this machine's disk
            wanted[node] = [name for name in answer["want"] if name in cargo.files]
    if faults:
        raise Faults(faults, title="cannot bring the files")
    _pump({node: _frames(cargo, names) for node, names in wanted.items()}, reader)
    written = ask(nodes, reader, [{"done": True}] * len(nodes), _WRITE_S) or []
    for node, answer in zip(nodes, written, strict=True):
        if isinstance(answer, str):
            faults.append(_lost(node, answer, _WRITE_S))
        elif answer["error"]:
            faults.append(Fault(f"{node.host}: {answer['error']}", fix="mend that, and type the same again"))
    if faults:
        raise Faults(faults, title="cannot bring the files")
    return [
        Brought(node.host, len(names), sum(cargo.files[name][0] for name in names), len(cargo.files) - len(names))
        for node, names in wanted.items()
    ]


def _lost(node: Connection, answer: str, seconds: float) -> Fault:
    what, fix = why_lost(node, answer) if node.code is not None else silent(node, seconds)
    return Fault(what, fix=fix)


def _frames(cargo: Cargo, names: Iterable[str]) -> Iterator[bytes]:
    """Each file as a line of JSON and its bytes."""
    for name in names:
        path, size = cargo.folder / name, cargo.files[name][0]
        is_program = os.access(path, os.X_OK)
        yield json.dumps({"file": {"name": name, "size": size, "is_program": is_program}}).encode() + b"\n"
        left = size
        with path.open("rb") as file:
            while left and (chunk := file.read(min(left, _CHUNK))):
                left -= len(chunk)
                yield chunk
        if left:
            what = f"{path} became shorter while it was sent"
            raise Faults([Fault(what, fix="type the same again")], title="cannot bring the files")


def _pump(frames: dict[Connection, Iterator[bytes]], reader: Reader) -> None:
    """To all machines side by side; no more of a file is in memory than a machine is about to take."""
    going = dict(frames)
    while going:
        for node, chunks in list(going.items()):
            node.flush()
            if not node.look():
                del going[node]
            elif not node.is_behind:
                chunk = next(chunks, None)
                if chunk is None:
                    del going[node]
                else:
                    node.send_bytes(chunk)
        if all(node.is_behind for node in going):
            reader.read(0.005)
