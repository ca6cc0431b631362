"""`duoka serve --host`: addresses of both kinds, and names and addresses that are none of this machine's."""

from __future__ import annotations

import socket
import threading
import urllib.request
from types import SimpleNamespace
from typing import Any

import pytest

from duoka.errors import ConfigError
from duoka.serve.api.server import Server
from duoka.serve.api.start import Settings, describe_server, open_server

SERVICE: Any = SimpleNamespace(
    facts=SimpleNamespace(models=["tiny"]),
    key="k",
    scheduler=SimpleNamespace(model=SimpleNamespace(window=8, own_window=8)),
)


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize(
    ("host", "shown"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("localhost", "localhost"),
     *([("::1", "[::1]"), ("::", "[::1]")] if has_ipv6() else [])],
)  # fmt: skip
def test_the_address_that_is_shown_answers(host: str, shown: str) -> None:
    settings = Settings(host=host, port=0)
    with open_server(SERVICE, settings) as server:
        line = next(line for line in describe_server(server, settings, 8) if "API" in line)
        address = line.split()[1].removesuffix("/v1")
        assert address == f"http://{shown}:{server.server_address[1]}"
        listener = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        listener.start()
        try:
            ask = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            assert ask.open(f"{address}/health", timeout=20).read() == b'{"status": "ok"}'
        finally:
            server.shutdown()
            listener.join()


@pytest.mark.parametrize("host", ["no.such.name.invalid", "192.0.2.1"])
def test_what_is_no_address_of_this_machine_is_not_the_port_s_fault(host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_server(SERVICE, Settings(host=host, port=0))
    assert host in caught.value.what and "--host is an address of this machine" in (caught.value.fix or "")


def test_a_port_that_is_taken_is() -> None:
    with Server(("127.0.0.1", 0), SERVICE) as server, pytest.raises(ConfigError, match="cannot be opened") as caught:
        open_server(SERVICE, Settings(port=int(server.server_address[1])))
    assert "--port" in (caught.value.fix or "")
