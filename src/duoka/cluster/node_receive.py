"""The node's side of `duoka sync`: files come over ssh's stdin, and are written below one folder, nowhere else.

The standard library alone, as node_probe.py: sync.py sends this file's text first. A line of JSON says what follows;
behind "file" come so many bytes. A file appears whole or not at all. Nothing is deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import IO, Any

ANSWER = "duoka-answer "
_CHUNK = 1 << 20


class Escape(ValueError):
    """A name that leads out of the folder."""


def place_of(folder: str, name: str) -> str:
    """The path of `name` in `folder`. Raises Escape where it would be anywhere else, also by a link that is there."""
    parts = name.split("/")
    if os.path.isabs(name) or "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise Escape(f"{name!r} is no path inside of {folder}")
    root = os.path.realpath(folder)
    parent = os.path.realpath(os.path.join(root, *parts[:-1]))
    if parent != root and not parent.startswith(root + os.sep):
        raise Escape(f"{name}: a link there leads to {parent}, out of {folder}")
    return os.path.join(parent, parts[-1])


def digest_of(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def find_wanted(folder: str, files: dict[str, list[Any]]) -> list[str]:
    """Of `files`, (size, digest) by name, those that are not here as they are there."""
    wanted = []
    for name, (size, digest) in files.items():
        path = place_of(folder, name)
        is_same = os.path.isfile(path) and not os.path.islink(path) and os.path.getsize(path) == size
        if not (is_same and digest_of(path) == digest):
            wanted.append(name)
    return wanted


def receive(stream: IO[bytes], folder: str, name: str, size: int, is_program: bool) -> None:
    """One file, under a name of its own until all of it is here. Takes its bytes from the stream in any case."""
    left = size
    draft = ""
    try:
        path = place_of(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        draft = f"{path}.duoka-{os.getpid()}"
        with open(draft, "xb") as file:
            while left and (chunk := stream.read(min(left, _CHUNK))):
                left -= len(chunk)
                file.write(chunk)
        if left:
            raise OSError("the connection ended in the middle")
        os.chmod(draft, 0o755 if is_program else 0o644)
        os.replace(draft, path)
    except (OSError, Escape):
        if draft and os.path.exists(draft):
            os.unlink(draft)
        while left and (chunk := stream.read(min(left, _CHUNK))):
            left -= len(chunk)
        raise


def main() -> None:
    stream, folder, error, num_written = sys.stdin.buffer, "", "", 0
    for line in iter(stream.readline, b""):
        asked = json.loads(line) if line.strip() else {}
        try:
            if "have" in asked:
                folder = asked["have"]["folder"]
                os.makedirs(folder, exist_ok=True)
                answer({"want": find_wanted(folder, asked["have"]["files"])})
            elif "file" in asked:
                receive(stream, folder, **asked["file"])
                num_written += 1
            elif "done" in asked:
                answer({"written": num_written, "error": error})
        except (OSError, Escape) as found:
            error = error or str(found)
            if "have" in asked:
                answer({"want": [], "error": error})


def answer(facts: dict[str, Any]) -> None:
    sys.stdout.write(ANSWER + json.dumps(facts) + "\n")
    sys.stdout.flush()


if __name__ in ("__main__", "duoka_probe"):
    main()
