"""A process of ours that runs a user's functions, killed at a deadline with all that it started.

It reads a question a line and writes an answer a line (user_functions.py). A signal could not bound a function: it
interrupts Python alone, on one thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from duoka.process.lifeline import WORLD_TOKEN, leaves_the_world

_START_S = 60.0  # a process imports what the functions need before it is asked


def _environment() -> dict[str, str]:
    """No rank's, but with the sign by which a launcher finds what it has to end."""
    token = {WORLD_TOKEN: os.environ[WORLD_TOKEN]} if WORLD_TOKEN in os.environ else {}
    return {**leaves_the_world(os.environ), **token}


class Worker:
    """Begun when it is first asked, and again after it had to be killed."""

    def __init__(self, names: tuple[str, ...], base: Path, deadline_s: float) -> None:
        self._names, self._base, self._deadline_s = names, base, deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._read, self._is_new = b"", True

    def faults(self) -> list[str]:
        if self._process is not None and not self._is_new:  # it was asked already, and its answers tell
            return []
        line: bytes | None = b""
        with contextlib.suppress(OSError):
            line = self._line(self._started(), time.monotonic() + _START_S)
        if not line:
            self.end()
            return [f"{' + '.join(self._names)}: {'not ready within 60 s' if line is None else 'the process ended'}"]
        self._is_new = False
        return list(json.loads(line))

    def ask(self, question: dict[str, Any]) -> tuple[Any, str]:
        """What it answers; None with the reason where no answer came."""
        try:
            process = self._started()
            line = self._line(process, time.monotonic() + _START_S) if self._is_new else b"ready"
            if line:
                self._is_new = False
                assert process.stdin is not None
                # Columns of a table may hold what JSON has no word for, such as times.
                process.stdin.write(json.dumps(question, default=str).encode() + b"\n")
                process.stdin.flush()
                line = self._line(process, time.monotonic() + self._deadline_s)
        except OSError as error:
            line, why = None, f"its process ended ({error.strerror or type(error).__name__})"
        else:
            why = f"not ready within {_START_S:g} s" if self._is_new else f"no answer within {self._deadline_s:g} s"
            if line == b"":  # it has closed its end: it is gone, or about to be
                with contextlib.suppress(subprocess.TimeoutExpired):
                    why = f"its process ended ({process.wait(self._deadline_s)})"
        if not line:
            self.end()
            return None, why
        return json.loads(line), ""

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "duoka.tasks.user_functions"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env=_environment(), start_new_session=True,
            )  # fmt: skip
            self._read, self._is_new = b"", True
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps([self._names, str(self._base)]).encode() + b"\n")
            self._process.stdin.flush()
        return self._process

    def _line(self, process: subprocess.Popen[bytes], ends: float) -> bytes | None:
        """The next line; None when it does not come in time, empty when none will come."""
        assert process.stdout is not None
        while b"\n" not in self._read:
            # Not select.select, which knows no file beyond the 1,024th that a process opens.
            poll = select.poll()
            poll.register(process.stdout, select.POLLIN)
            if not poll.poll(1000 * min(max(0.0, ends - time.monotonic()), 86400.0)):
                return None
            some = os.read(process.stdout.fileno(), 1 << 16)
            if not some:
                return b""
            self._read += some
        line, _, self._read = self._read.partition(b"\n")
        return line

    def end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()


def ask_all(
    workers: Sequence[Worker], todo: Iterable[int], ask: Callable[[Worker, int], None], alive: Callable[[], None]
) -> None:
    """`ask` for each place of `todo`, which is taken by whichever worker is free; `alive` is called meanwhile."""
    places, lock = iter(todo), threading.Lock()

    def work(worker: Worker) -> None:
        while True:
            with lock:
                place = next(places, None)
            if place is None:
                return
            ask(worker, place)

    with ThreadPoolExecutor(len(workers), "duoka-workers") as threads:
        going = {threads.submit(work, one) for one in workers}
        while going:
            done, going = wait(going, timeout=1.0)
            alive()
            for one in done:
                one.result()  # what a thread raised is raised here
