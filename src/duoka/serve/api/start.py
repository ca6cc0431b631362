"""From what is to be served to a running server: the model, its adapters by name, and room for keys and values."""

from __future__ import annotations

import errno
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import FrameType
from typing import TypeVar

import torch

from duoka.comm.world import pick_device
from duoka.errors import ConfigError
from duoka.model.answer import stop_tokens
from duoka.model.quantize import decode_fast
from duoka.model.slots import register_slot_attention
from duoka.plan.hardware import read_machine
from duoka.serve.api.requests import Facts
from duoka.serve.api.server import Server, Service
from duoka.serve.batching.adapters import why_not_by_rows
from duoka.serve.batching.model import SlotModel, refusal
from duoka.serve.batching.scheduler import Scheduler
from duoka.serve.load_run import Trained, choose_dtype, load_chat_tokenizer, load_trained
from duoka.units import format_bytes

_SHARE = 0.5  # of what is free beside the model, for keys and values
_LEAST_TOKENS = 256
T = TypeVar("T")
LAST_WORDS_S = 30.0  # for answers that are on their way when the server is asked to stop


@dataclass(frozen=True)
class Settings:
    host: str = "127.0.0.1"
    port: int = 8000
    key: str = ""  # empty: one is drawn
    num_rows: int = 8
    max_waiting: int = 64
    cache_bytes: int = 0  # 0: half of what is free
    precision: str = "auto"


def build_service(trained: Trained, adapters: Mapping[str, Trained], settings: Settings) -> Service:
    by_rows = trained.adapter is not None and not trained.merged and not why_not_by_rows(trained.adapter)
    below = trained.full or trained.base
    if adapters and not by_rows and (trained.is_adapted or trained.checkpoint is not None):
        what = "no plain adapter" if trained.is_adapted else "a checkpoint of a model that was trained in full"
        raise ConfigError(
            f"{trained.name} is {what}, so others cannot be laid beside it", fix="serve the base with --adapter"
        )
    model, per_token = _by_another_thread(lambda: _load(trained, settings, base_only=by_rows))
    own = _short(trained.name)
    models: dict[str, str | None] = {own: None}
    if by_rows:
        assert trained.adapter is not None
        model.adapters.add(own, trained.adapter)
        base = _short(trained.base_name)
        models = {own: own, base if base != own else f"{base}-base": None}
    for name, other in adapters.items():
        if name in models:
            raise ConfigError(f"--adapter {name}=...: there is a model of that name already", fix="choose another name")
        if other.adapter is None or other.base.resolve() != below.resolve():
            what = f"--adapter {name}={other.name} is no finished adapter on {trained.full or trained.base_name}"
            raise ConfigError(what, fix="serve it by itself")
        model.adapters.add(name, other.adapter)
        models[name] = name
    max_bytes = settings.cache_bytes or int(_SHARE * _free_bytes(model.device))
    if max_bytes < _LEAST_TOKENS * per_token:
        need = format_bytes(_LEAST_TOKENS * per_token)
        raise ConfigError(
            f"{format_bytes(max_bytes)} are left for keys and values; {need} are the least",
            fix="a smaller model, or a larger machine",
        )
    scheduler = Scheduler(model, bytes_per_token=per_token, max_bytes=max_bytes, max_waiting=settings.max_waiting)
    tokenizer = load_chat_tokenizer(trained)
    vocabulary = int(model.lm.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    facts = Facts(tokenizer, vocabulary, model.window, stop_tokens(model.lm, tokenizer), models)
    key = settings.key or f"duoka-{secrets.token_urlsafe(18)}"
    return Service(scheduler, facts, key, models, below, (trained.name, trained.base_name))


def _load(trained: Trained, settings: Settings, *, base_only: bool) -> tuple[SlotModel, int]:
    """The model, and the bytes of keys and values that a token takes."""
    attention, dtype = register_slot_attention(), choose_dtype(settings.precision)
    try:
        lm = load_trained(trained, dtype=dtype, attention=attention, base_only=base_only)
    except ConfigError as error:
        cause = error.__cause__
        if isinstance(cause, KeyError) and cause.args == (attention,):
            raise refusal("its code knows attentions by name, and no other than its own") from None
        raise
    decode_fast(lm)
    model = SlotModel(lm.to(pick_device(0)), settings.num_rows)
    return model, model.check()


def _by_another_thread(function: Callable[[], T]) -> T:
    """The answer of a thread that ends with it.

    Every thread that computes gets helpers of its own from OpenMP, and as soon as there are more of all threads' than
    cores, none of them stays awake between two products: while the thread that loaded the model had its helpers still,
    answers of the 135M model took 1.13 to 1.16 times as long on two cores.
    """
    with ThreadPool(1) as pool:
        return pool.apply(function)


def _short(name: str) -> str:
    """A folder by its last part; a Hub id as it is."""
    path = Path(name).expanduser()
    return path.resolve().name if path.exists() else name


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else read_machine().available_bytes


def open_server(service: Service, settings: Settings) -> Server:
    try:
        return Server((settings.host, settings.port), service)
    except OSError as error:
        fix = "choose another one: --port 8001   (0: any that is free)"
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            fix = "--host is an address of this machine: 127.0.0.1, or for all of its networks 0.0.0.0 or ::"
        raise ConfigError(
            f"port {settings.port} of {settings.host} cannot be opened: {error.strerror or error}", fix=fix
        ) from None


def describe_server(server: Server, settings: Settings, tokens: int) -> list[str]:
    service = server.service
    host, port = settings.host, server.server_address[1]
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    address = f"http://{f'[{near}]' if ':' in near else near}:{port}"
    lines = [
        f"serving {', '.join(service.facts.models)}",
        f"  API         {address}/v1   (OpenAI's: chat, completions, embeddings, models)",
        f"  key         {service.key}",
        f"  chat page   {address}/#key={service.key}",
        f"  room        {settings.num_rows} answers at once, {tokens:,} tokens of keys and values",
    ]
    model = service.scheduler.model
    if model.window < model.own_window:
        lines.append(
            f"  note        texts reach {model.window:,} of this model's {model.own_window:,} tokens: beyond, its "
            "positions depend on how long a text is (duoka chat takes all of them)"
        )
    if host not in ("127.0.0.1", "localhost", "::1"):
        lines.append(f"  note        {host} is reachable from other machines; the key is all that keeps them out")
    return lines


def run_server(server: Server) -> None:
    """Answer until a signal; then what is on its way is finished, for LAST_WORDS_S, or until a second signal."""
    asked, again = threading.Event(), threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        (again if asked.is_set() else asked).set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    scheduler = server.service.scheduler
    scheduler.start()
    listener = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    listener.start()
    try:
        while not asked.wait(0.5):
            pass
        server.shutdown()
        end = time.monotonic() + LAST_WORDS_S
        # Computed is not sent: the threads that send go with the process.
        while (
            (scheduler.num_active or scheduler.num_waiting or server.num_answering)
            and time.monotonic() < end
            and not again.wait(0.05)
        ):
            pass
    finally:
        scheduler.close()
        server.server_close()
        for number, handler in before.items():
            signal.signal(number, handler)
