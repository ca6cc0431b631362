"""The far end of a connection that ssh keeps open: `python -m duoka.cluster.tether` on each node of `--hosts`.

It says what this node is like, starts the command that it is given, forwards signals, and ends that command with all
its processes when the near end (fleet.py) is gone: stdin's end, or its silence, is the sign. Only descendants of this
process are ever ended. What the command prints goes through as it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from duoka.cluster.node_probe import ANSWER  # before the JSON: a login shell may print lines of its own
from duoka.cluster.ranks import adopt_orphans
from duoka.process.interpreter import python_module
from duoka.process.lifeline import PARENT_PID

SILENT_S = 30.0  # without a beat of the near end for so long, it is gone
LEAVE_S = 7.0  # from there until SIGKILL: with the rest, below the promised 10 s
SEEN_WITHIN_S = 10.0  # disks that several machines share may be late
_LOOK_EVERY_S = 0.2


class NearEndGone(Exception):
    """Nobody is there any more who started this."""


class Orders:
    """Lines of JSON from the near end; an empty line says that it is still there."""

    def __init__(self) -> None:
        self._in = b""
        self._heard_at = time.monotonic()

    def take(self, wait_s: float) -> list[dict[str, Any]]:
        """What has come within `wait_s`. Raises NearEndGone."""
        if select.select([0], [], [], wait_s)[0]:
            data = os.read(0, 1 << 16)
            if not data:
                raise NearEndGone
            self._in += data
            self._heard_at = time.monotonic()
        elif time.monotonic() - self._heard_at > SILENT_S:
            raise NearEndGone
        *lines, self._in = self._in.split(b"\n")
        return [json.loads(line) for line in lines if line.strip()]

    def stream(self) -> Iterator[dict[str, Any]]:
        while True:
            yield from self.take(_LOOK_EVERY_S)


def main() -> int:
    adopt_orphans()
    orders, mark = Orders(), ""
    try:
        for order in orders.stream():
            if "look" in order:
                facts = _look(**order["look"])
                mark = facts["mark"]
                _answer(facts)
            elif "seen" in order:
                _answer({"seen": _is_seen(Path(order["seen"]))})
            elif "forget" in order:
                _forget(mark)
            elif "run" in order:
                return _run(orders, **order["run"])
    except NearEndGone:
        pass  # before anything was started
    finally:
        _forget(mark)
    return 0


def _forget(mark: str) -> None:
    if mark:
        with contextlib.suppress(OSError):
            os.unlink(mark)


def _answer(facts: dict[str, Any]) -> None:
    sys.stdout.write(ANSWER + json.dumps(facts) + "\n")
    sys.stdout.flush()


def _look(config: str, run: str, mark: str) -> dict[str, Any]:
    """What the near end compares before anything starts. `mark`: leave a file of this name where the run will be."""
    facts: dict[str, Any] = {
        "host": socket.gethostname(), "python": platform.python_version(), "code": code_digest(),
        "config": file_digest(Path(config)), "port": _free_port(), "mark": "", "cannot_write": "",
        "address": [*os.environ.get("SSH_CONNECTION", "").split(), "", "", ""][2],
    }  # fmt: skip
    if mark:
        path = existing_part(Path(run)) / mark
        try:
            path.touch()
            facts["mark"] = str(path)
        except OSError as error:
            facts["cannot_write"] = f"{path.parent}: {error.strerror or error}"
    return facts


def existing_part(path: Path) -> Path:
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def file_digest(path: Path) -> str:
    """Empty: there is no such file, or it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def code_digest() -> str:
    """Of duoka's own files, as they are installed here."""
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _is_seen(path: Path) -> bool:
    until = time.monotonic() + SEEN_WITHIN_S
    while not path.exists():
        if time.monotonic() > until:
            return False
        with contextlib.suppress(OSError):
            os.listdir(path.parent)  # makes a network file system ask its server again
        time.sleep(0.2)
    return True


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])


def _run(orders: Orders, command: list[str], env: dict[str, str]) -> int:
    """The command's exit code, once it and all that it left behind have ended."""
    # A rank's first moment is any process's: it ends with this one, however this one ends.
    child = subprocess.Popen(
        [*python_module("duoka.process.rank"), *command],
        env={**os.environ, **env, PARENT_PID: str(os.getpid())}, stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        while child.poll() is None:
            for order in orders.take(_LOOK_EVERY_S):
                if "signal" in order:
                    child.send_signal(signal.Signals[order["signal"]])
                elif "kill" in order:
                    child.kill()
    except NearEndGone:
        child.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(LEAVE_S)
    finally:
        child.kill()
        child.wait()
        end_descendants()
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def end_descendants() -> None:
    """Those that lost their parents are this process's children now (adopt_orphans)."""
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=1)


if __name__ == "__main__":
    sys.exit(main())
