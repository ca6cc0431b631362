"""The chat of `duoka board --control`: its pages and answers, handed through from a `duoka serve` beside the board.

So the chat has the board's own address: one forwarded port (`ssh -L`) is enough, and the chat's key stays here.
"""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

PAGES = {"/chat": "/", "/chat.js": "/chat.js", "/chat.css": "/chat.css"}
ANSWERS = ("/v1/models", "/v1/chat/completions", "/v1/completions")
_PIECE = 64 * 1024
_SILENCE_S = 600.0  # of a model that thinks about a long text
_KEPT = ("Content-Type", "Content-Length", "Content-Security-Policy", "X-Content-Type-Options", "Retry-After")


class Reader(Protocol):
    """A page that takes an answer in pieces."""

    def begin(self, status: int, head: Mapping[str, str]) -> None: ...
    def piece(self, data: bytes) -> None: ...


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    body: bytes = b""
    head: Mapping[str, str] = field(default_factory=dict)


def is_chat(path: str) -> bool:
    return path in PAGES or path in ANSWERS


def hand_through(port: int, key: str, request: Request, reader: Reader) -> None:
    """A reader that raises has gone: the connection to the model is closed, which ends its answer there."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_SILENCE_S)
    try:
        head = {**request.head, "Authorization": f"Bearer {key}"}
        connection.request(request.method, PAGES.get(request.path, request.path), request.body or None, head)
        answer = connection.getresponse()
        reader.begin(answer.status, {name: value for name in _KEPT if (value := answer.getheader(name))})
        while data := answer.read1(_PIECE):
            reader.piece(data)
    finally:
        connection.close()
