"""The HTTP server: OpenAI's API and a chat page, on this machine's own address, with a key.

Standard library: a thread for each connection, which reads JSON and writes JSON; one thread (the scheduler's) computes.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hmac
import json
import re
import select
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

from safetensors import SafetensorError

from duoka import __version__
from duoka.errors import ConfigError
from duoka.hub.base import read_base, refuse_other_base
from duoka.hub.named_base import note_named_base
from duoka.serve.api.answers import Gone, Reply
from duoka.serve.api.bodies import has_body, read_body
from duoka.serve.api.fields import BadRequest, Fields, several
from duoka.serve.api.requests import Asked, Facts, adapter_of, read_chat, read_completion
from duoka.serve.batching.scheduler import IsClosing, Scheduler
from duoka.serve.load_run import find_run

SILENCE_S = 60.0  # a client that neither sends nor takes anything for so long has gone
_UNREAD_S = 5.0  # for so long what is refused unread is taken all the same, so that its sender hears why
_BROKEN = (  # what reading an adapter's files raises, whatever they hold
    ConfigError, OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, re.error,
    SafetensorError,
)  # fmt: skip
_PAGES = {
    "/": ("chat.html", "text/html"),
    "/chat.js": ("chat.js", "text/javascript"),
    "/chat.css": ("chat.css", "text/css"),
}
_SAFE = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@dataclass
class Service:
    """What is served: the scheduler, the facts that requests are held against, and the key."""

    scheduler: Scheduler
    facts: Facts
    key: str
    adapters: dict[str, str | None]  # the same mapping as `facts.models`; changed by loads and unloads
    base: Path  # the folder of the weights that adapters are laid over
    base_names: tuple[str, ...] = ()  # what that model goes by
    started: float = field(default_factory=time.time)
    _changing: threading.Lock = field(default_factory=threading.Lock)

    def load_adapter(self, name: str, folder: Path) -> str:
        """A note of what is odd about it, or ""."""
        with self._changing:
            return self._load_adapter(name, folder)

    def _load_adapter(self, name: str, folder: Path) -> str:
        if name in self.adapters:
            raise BadRequest(f"there is a model {name!r} already; unload it first", "lora_name")
        try:
            folder = _folder_of_adapter(folder)
            refuse_other_base(str(folder), read_base(folder), self.base)
            found = self.scheduler.model.adapters.read(folder)
            note = note_named_base(folder, self.base, self.base_names)
        except _BROKEN as error:
            what = error.what if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            raise BadRequest(f"{folder} is not loaded: {what}", "lora_path") from None
        self.scheduler.call(lambda: self.scheduler.model.adapters.install(name, found))
        self.adapters[name] = name
        return note

    def unload_adapter(self, name: str) -> None:
        with self._changing:
            if self.adapters.get(name) is None:
                raise BadRequest(f"there is no adapter {name!r} here", "lora_name", status=404)
            del self.adapters[name]
            self.scheduler.remove_adapter(name)


def _folder_of_adapter(path: Path) -> Path:
    """A PEFT folder, or a run, whose result is one: what --adapter takes."""
    run = find_run(str(path))
    folder = path if run is None else run.final
    if not (folder / "adapter_config.json").is_file():
        raise BadRequest(f"{path} is not loaded: there is no adapter_config.json in {folder}", "lora_path")
    return folder


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], service: Service) -> None:
        self.service = service
        self.num_answering = 0  # requests whose answer has not been sent, computed or not
        self._counting = threading.Lock()
        # IPv4 where the host has it: clients of `localhost` try that too, and nobody types [::1].
        kinds = {one[0] for one in socket.getaddrinfo(*address, type=socket.SOCK_STREAM)} if address[0] else set()
        self.address_family = socket.AF_INET6 if kinds == {socket.AF_INET6} else socket.AF_INET
        super().__init__(address, Handler)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        with self._counting:
            self.num_answering += 1
        try:
            yield
        finally:
            with self._counting:
                self.num_answering -= 1

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke is no news; any other error is a bug, and ended this request alone."""
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, OSError):
            print(f"a request failed: {_place(error)}; this is a bug in duoka", file=sys.stderr, flush=True)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # of a first line that names none: a refusal has its status line then too
    server_version = f"duoka/{__version__}"
    timeout = SILENCE_S
    disable_nagle_algorithm = True  # a token would wait 40 ms for the client's word that it got the one before

    @property
    def service(self) -> Service:
        return cast(Server, self.server).service

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: prompts and keys belong into no log."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What http.server refuses by itself: what is no HTTP, and methods that nobody knows."""
        self.close_connection = True
        self._json(code, BadRequest(message or self.responses[HTTPStatus(code)][0], status=code).to_json())

    def do_GET(self) -> None:
        has_one = has_body(self.headers)  # it would be the next request
        self.close_connection = self.close_connection or has_one
        self._get(self.path.split("?")[0])
        if has_one:
            self._take_unread()

    do_HEAD = do_GET

    def _get(self, path: str) -> None:
        if path in _PAGES:
            name, kind = _PAGES[path]
            text = resources.files("duoka.serve.api").joinpath(name).read_bytes()
            self._send(200, text, f"{kind}; charset=utf-8")
        elif path == "/health":
            self._json(200, {"status": "ok"})
        else:
            routes = {"/v1/models": self._models, "/metrics": self._metrics}
            name = unquote(path.removeprefix("/v1/models/"))
            self._answer(routes.get(path) if name == path else lambda: self._model(name))

    def do_POST(self) -> None:
        routes = {
            "/v1/chat/completions": lambda: self._complete(read_chat),
            "/v1/completions": lambda: self._complete(read_completion),
            "/v1/embeddings": self._embed,
            "/v1/load_lora_adapter": self._load,
            "/v1/unload_lora_adapter": self._unload,
        }
        self._answer(routes.get(self.path.split("?")[0]))

    def _refuse_method(self) -> None:
        self._answer(None)

    do_DELETE = do_OPTIONS = do_PATCH = do_PUT = _refuse_method

    def _answer(self, route: Callable[[], None] | None) -> None:
        self.is_answered = self.is_read = False
        try:
            if not self._has_key():
                raise BadRequest(
                    "the key is missing or wrong; it is what `duoka serve` printed", status=401, code="invalid_api_key"
                )
            if route is None:
                raise BadRequest(f"there is no {self.command} {self.path} here", status=404)
            route()
        except BadRequest as error:
            # A body that nobody has read would be taken for the next request.
            is_unread = self.command not in ("GET", "HEAD") and not self.is_read
            self.close_connection = self.close_connection or is_unread
            self._json(error.status, error.to_json())
            if is_unread:
                self._take_unread()
        except IsClosing as error:
            self._json(503, BadRequest(str(error), status=503).to_json())
        except Gone:
            self.close_connection = True
        except Exception as error:  # whoever asked is told before it goes on; raised again
            self.close_connection = True
            if not self.is_answered:
                self._json(500, BadRequest(f"the server failed ({_place(error)})", status=500).to_json())
            raise

    def send_response(self, code: int, message: str | None = None) -> None:
        self.is_answered = True
        super().send_response(code, message)

    def _has_key(self) -> bool:
        given = re.sub("^bearer ", "", self.headers.get("Authorization", ""), flags=re.IGNORECASE).strip()
        return hmac.compare_digest(given.encode(), self.service.key.encode())

    def _body(self) -> object:
        raw = read_body(self.headers, self.rfile)
        self.is_read = True
        try:
            body = json.loads(raw)
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # no tokenizer and no answer can hold it
            raise BadRequest("the body holds half a character (\\ud800 to \\udfff without its other half)") from None
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is no JSON: {error}") from None
        return body

    # --- routes ---

    def _models(self) -> None:
        data = [self._describe(name) for name in list(self.service.facts.models)]
        self._json(200, {"object": "list", "data": data})

    def _model(self, name: str) -> None:
        adapter_of(name, self.service.facts)
        self._json(200, self._describe(name))

    def _describe(self, name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": int(self.service.started), "owned_by": "duoka"}

    def _metrics(self) -> None:
        scheduler = self.service.scheduler
        shown: Mapping[str, tuple[str, float]] = {
            **{f"duoka_{name}_total": ("counter", value) for name, value in vars(scheduler.numbers).items()},
            "duoka_active_requests": ("gauge", scheduler.num_active),
            "duoka_waiting_requests": ("gauge", scheduler.num_waiting),
        }
        lines = [f"# TYPE {name} {kind}\n{name} {value}\n" for name, (kind, value) in shown.items()]
        self._send(200, "".join(lines).encode(), "text/plain; version=0.0.4")

    def _complete(self, read: Callable[[object, Facts], Asked]) -> None:
        asked = read(self._body(), self.service.facts)
        with cast(Server, self.server).answering():
            self._reply(asked)

    def _reply(self, asked: Asked) -> None:
        service = self.service
        reply = Reply(asked, service.scheduler, service.facts.tokenizer, self._is_gone)
        if not asked.is_stream:
            self._json(200, reply.whole())
            return
        self.is_chunked = self.request_version != "HTTP/1.0"  # such a client would read the chunks' sizes as text
        self.close_connection = self.close_connection or not self.is_chunked
        more = {"Transfer-Encoding": "chunked"} if self.is_chunked else {"Connection": "close"}
        self.send_response(200)
        self._headers("text/event-stream; charset=utf-8", {**more, "Cache-Control": "no-cache"})
        try:
            for frame in reply.stream():
                self._event(json.dumps(frame, ensure_ascii=False))
        except BadRequest as error:  # the status has been sent
            self._event(json.dumps(error.to_json(), ensure_ascii=False))
        except OSError:
            reply.cancel()
            raise Gone from None
        self._event("[DONE]")
        if self.is_chunked:
            self.wfile.write(b"0\r\n\r\n")

    def _embed(self) -> None:
        fields, service = Fields(self._body()), self.service
        adapter_of(name := fields.text("model"), service.facts)
        tokenizer, vocabulary = service.facts.tokenizer, service.facts.vocabulary
        texts = several(fields.take("input"), "input", lambda text: tokenizer.encode(text)[0], vocabulary)
        encoding = fields.take("encoding_format", "float")
        if encoding not in ("float", "base64"):
            raise BadRequest(f"encoding_format is {encoding!r}; it must be float or base64", "encoding_format")
        fields.done()
        if longest := max((len(one) for one in texts if len(one) > service.facts.window), default=0):
            raise BadRequest(
                f"a text has {longest:,} tokens, and the model's window is {service.facts.window:,}", "input"
            )
        model, adapter = service.scheduler.model, service.facts.models[name]
        vectors = [service.scheduler.call(functools.partial(model.embed, one, adapter)) for one in texts]
        data = [
            {"object": "embedding", "index": at, "embedding": _packed(one) if encoding == "base64" else one}
            for at, one in enumerate(vectors)
        ]
        total = sum(len(one) for one in texts)
        usage = {"prompt_tokens": total, "total_tokens": total}
        self._json(200, {"object": "list", "data": data, "model": name, "usage": usage})

    def _load(self) -> None:
        fields = Fields(self._body())
        name, folder = fields.text("lora_name"), fields.text("lora_path")
        fields.done()
        note = self.service.load_adapter(name, Path(folder))
        if note:
            print(f"loaded {name}: {note}", file=sys.stderr, flush=True)
        self._json(200, {"status": f"loaded {name}"} | ({"warning": note} if note else {}))

    def _unload(self) -> None:
        fields = Fields(self._body())
        name = fields.text("lora_name")
        fields.done()
        self.service.unload_adapter(name)
        self._json(200, {"status": f"unloaded {name}"})

    # --- sending ---

    def _headers(self, kind: str, more: Mapping[str, str]) -> None:
        for name, value in {"Content-Type": kind, **_SAFE, **more}.items():
            self.send_header(name, value)
        self.end_headers()

    def _send(self, status: int, body: bytes, kind: str) -> None:
        try:
            self.send_response(status)
            more = {"Content-Length": str(len(body))}
            more |= {"Connection": "close"} if self.close_connection else {}
            self._headers(kind, more | ({"Retry-After": "1"} if status == 429 else {}))
            if self.command != "HEAD":
                self.wfile.write(body)
        except OSError:
            self.close_connection = True

    def _json(self, status: int, answer: Mapping[str, Any]) -> None:
        self._send(status, json.dumps(answer, ensure_ascii=False).encode(), "application/json; charset=utf-8")

    def _event(self, data: str) -> None:
        line = f"data: {data}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line) if self.is_chunked else line)
        self.wfile.flush()

    def _take_unread(self) -> None:
        """Closed while bytes lie unread, a connection is reset, and the answer on its way is lost with it."""
        until = time.monotonic() + _UNREAD_S
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(1.0)
            while self.connection.recv(1 << 20) and time.monotonic() < until:
                pass

    def _is_gone(self) -> bool:
        """Whether the client hung up while its answer was awaited."""
        try:
            look = select.poll()  # select itself takes no descriptor above 1,023
            look.register(self.connection, select.POLLIN)
            return bool(look.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):  # ValueError: it is closed
            return True


def _place(error: BaseException) -> str:
    """An error by kind and place, not by its words, which may be a prompt's."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} in {Path(last.filename).name}, line {last.lineno}"


def _packed(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
