"""Authentication at the rendezvous of machines: only a peer that proves to know the run folder's secret is admitted.

meeting.py polls it. Port scanners, other programs, machines of another run and lines without an end are rejected at
little cost in memory and none in waiting; nothing else that a peer sends is read before its proof.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from duoka.cluster.connection import LOST_S, UNVERIFIED_BYTES, Wire, is_proven, new_nonce, prove

GREETING_S = 10.0  # time limit of the handshake
PARTING_S = 1.0
MOST_UNVERIFIED = 64  # at a time; beyond that the oldest is closed
_MOST_NOTES = 5


@dataclass
class _Peer:
    wire: Wire
    address: str
    nonce: str = field(default_factory=new_nonce)
    since: float = field(default_factory=time.monotonic)


class Admission:
    """Never blocks. Call `look` often: it also closes the connections of rejected peers."""

    def __init__(self, listeners: Sequence[socket.socket], secret: str) -> None:
        self._listeners, self._secret = listeners, secret
        for listener in listeners:
            listener.setblocking(False)
        self._unverified: list[_Peer] = []
        self._parting: list[tuple[Wire, float]] = []
        self._noted: set[str] = set()
        self.notes: list[str] = []  # for the terminal: which peers were rejected, and why

    def look(self) -> list[tuple[Wire, dict[str, Any]]]:
        """Peers whose proof was right, each with its hello message."""
        for listener in self._listeners:
            self._accept(listener)
        now, found = time.monotonic(), []
        for peer in list(self._unverified):
            messages = peer.wire.take()
            if messages and (hello := self._check(peer, messages[0])) is not None:
                self._unverified.remove(peer)
                found.append((peer.wire, hello))
            elif messages or peer.wire.is_lost or now - peer.since > GREETING_S:
                self._unverified.remove(peer)
                self.part(peer.wire)
        self._parting = [(wire, by) for wire, by in self._parting if not _has_parted(wire, by)]
        return found

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(MOST_UNVERIFIED):
            try:
                connection, address = listener.accept()
            except OSError:  # no pending connection, or it closed again; or out of file descriptors until one closes
                return
            wire = Wire(connection, LOST_S)
            wire.most_bytes = UNVERIFIED_BYTES
            peer = _Peer(wire, str(address[0]))
            wire.send(meeting=peer.nonce)
            self._unverified.append(peer)
        for peer in self._unverified[:-MOST_UNVERIFIED]:
            self._unverified.remove(peer)
            peer.wire.close_now()

    def _check(self, peer: _Peer, message: dict[str, Any]) -> dict[str, Any] | None:
        nonces = (peer.nonce, str(message.get("nonce")))
        hello = message.get("hello")
        if not isinstance(hello, dict):
            return None
        if not is_proven(message.get("proof"), self._secret, "machine", nonces):
            peer.wire.send(unknown=True)
            if peer.address not in self._noted and len(self._noted) < _MOST_NOTES:
                self._noted.add(peer.address)
                self.notes.append(
                    f"{peer.address} was rejected: it does not know this run's secret (another run, or the run folder "
                    "is not shared)"
                )
            return None
        peer.wire.most_bytes = Wire.most_bytes
        peer.wire.send(welcome=prove(self._secret, "meeting", nonces))
        return hello

    def part(self, wire: Wire) -> None:
        """Close the connection once its last message is sent, without waiting for it here."""
        self._parting.append((wire, time.monotonic() + PARTING_S))

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        for wire in (*(peer.wire for peer in self._unverified), *(wire for wire, _ in self._parting)):
            wire.close_now()


def _has_parted(wire: Wire, by: float) -> bool:
    with contextlib.suppress(OSError):
        wire.take()
    if not wire.is_lost and time.monotonic() < by:
        return False
    wire.close_now()
    return True
