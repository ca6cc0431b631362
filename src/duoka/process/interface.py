"""By which network gloo's ranks of several machines find each other.

Called by world.py before the process group, and by launchers, whose ranks may be scripts that know nothing of duoka.

Gloo asks what this host's name means, which on many machines (Debian's default) is 127.0.1.1: no other machine gets
there. The network that leads to MASTER_ADDR is one that all machines have in common. Who has chosen is left alone.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from duoka.process.environ import RankEnvironment

# By gloo, and by NCCL, whose ranks find each other over a socket whatever carries their data later.
_CHOSEN = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_ANY_PORT = 9  # nothing is sent


def choose_interface(place: RankEnvironment) -> None:
    """For worlds of several machines, GPU ones too: beside NCCL, saves talk over gloo."""
    if place.size > place.local_size:
        os.environ.update(interface_environment(place.master_addr, os.environ))


def interface_environment(host: str, env: Mapping[str, str]) -> dict[str, str]:
    """The variables that name the interface towards `host`, where nobody has set them."""
    missing = [one for one in _CHOSEN if not env.get(one)]
    name = interface_towards(host) if missing else ""
    return dict.fromkeys(missing, name) if name else {}


def interface_towards(host: str) -> str:
    """The name of the network interface by which this machine reaches `host`; empty: nobody knows."""
    import psutil

    own = address_towards(host)
    for name, addresses in psutil.net_if_addrs().items():
        if own and any(one.address == own for one in addresses):
            return name
    return ""


def address_towards(host: str) -> str:
    """This machine's own address in the network by which it reaches `host`; empty: nobody knows."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def is_own_address(host: str) -> bool:
    """Whether `host` is this very machine. False where the name is not known."""
    try:
        address = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0][4][0]
    except OSError:
        return False
    return address_towards(host) == address
