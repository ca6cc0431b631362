"""By which network gloo's ranks of several machines find each other.

Called by world.py before the process group, and by launchers, whose ranks may be scripts that know nothing of duoka.

Gloo asks what this host's name means, which on many machines (Debian's default) is 127.0.1.1: no other machine gets
there. The network that leads to MASTER_ADDR is one that all machines have in common. Who has chosen is left alone.
Where MASTER_ADDR is this machine's own name, that is 127.0.1.1 too: then its network is the one that leads outwards.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Mapping
from typing import Any

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
    """The name of the network interface by which others reach this machine, as this one reaches `host`; empty: nobody
    knows."""
    import psutil

    own = address_towards(host)
    if own and is_loopback(own) and not means_loopback(host):
        own = _address_outwards() or own
    for name, addresses in psutil.net_if_addrs().items():
        if own and any(one.address == own for one in addresses):
            return name
    return ""


def address_towards(host: str) -> str:
    """This machine's own address in the network by which it reaches `host`; empty: nobody knows."""
    try:
        return _source(*find_addresses(host)[0])
    except OSError:
        return ""


def is_own_address(host: str) -> bool:
    """Whether `host` is this very machine. False where the name is not known."""
    try:
        found = find_addresses(host)
    except OSError:
        return False
    return any(is_loopback(address[0]) for _, address in found) or address_towards(host) == found[0][1][0]


def find_addresses(host: str) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    """What `host` means, first what others may reach: /etc/hosts often gives a machine's own name 127.0.1.1 as well as
    its address. Raises OSError."""
    try:
        found = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    except UnicodeError as error:  # two dots in a row, say
        raise OSError(errno.EINVAL, f"no name of a machine ({error})") from None
    return sorted(((family, address) for family, _, _, _, address in found), key=lambda one: is_loopback(one[1][0]))


def is_loopback(address: str) -> bool:
    """Of an address, as the system writes it."""
    return ipaddress.ip_address(address).is_loopback


def means_loopback(host: str) -> bool:
    """Whether `host` as it is written means each machine itself: 127.0.0.1, ::1, 0.0.0.0, localhost."""
    try:
        found = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host.lower() in ("localhost", "localhost.localdomain")
    return found.is_loopback or found.is_unspecified


def _source(family: socket.AddressFamily, address: tuple[Any, ...]) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _address_outwards() -> str:
    """By which this machine would leave for a far one, or else any that is not itself alone; empty: it has none."""
    import psutil

    for family, far in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):  # of documentation: nobody's
        with contextlib.suppress(OSError):
            return _source(family, (far, _ANY_PORT))
    up = {name for name, facts in psutil.net_if_stats().items() if facts.isup}
    kinds = (socket.AF_INET, socket.AF_INET6)
    cards = [addresses for name, addresses in psutil.net_if_addrs().items() if name in up]
    own = [one.address for addresses in cards for one in addresses if one.family in kinds]
    return next((one for one in own if not is_loopback(one)), "")
