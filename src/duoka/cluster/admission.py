"""Who may come in to a meeting of machines: whoever can read the secret in the run folder, and nobody else.

Asked by meeting.py at every look. Port scanners, other programs, machines of another run and lines without an end are
shown out; they cost little memory, no waiting, and nothing of what they send is read before they have proven it.
"""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from duoka.cluster.connection import LOST_S, STRANGER_BYTES, Wire, is_proven, new_nonce, prove

GREETING_S = 10.0  # to say who one is
_PARTING_S = 1.0
_MOST_STRANGERS = 64  # at a time; the oldest has to go
_MOST_NOTES = 5


@dataclass
class _Stranger:
    wire: Wire
    address: str
    nonce: str = field(default_factory=new_nonce)
    since: float = field(default_factory=time.monotonic)


class Door:
    """Never blocks. `look` is to be called often: it also sees off those who were told to go."""

    def __init__(self, listener: socket.socket, secret: str) -> None:
        self._listener, self._secret = listener, secret
        listener.setblocking(False)
        self._strangers: list[_Stranger] = []
        self._parting: list[tuple[Wire, float]] = []
        self._noted: set[str] = set()
        self.notes: list[str] = []  # for people: who could not come in

    def look(self) -> list[tuple[Wire, dict[str, Any]]]:
        """Those who have proven that they belong to this run, each with what it said of itself."""
        self._accept()
        now, found = time.monotonic(), []
        for stranger in list(self._strangers):
            messages = stranger.wire.take()
            if messages and (hello := self._check(stranger, messages[0])) is not None:
                self._strangers.remove(stranger)
                found.append((stranger.wire, hello))
            elif messages or stranger.wire.is_lost or now - stranger.since > GREETING_S:
                self._strangers.remove(stranger)
                self.part(stranger.wire)
        self._parting = [(wire, by) for wire, by in self._parting if not _has_parted(wire, by)]
        return found

    def _accept(self) -> None:
        for _ in range(_MOST_STRANGERS):
            try:
                connection, address = self._listener.accept()
            except OSError:  # nobody there, or gone again; or we have no descriptors left, until somebody leaves
                return
            wire = Wire(connection, LOST_S)
            wire.most_bytes = STRANGER_BYTES
            stranger = _Stranger(wire, str(address[0]))
            wire.send(meeting=stranger.nonce)
            self._strangers.append(stranger)
        for stranger in self._strangers[:-_MOST_STRANGERS]:
            self._strangers.remove(stranger)
            stranger.wire.close_now()

    def _check(self, stranger: _Stranger, message: dict[str, Any]) -> dict[str, Any] | None:
        nonces = (stranger.nonce, str(message.get("nonce")))
        hello = message.get("hello")
        if not isinstance(hello, dict):
            return None
        if not is_proven(message.get("proof"), self._secret, "machine", nonces):
            stranger.wire.send(unknown=True)
            if stranger.address not in self._noted and len(self._noted) < _MOST_NOTES:
                self._noted.add(stranger.address)
                self.notes.append(
                    f"{stranger.address} was shown out: it cannot read this run's folder, or is of another run"
                )
            return None
        stranger.wire.most_bytes = Wire.most_bytes
        stranger.wire.send(welcome=prove(self._secret, "meeting", nonces))
        return hello

    def part(self, wire: Wire) -> None:
        """Let the last words go out, without waiting for it here."""
        self._parting.append((wire, time.monotonic() + _PARTING_S))

    def close(self) -> None:
        self._listener.close()
        for wire in (*(stranger.wire for stranger in self._strangers), *(wire for wire, _ in self._parting)):
            wire.close_now()


def _has_parted(wire: Wire, by: float) -> bool:
    with contextlib.suppress(OSError):
        wire.take()
    if not wire.is_lost and time.monotonic() < by:
        return False
    wire.close_now()
    return True
