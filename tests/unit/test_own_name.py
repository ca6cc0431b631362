"""Machines whose own name means 127.0.1.1 to themselves, as Debian's installer writes it, and not to others."""

from __future__ import annotations

import ipaddress
import os
import socket
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from duoka.cluster.elastic import open_listeners
from duoka.cluster.meeting import Rules
from duoka.cluster.nodes import FixedNodes, Flags, read_node_start
from duoka.errors import ConfigError
from duoka.process.environ import RankEnvironment
from duoka.process.interface import choose_interface, interface_towards, is_own_address

LAN = "127.0.0.9"  # of this machine, for tests; `is_loopback` of the standard library is told that it is none


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two network cards, of which the second leads to LAN; and names that /etc/hosts of such a machine knows."""
    names = {"node1": ["127.0.1.1"], "node2": ["127.0.1.1", LAN], "far": [LAN], "localhost": ["127.0.0.1"]}
    real, kind = socket.getaddrinfo, socket.AF_INET

    def find(host: str, port: int, *rest: Any, **more: Any) -> list[Any]:
        return (
            [(kind, more["type"], 0, "", (one, port)) for one in names[host]]
            if host in names
            else real(host, port, *rest, **more)
        )

    cards = {"lo": "127.0.0.1", "down0": "10.9.9.9", "lan0": LAN}
    monkeypatch.setattr(socket, "getaddrinfo", find)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {one: SimpleNamespace(isup=one != "down0") for one in cards})
    monkeypatch.setattr(
        psutil, "net_if_addrs", lambda: {n: [SimpleNamespace(family=kind, address=a)] for n, a in cards.items()}
    )
    monkeypatch.delenv("DUOKA_ALLOW_LOOPBACK", raising=False)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")


@pytest.fixture
def no_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """No default route; LAN counts as an address of a network, and is reached from itself."""

    class Probe(socket.socket):
        def connect(self, address: Any) -> None:
            if not address[0].startswith("127."):
                raise OSError(101, "Network is unreachable")
            if address[0] == LAN:
                self.bind((LAN, 0))
            super().connect(address)

    real = ipaddress.IPv4Address.is_loopback.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(socket, "socket", Probe)
    monkeypatch.setattr(ipaddress.IPv4Address, "is_loopback", property(lambda self: str(self) != LAN and real(self)))


@pytest.mark.usefixtures("no_way_out")
@pytest.mark.parametrize("name", ["node1", "node2", "far"])
def test_the_machine_that_is_met_does_not_hide_on_loopback(name: str) -> None:
    """Its ranks listened on lo, and those of the others waited for them."""
    assert interface_towards(name) == "lan0"
    choose_interface(RankEnvironment(0, 0, 2, 1, 0, name, 1))
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "lan0"


@pytest.mark.usefixtures("no_way_out")
@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "127.0.1.1"])
def test_who_writes_the_loopback_address_means_it(name: str) -> None:
    assert interface_towards(name) == "lo"


def test_the_way_outwards_is_that_of_the_default_route(monkeypatch: pytest.MonkeyPatch) -> None:
    class Probe(socket.socket):
        def getsockname(self) -> Any:
            return ("10.9.9.9", 1) if self.asked.startswith(("192.0.2.", "2001:db8")) else super().getsockname()

        def connect(self, address: Any) -> None:
            self.asked = str(address[0])
            if self.asked.startswith("127."):
                super().connect(address)

    monkeypatch.setattr(socket, "socket", Probe)
    assert interface_towards("node1") == "down0", "as the system says, whatever else there is"


@pytest.mark.usefixtures("no_way_out")
def test_its_own_name_is_its_own_address() -> None:
    assert is_own_address("node1") and is_own_address("node2")
    with pytest.raises(ConfigError, match="NODE_RANK is 1 here, and MASTER_ADDR=node1 is this machine's own address"):
        FixedNodes(2, 1, "node1", 29500).check()


@pytest.mark.usefixtures("no_way_out")
def test_a_rendezvous_listens_where_others_find_it() -> None:
    """/etc/hosts has both lines for it: the first was taken, and refused."""
    (listener,) = open_listeners(Rules(1, 2, "node2", 0))
    with listener:
        assert listener.getsockname()[0] == LAN
    with pytest.raises(ConfigError, match=r"which here is 127\.0\.1\.1: no other machine can connect"):
        open_listeners(Rules(1, 2, "node1", 0))


def test_a_rendezvous_listens_at_each_address_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first was taken: machines without IPv6 came to nobody, and nobody held it where the first was no own."""
    kinds = (socket.AF_INET, ("192.0.2.1", 0)), (socket.AF_INET, ("127.0.0.2", 0)), (socket.AF_INET, ("127.0.0.3", 0))
    monkeypatch.setattr("duoka.cluster.elastic.find_addresses", lambda host: [*kinds, kinds[1]])
    monkeypatch.setattr("duoka.cluster.elastic.is_loopback", lambda address: False)
    listeners = open_listeners(Rules(1, 2, "both", 0))
    try:
        assert [one.getsockname()[0] for one in listeners] == ["127.0.0.2", "127.0.0.3"]
        taken = listeners[1].getsockname()[1]
        assert open_listeners(Rules(1, 2, "both", taken)) == [], "another launcher here has one of them"
    finally:
        for one in listeners:
            one.close()
    monkeypatch.setattr("duoka.cluster.elastic.find_addresses", lambda host: kinds[:1])
    assert open_listeners(Rules(1, 2, "far", 0)) == []


def test_brackets_around_an_ipv6_address_are_left_out() -> None:
    """Torch asked the name server for them, and each rank waited until parallel.timeout."""
    env = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "[fd77::1]", "MASTER_PORT": "29500"}
    assert read_node_start(Flags(), env).master_addr == "fd77::1"
    assert read_node_start(Flags(nodes="1:2", meet="[fd77::1]:29500"), {}).elastic == Rules(1, 2, "fd77::1", 29500)


def test_a_meeting_s_port_that_is_taken_is_changed_on_all_nodes() -> None:
    """It said to leave --port out, which nobody had typed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
        with pytest.raises(ConfigError, match=f"port {port} is taken") as caught:
            FixedNodes(2, 0, "far", port).check()
    assert "MASTER_PORT=29501" in (caught.value.fix or "") and "--port" not in str(caught.value)


@pytest.mark.parametrize("name", ["no.such.name.invalid", "node..1"])
@pytest.mark.parametrize("node", [0, 1])
def test_a_name_that_nobody_knows_is_refused_at_once(name: str, node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks asked for it again and again, in torch's words, until parallel.timeout."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match=f"MASTER_ADDR is {name}, which does not resolve"):
        FixedNodes(2, node, name, 29500).check()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with socket.socket() as one:
        one.bind(("", 0))
        port = int(one.getsockname()[1])
    FixedNodes(2, node, name, port).check()
