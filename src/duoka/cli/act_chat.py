"""The chat of `duoka board --control`: one `duoka serve` beside the board, which ends with it. Not a command itself."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from duoka.process.lifeline import ENDS_WITH
from duoka.runs.folder import RunFolder

_ADDRESS = re.compile(r"API\s+http://127\.0\.0\.1:(\d+)/")
_CACHE_GIB = "1"  # its own choice is half of what is free: too much beside training
_END_S = 20.0


class Chat:
    """A model in memory at a time: to open another run's closes the one before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: _Server | None = None

    def open(self, run: RunFolder) -> str:
        with self._lock:
            server = self._server
            if server is not None and server.run.path == run.path and server.is_alive:
                return f"the chat with {run.name} is open"
            if server is not None:
                server.end()
            self._server = _Server(run)
        return f"loading {run.name} to chat with it"

    def address(self) -> tuple[int, str] | None:
        server = self._server
        return (server.port, server.key) if server is not None and server.port and server.is_alive else None

    def jobs(self) -> Sequence[Mapping[str, Any]]:
        server = self._server
        return [] if server is None else [server.to_json()]

    def close(self) -> None:
        with self._lock:
            if self._server is not None:
                self._server.end()
            self._server = None


class _Server:
    def __init__(self, run: RunFolder) -> None:
        self.run, self.port = run, 0
        self.key = secrets.token_urlsafe(18)
        self._said: deque[str] = deque(maxlen=12)
        env = {**os.environ, "DUOKA_API_KEY": self.key, ENDS_WITH: str(os.getpid())}
        command = [sys.executable, "-m", "duoka", "serve", str(run.path), "--port", "0", "--cache-gib", _CACHE_GIB]
        self._process = subprocess.Popen(
            command, env=env, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            encoding="utf-8", errors="replace", start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._listen, name="duoka-chat", daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if found := _ADDRESS.search(line):
                    self.port = int(found[1])
                if self.key not in line:
                    self._said.append(line.rstrip())
        self._process.wait()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def to_json(self) -> dict[str, Any]:
        is_alive = self.is_alive
        state = ("ready" if self.port else "loading") if is_alive else "failed"
        return {"kind": "chat", "run": self.run.name, "state": state, "text": "" if is_alive else "\n".join(self._said)}

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
