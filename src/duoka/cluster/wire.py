"""One connection between machines of an elastic world: lines of JSON, and a beat that says "still there".

Used by meeting.py and elastic.py. Numbers and words only, and few of them: nothing that comes in is ever executed.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any

BEAT_EVERY_S = 2.0
SILENT_S = 10.0  # who has not been heard of for so long has left
_LONGEST_BYTES = 1 << 20
_GOODBYE_S = 1.0


class Wire:
    """Never blocks. `is_lost` once the other side is gone, silent for too long, or says what is no JSON."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.heard_at = self._sent_at = time.monotonic()
        self.is_lost = False
        self._in = b""
        self._out = b""

    def send(self, **message: Any) -> None:
        self._out += json.dumps(message).encode() + b"\n"
        self._sent_at = time.monotonic()
        self._flush()

    def take(self) -> list[dict[str, Any]]:
        """What has come in, in order; beats are taken note of and left out. Also sends what waits, and our own."""
        self._read()
        now = time.monotonic()
        if now - self._sent_at > BEAT_EVERY_S:
            self.send(beat=True)
        self._flush()
        if now - self.heard_at > SILENT_S:
            self.is_lost = True
        *lines, self._in = self._in.split(b"\n")
        found = []
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                self.is_lost = True
                break
            if "beat" not in message:
                found.append(message)
        return found

    def _read(self) -> None:
        try:
            while data := self.socket.recv(1 << 16):
                self._in += data
                self.heard_at = time.monotonic()
                if len(self._in) > _LONGEST_BYTES:
                    break
            self.is_lost = True
        except BlockingIOError:
            pass
        except OSError:
            self.is_lost = True

    def _flush(self) -> None:
        try:
            while self._out:
                self._out = self._out[self.socket.send(self._out) :]
        except BlockingIOError:
            self.is_lost = self.is_lost or len(self._out) > _LONGEST_BYTES
        except OSError:
            self.is_lost = True

    def close(self) -> None:
        """Say the last words to the end: closing over unread input would throw away what the other has not read."""
        with contextlib.suppress(OSError):
            self.socket.settimeout(_GOODBYE_S)
            if not self.is_lost:
                self.socket.sendall(self._out)
                self.socket.shutdown(socket.SHUT_WR)
                end = time.monotonic() + _GOODBYE_S
                while time.monotonic() < end and self.socket.recv(1 << 16):
                    pass
        self.socket.close()
