"""`duoka board` over HTTP, by the standard library: pages from this package, answers of a Board, nothing else.

Bound to 127.0.0.1. Who has the token may look; it comes once in the address and is kept as a cookie. Hosts other than
this machine's names are refused (a page elsewhere could point its own name here), and acting is there only with a
Control. No page of ours asks for anything outside (Content-Security-Policy).
"""

from __future__ import annotations

import hmac
import http.client
import json
import math
import secrets
from collections.abc import Callable, Mapping
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlsplit

from duoka.errors import DuokaError
from duoka.watch import chat_pipe
from duoka.watch.board import Asked, Board, NotThere
from duoka.watch.control import Control, Draft, act_on_run

HOST = "127.0.0.1"
_HERE = ("127.0.0.1", "localhost", "[::1]")
_PAGES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/board.css": ("board.css", "text/css; charset=utf-8"),
    "/start.css": ("start.css", "text/css; charset=utf-8"),
    "/board.js": ("board.js", "text/javascript; charset=utf-8"),
    "/chart.js": ("chart.js", "text/javascript; charset=utf-8"),
    "/act.js": ("act.js", "text/javascript; charset=utf-8"),
    "/start.js": ("start.js", "text/javascript; charset=utf-8"),
    "/panels.js": ("panels.js", "text/javascript; charset=utf-8"),
    "/words.js": ("words.js", "text/javascript; charset=utf-8"),
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# A report is one file with its style in it, and no script.
_REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'"
_MOST_BODY = 64 * 1024
_MOST_CHAT = 4 * 1024 * 1024  # a conversation comes with all its turns
_IDLE_S = 60.0


class BoardServer(ThreadingHTTPServer):
    """`port` 0: any free one."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, board: Board, port: int = 0, *, control: Control | None = None, token: str = "") -> None:
        self.board, self.control = board, control
        self.token = token or secrets.token_urlsafe(18)
        super().__init__((HOST, port), _Handler)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.port}/?token={self.token}"


class _Refused(Exception):
    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: BoardServer
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    disable_nagle_algorithm = True  # an answer's body would wait for the word that its head has come
    server_version, sys_version = "duoka", ""

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, make: Callable[[str, Mapping[str, str]], None]) -> None:
        try:
            target = urlsplit(self.path)
            words = {key: values[-1] for key, values in parse_qs(target.query).items()}
            self._check_host()
            if target.path == "/" and "token" in words:
                return self._let_in(words["token"])
            self._check_token()
            make(target.path, words)
        except _Refused as refused:
            self.close_connection = self.close_connection or self.command == "POST"  # its body was not read
            self._send_json({"error": str(refused)}, refused.status)
        except NotThere as error:
            self._send_json({"error": str(error)}, HTTPStatus.NOT_FOUND)
        except DuokaError as error:
            self._send_json({"error": "\n".join(error.lines())}, HTTPStatus.CONFLICT)
        except (ValueError, OverflowError) as error:
            self._send_json({"error": str(error)}, HTTPStatus.BAD_REQUEST)
        except http.client.HTTPException as error:
            self._send_json({"error": f"the chat gave no answer ({error})"}, HTTPStatus.BAD_GATEWAY)
        except (TypeError, LookupError, AttributeError) as error:  # a run's files may hold what nobody writes
            said = f"what is in this run's files cannot be shown ({type(error).__name__}: {error})"
            self._send_json({"error": said}, HTTPStatus.INTERNAL_SERVER_ERROR)
        except (BrokenPipeError, ConnectionError, TimeoutError):
            self.close_connection = True  # the page has gone
        except OSError as error:  # a log that was moved away meanwhile, a folder of somebody else's
            self._send_json({"error": f"{error.filename}: {error.strerror}"}, HTTPStatus.INTERNAL_SERVER_ERROR)

    # --- who may ask ---

    def _check_host(self) -> None:
        name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if name not in _HERE:
            raise _Refused(HTTPStatus.FORBIDDEN, "this board answers to 127.0.0.1 and localhost only")

    def _cookie_name(self) -> str:
        return f"duoka-board-{self.server.port}"  # cookies do not know ports

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self.server.token.encode())

    def _let_in(self, token: str) -> None:
        if not self._is_token(token):
            raise _Refused(HTTPStatus.FORBIDDEN, "this token is not the board's: take the address that it printed")
        self.send_response(HTTPStatus.SEE_OTHER)
        self.send_header("Location", "/")
        self.send_header("Set-Cookie", f"{self._cookie_name()}={token}; Path=/; HttpOnly; SameSite=Lax")
        self._send_rest(b"", _POLICY)

    def _check_token(self) -> None:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        for part in self.headers.get("Cookie", "").split(";"):
            name, _, value = part.strip().partition("=")
            given = value if name == self._cookie_name() else given
        if not self._is_token(given):
            raise _Refused(HTTPStatus.FORBIDDEN, "no token: open the address that the board printed")

    # --- what is asked ---

    def _get(self, path: str, words: Mapping[str, str]) -> None:
        board, control = self.server.board, self.server.control
        if path in _PAGES:
            name, kind = _PAGES[path]
            return self._send(_page(name), kind)
        if chat_pipe.is_chat(path):
            return self._hand_through(control, chat_pipe.Request("GET", path))
        if path == "/api/form":
            return self._send_json(control.form() if control else {"fields": []})
        with board.lock:
            if path == "/api/look":
                answer = {
                    **board.look(_asked(words)),
                    "folder": str(board.folder),
                    "control": bool(control),
                    "jobs": list(control.jobs()) if control else [],
                }
            elif path == "/api/heat":
                answer = board.heat(words.get("run", ""))
            elif path == "/api/differences":
                answer = board.differences(_names(words.get("runs", "")))
            elif path == "/api/log":
                start = words.get("start", "")
                file = words.get("file", "")
                answer = board.log(words.get("run", ""), file, int(start) if start.isdecimal() else None)
            elif path == "/report":
                text = board.report(words.get("run", ""))
                return self._send(text.encode(), "text/html; charset=utf-8", policy=_REPORT_POLICY)
            else:
                raise NotThere("there is nothing here")
        self._send_json(answer)

    def _post(self, path: str, words: Mapping[str, str]) -> None:
        """Acting. A header that other sites' pages cannot set, and the run's name once more as confirmation."""
        size = int(self.headers.get("Content-Length") or 0)
        if size > (_MOST_CHAT if chat_pipe.is_chat(path) else _MOST_BODY):
            self.close_connection = True
            raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "this is too long")
        body = self.rfile.read(size)
        control = self.server.control
        if control is None:
            raise _Refused(HTTPStatus.FORBIDDEN, "this board only looks; `duoka board --control` may act")
        if chat_pipe.is_chat(path):
            self._check_origin()
            head = {"Content-Type": self.headers.get("Content-Type", "application/json")}
            return self._hand_through(control, chat_pipe.Request("POST", path, body, head))
        if self.headers.get("X-Duoka") != "act":
            raise _Refused(HTTPStatus.FORBIDDEN, "only the board's own page may act")
        asked = json.loads(body)
        if not isinstance(asked, dict):
            raise ValueError("a JSON object is meant")
        if path == "/api/plan":
            return self._send_json(control.plan(Draft.of(asked)))
        name = str(asked.get("run", ""))
        if not name or asked.get("confirm") != name:
            raise _Refused(HTTPStatus.BAD_REQUEST, "what acts on a run has to be confirmed with its name")
        if path == "/api/start":
            done: str | None = control.start(self.server.board.folder, Draft.of(asked))
        else:
            done = act_on_run(control, path, self.server.board.find(name), asked)
        if done is None:
            raise NotThere("there is nothing here")
        self._send_json({"done": done})

    # --- the chat ---

    def _check_origin(self) -> None:
        """The chat's page sends no header of ours: a browser says of itself which page asks."""
        origin = self.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != self.headers.get("Host"):
            raise _Refused(HTTPStatus.FORBIDDEN, "only the board's own pages may ask the chat")

    def _hand_through(self, control: Control | None, request: chat_pipe.Request) -> None:
        place = control.chat_address() if control else None
        if place is None:
            raise NotThere("no chat is open: choose a run on the board, then Chat")
        chat_pipe.hand_through(*place, request, self)

    def begin(self, status: int, head: Mapping[str, str]) -> None:
        self.close_connection = True  # a stream has no length: its end is the connection's
        self.send_response(status)
        for name, value in {**head, "Cache-Control": "no-store", "Connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()

    def piece(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()

    # --- the answer ---

    def _send_json(self, value: Mapping[str, Any], status: HTTPStatus = HTTPStatus.OK) -> None:
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except ValueError:  # a log that others wrote may hold a bare NaN, which no browser reads
            text = json.dumps(_finite(value), ensure_ascii=False)
        self._send(text.encode("utf-8", "replace"), "application/json; charset=utf-8", status=status)

    def _send(self, body: bytes, kind: str, *, policy: str = _POLICY, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self._send_rest(body, policy)

    def _send_rest(self, body: bytes, policy: str) -> None:
        for name, value in (
            ("Content-Length", str(len(body))), ("Cache-Control", "no-store"), ("Content-Security-Policy", policy),
            ("X-Content-Type-Options", "nosniff"), ("Referrer-Policy", "no-referrer"),
        ):  # fmt: skip
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal shows the address and nothing else; a query would show a token."""


@cache
def _page(name: str) -> bytes:
    return (files("duoka.watch") / "web" / name).read_bytes()


def _names(text: str) -> tuple[str, ...]:
    """JSON, for a run's name may hold any letter."""
    found = json.loads(text) if text else []
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ValueError("a JSON list of names is meant")
    return tuple(found)


def _asked(words: Mapping[str, str]) -> Asked:
    def value(name: str, default: float) -> float:
        found = float(words.get(name) or default)
        return default if math.isnan(found) else found

    return Asked(
        runs=_names(words.get("runs", "")),
        focus=words.get("focus", ""),
        keys=_names(words.get("keys", "")),
        axis=words.get("axis", "step"),
        most=int(value("most", 600)),
        low=value("low", -math.inf),
        high=value("high", math.inf),
        log=words.get("log") == "1",
        since=words.get("since", ""),
    )


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
