"""HTTP as others than OpenAI's clients speak it: proxies of version 1.0, bodies in chunks, bodies that are not read."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator

import pytest
from serving import KEY, serving
from tiny import write_tiny_model

from duoka.serve.api.bodies import MOST_BYTES
from duoka.serve.api.server import Handler, Server

ASKED = json.dumps({"model": "tiny", "prompt": "abc", "max_tokens": 3, "temperature": 0}).encode()
STREAMED = json.dumps({"model": "tiny", "prompt": "abc", "max_tokens": 3, "temperature": 0, "stream": True}).encode()
HEALTH = b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", tied=False)) as made:
        yield made


def head(*lines: str, path: str = "/v1/completions", version: str = "1.1", key: str = KEY) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/{version}", f"Authorization: Bearer {key}", *lines, "", ""]).encode()


def say(server: Server, *parts: bytes) -> bytes:
    """All that comes back until the server closes."""
    with socket.create_connection(server.server_address[:2], timeout=30) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may close before it has all
            for part in parts:
                connection.sendall(part)
        found = b""
        while piece := connection.recv(65536):
            found += piece
    return found


def statuses(answer: bytes) -> list[int]:
    return [int(one) for one in re.findall(rb"HTTP/1\.1 (\d+)", answer)]


def in_chunks(body: bytes, size: int = 7, end: bytes = b"0\r\n\r\n") -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x;a=b\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + end


def text_of(answer: bytes) -> str:
    return json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"]


def test_a_stream_to_an_older_client_is_not_cut_into_chunks_and_ends_with_the_connection(server: Server) -> None:
    told, _, body = say(server, head(f"Content-Length: {len(STREAMED)}", version="1.0"), STREAMED).partition(
        b"\r\n\r\n"
    )
    assert statuses(told) == [200] and b"Transfer-Encoding" not in told
    events = [part.removeprefix("data: ") for part in body.decode().split("\n\n") if part]
    assert events[-1] == "[DONE]"
    whole = say(server, head(f"Content-Length: {len(ASKED)}", "Connection: close"), ASKED)
    assert "".join(json.loads(one)["choices"][0]["text"] for one in events[:-1]) == text_of(whole)


def test_a_body_in_chunks_is_read_and_the_next_request_begins_behind_it(server: Server) -> None:
    asked = head("Transfer-Encoding: chunked") + in_chunks(ASKED, end=b"0\r\nX-Sum: 1\r\n\r\n")
    answer = say(server, asked, HEALTH)
    assert statuses(answer) == [200, 200] and b'"text_completion"' in answer and b'"ok"' in answer


@pytest.mark.parametrize(
    ("lines", "body", "status"),
    [
        (("Transfer-Encoding: chunked",), b"zz\r\nabc\r\n0\r\n\r\n", 400),
        (("Transfer-Encoding: chunked",), b"-1\r\n", 400),
        (("Transfer-Encoding: chunked",), b"2\r\nabc\r\n0\r\n\r\n", 400),
        (("Transfer-Encoding: gzip, chunked",), in_chunks(ASKED), 501),
        (("Transfer-Encoding: chunked", "Content-Length: 3"), in_chunks(ASKED), 400),
        ((f"Content-Length: {len(ASKED)}", "Content-Length: 3"), ASKED, 400),
        (("Content-Length: -5",), ASKED, 400),
        ((), b"", 411),
        (("Transfer-Encoding: chunked",), b"%x\r\n" % (MOST_BYTES + 1), 413),
    ],
)
def test_a_body_of_doubtful_length_ends_the_connection(server: Server, lines, body: bytes, status: int) -> None:
    answer = say(server, head(*lines), body, HEALTH)
    assert statuses(answer) == [status], "what follows may be a part of the body"


def test_the_body_of_a_get_is_not_the_next_request(server: Server) -> None:
    smuggled = HEALTH
    asked = head(f"Content-Length: {len(smuggled)}").replace(b"POST /v1/completions", b"GET /v1/models")
    assert statuses(say(server, asked, smuggled)) == [200]


@pytest.mark.parametrize(
    ("key", "path", "size", "status"),
    [
        ("wrong", "/v1/completions", MOST_BYTES // 2, 401),
        (KEY, "/v1/nothing", MOST_BYTES // 2, 404),
        (KEY, "/v1/completions", MOST_BYTES + (8 << 20), 413),
    ],
)
def test_who_sends_much_that_is_not_read_hears_why(server: Server, key: str, path: str, size: int, status: int) -> None:
    answer = say(server, head(f"Content-Length: {size}", path=path, key=key), *[b" " * (1 << 20)] * (size >> 20))
    assert statuses(answer) == [status]


def told(answer: bytes) -> dict:
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


@pytest.mark.parametrize("method", ["DELETE", "OPTIONS", "PATCH", "PUT", "TRACE"])
def test_a_method_that_nothing_here_has_is_refused_as_anything_is(server: Server, method: str) -> None:
    asked = head("Content-Length: 2", path="/v1/models/tiny").replace(b"POST", method.encode())
    answer = say(server, asked, b"{}", HEALTH)
    assert statuses(answer) == [501 if method == "TRACE" else 404], "and its body is not the next request"
    assert method in told(answer)["message"]


@pytest.mark.parametrize(
    ("line", "status"),
    [(b"hello\r\n\r\n", 400), (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 414), (b"GET / HTTP/2.0\r\n\r\n", 505)],
)
def test_what_is_no_http_is_refused_as_anything_is(server: Server, line: bytes, status: int) -> None:
    answer = say(server, line)
    assert re.match(rb"HTTP/1\.1 %d " % status, answer) and told(answer)["type"]


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models"])
def test_head_is_get_without_the_body(server: Server, path: str) -> None:
    get = head("Connection: close", path=path).replace(b"POST", b"GET")
    asked, answer = say(server, get), say(server, get.replace(b"GET", b"HEAD"))

    def lines(one: bytes) -> list[bytes]:
        return [line for line in one.split(b"\r\n\r\n")[0].splitlines() if not line.startswith(b"Date:")]

    assert lines(answer) == lines(asked) and answer.endswith(b"\r\n\r\n")


def test_a_body_that_does_not_come_is_waited_for_no_longer_than_anything(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handler, "timeout", 0.3)
    begun = time.monotonic()
    answer = say(server, head("Content-Length: 500"), ASKED)
    assert statuses(answer) == [408] and b"500" in answer and time.monotonic() - begun < 10
