"""One connection between machines of an elastic world: lines of JSON, and a beat that says "still there".

Used by meeting.py and elastic.py. Numbers and words only, few of them and short: nothing that comes in is ever
executed, and no peer is trusted before it has proven that it knows the secret in the run folder. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any

from duoka.runs.folder import read_json

BEAT_EVERY_S = 2.0
SILENT_S = 10.0  # a machine that has not heard from the meeting for so long ends its ranks
# The meeting waits a little longer: when it goes on without a machine, the ranks there have ended, link or no link.
LOST_S = SILENT_S + 2 * BEAT_EVERY_S
UNVERIFIED_BYTES = 1 << 15  # the longest line of an unauthenticated peer: its hello holds a digest of the config
_LONGEST_BYTES = 1 << 20
GOODBYE_S = 1.0
SECRET = ".meeting"  # in the run folder: machines that can read it may take part


class Wire:
    """Never blocks, `close` apart. `is_lost` once the peer is gone, silent for too long, or not of this protocol."""

    most_bytes = _LONGEST_BYTES  # of one line

    def __init__(self, connection: socket.socket, silent_s: float | None = None) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # gone already: the first read will say so
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.silent_s = SILENT_S if silent_s is None else silent_s
        self.heard_at = self._sent_at = time.monotonic()
        self.is_lost = self.is_foreign = False  # foreign: it sent what duoka never sends
        self._in = b""
        self._out = b""

    def send(self, **message: Any) -> None:
        self._out += json.dumps(message).encode() + b"\n"
        self._sent_at = time.monotonic()
        self._flush()

    def take(self) -> list[dict[str, Any]]:
        """What has come in, in order; beats are taken note of and left out. Also sends what waits, and our own."""
        self._read()
        self.beat()
        self.is_lost = self.is_lost or self.is_silent
        *lines, self._in = self._in.split(b"\n")
        found: list[dict[str, Any]] = []
        for line in lines:
            message = _parse(line) if len(line) <= self.most_bytes else None
            if message is None:
                self._is_nonsense()
                return found
            if "beat" not in message:
                found.append(message)
        if len(self._in) > self.most_bytes:  # a line without an end must not fill our memory
            self._is_nonsense()
        return found

    def beat(self) -> None:
        """For who has no time for what comes in: the other side hears that this one lives."""
        if time.monotonic() - self._sent_at > BEAT_EVERY_S:
            self.send(beat=True)
        self._flush()

    @property
    def is_silent(self) -> bool:
        return time.monotonic() - self.heard_at > self.silent_s

    def _is_nonsense(self) -> None:
        self.is_lost = self.is_foreign = True
        self._in = b""

    def _read(self) -> None:
        try:
            while data := self.socket.recv(1 << 16):
                self._in += data
                self.heard_at = time.monotonic()
                if len(self._in) > self.most_bytes:  # the rest at the next look: others want their turn
                    return
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

    def close_now(self) -> None:
        """Without waiting for what was not said yet."""
        self.is_lost = True
        self.socket.close()

    def close(self) -> None:
        """Send all that is queued: closing over unread input resets the connection and loses what was sent."""
        with contextlib.suppress(OSError):
            self.socket.settimeout(GOODBYE_S)
            if not self.is_lost:
                self.socket.sendall(self._out)
                self.socket.shutdown(socket.SHUT_WR)
                end = time.monotonic() + GOODBYE_S
                while time.monotonic() < end and self.socket.recv(1 << 16):
                    pass
        self.socket.close()


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):  # nested a thousand times: not a duoka peer
        return None
    return message if isinstance(message, dict) else None


def new_nonce() -> str:
    return secrets.token_hex(16)


def write_secret(folder: Path) -> str:
    """The secret of a meeting that begins, for those who may read the run folder as its owner."""
    secret = secrets.token_hex(32)
    draft = folder / f"{SECRET}.{os.getpid()}"
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(json.dumps({"secret": secret}))
    os.replace(draft, folder / SECRET)
    return secret


def read_secret(folder: Path) -> str:
    """Empty when there is none to be read."""
    return str((read_json(folder / SECRET) or {}).get("secret", ""))


def prove(secret: str, side: str, nonces: tuple[str, str]) -> str:
    """HMAC of both nonces (the meeting's, the machine's): it proves the secret, and for this connection only."""
    return hmac.new(secret.encode(), " ".join((side, *nonces)).encode(), "sha256").hexdigest()


def is_proven(given: object, secret: str, side: str, nonces: tuple[str, str]) -> bool:
    return isinstance(given, str) and given.isascii() and hmac.compare_digest(given, prove(secret, side, nonces))
