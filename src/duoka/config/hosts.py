"""Machines as people write them: `user@node:2222 slots=4`, lists of them, and the hostfiles of DeepSpeed and Open MPI.

Read by the schema (`cluster.hosts`) and by the command line (`--hosts`, `--hostfile`, `--include`, `--exclude`).
Nothing here connects to anything; names mean what the user's ssh config says.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator

from duoka.config.fields import Means
from duoka.errors import ConfigError

_TARGET = re.compile(r"(?:(?P<user>\w[\w.+-]*)@)?(?P<name>\w[\w.-]*|\[[0-9A-Fa-f:.%\w]+\])(?::(?P<port>\d{1,5}))?")
EXAMPLE = "node1, user@node2, node3:2222, or node4 slots=4"


@dataclass(frozen=True)
class Host:
    """One machine: what ssh is told, and how many processes it is to start."""

    name: str  # or an alias of the ssh config
    user: str = ""
    port: int = 0  # of sshd; 0: as the ssh config says
    slots: int | None = None  # None: one per GPU
    devices: tuple[int, ...] = ()  # the GPUs that were chosen of it; empty: all
    way: Literal["ssh", "slurm", "pod"] = "ssh"  # to it: ssh, srun in its job, kubectl exec

    @property
    def target(self) -> str:
        return f"{self.user}@{self.name}" if self.user else self.name

    @property
    def by_hand(self) -> str:
        """What a person types in front of a command to run it there."""
        if self.way == "slurm":
            return f"srun --overlap --nodes=1 --nodelist={self.name}"
        if self.way == "pod":
            return f"kubectl exec {self.name} --"
        return f"ssh {f'-p {self.port} ' if self.port else ''}{self.target}"

    def __str__(self) -> str:
        return f"{self.target}:{self.port}" if self.port else self.target


def parse_host(text: str) -> Host:
    """`[user@]name[:port] [slots=N]`. Raises ValueError."""
    words = str(text).split()
    found = _TARGET.fullmatch(words[0]) if words else None
    if found is None:
        raise ValueError(f'"{text}" names no machine')
    slots = None
    for word in words[1:]:
        key, _, value = word.partition("=")
        if key != "slots" or not value.isdecimal() or int(value) < 1:
            raise ValueError(f'"{word}" behind {words[0]} is not understood')
        slots = int(value)
    port = int(found["port"] or 0)
    if port > 65535:
        raise ValueError(f"{words[0]}: ports are 1 to 65535")
    return Host(found["name"].strip("[]"), found["user"] or "", port, slots)


def _checked(value: object) -> str:
    parse_host(str(value))
    return str(value).strip()


HostText = Annotated[str, BeforeValidator(_checked), Means(f"a machine: {EXAMPLE}")]


def parse_hosts(text: str) -> list[Host]:
    """What stands behind --hosts, between commas."""
    return _read([word for word in text.split(",") if word.strip()], "--hosts")


def read_hosts(texts: Sequence[str]) -> list[Host]:
    """Of `cluster.hosts`."""
    return _read(texts, "cluster.hosts")


def _read(texts: Sequence[str], where: str) -> list[Host]:
    hosts = []
    for text in texts:
        try:
            hosts.append(parse_host(text))
        except ValueError as error:
            raise ConfigError(f"{where}: {error}", fix=f"write for example:   {EXAMPLE}") from None
    return check_hosts(hosts, where)


def check_hosts(hosts: list[Host], where: str) -> list[Host]:
    """One part of a run per machine, and as many processes on each: slots=N of one goes for all."""
    names = [str(host) for host in hosts]
    if not hosts:
        raise ConfigError(f"{where} names no machine", fix=f"write for example:   {EXAMPLE}")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"{where} names {', '.join(twice)} twice", fix="one machine takes part once; slots=2 is for two"
        )
    if len({host.slots for host in hosts if host.slots}) > 1:
        seen = ", ".join(f"{host} {host.slots}" for host in hosts if host.slots)
        raise ConfigError(
            f"{where}: machines are to start different numbers of processes ({seen})",
            fix="give all machines the same slots=N; a machine of fewer GPUs sets the number",
        )
    return hosts


def read_hostfile(path: str) -> list[Host]:
    """Lines of `name slots=N` with # comments, as DeepSpeed and Open MPI have them."""
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the hostfile {path}: {error}", fix="a line for each machine: name slots=4"
        ) from None
    hosts = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        try:
            host = parse_host(text)
            if host.port:  # MPICH means processes by it, others sshd's port
                raise ValueError(f"{text.split()[0]}: in hostfiles a colon means different things to different tools")
        except ValueError as error:
            fix = "write:   name slots=4   (another port of sshd stands in ~/.ssh/config)"
            raise ConfigError(str(error), where=f"{path}, line {number}", fix=fix) from None
        hosts.append(host)
    return hosts


def choose_hosts(hosts: list[Host], include: str, exclude: str) -> list[Host]:
    """DeepSpeed's filters, of which one may be given: `a@b:0,2` is machine a, and of b the GPUs 0 and 2."""
    if include and exclude:
        raise ConfigError("--include and --exclude exclude each other", fix="keep one of them")
    if not include and not exclude:
        return hosts
    flag, wanted = ("--include", include) if include else ("--exclude", exclude)
    chosen = _read_filter(flag, wanted, hosts)
    if include:
        return [_with_devices(host, chosen[host.name]) for host in hosts if host.name in chosen]
    left = []
    for host in hosts:
        out = chosen.get(host.name)
        if out is None:
            left.append(host)
        elif out:
            kept = tuple(number for number in range(host.slots or 0) if number not in out)
            if kept:
                left.append(_with_devices(host, kept))
    return left


def _read_filter(flag: str, text: str, hosts: list[Host]) -> dict[str, tuple[int, ...]]:
    known = {host.name: host for host in hosts}
    chosen: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        name, colon, numbers = part.strip().partition(":")
        if name not in known:
            raise ConfigError(f"{flag}: {name or part!r} is not in the hostfile", fix=f"it has: {', '.join(known)}")
        slots = known[name].slots
        if colon and not all(word.isdecimal() for word in numbers.split(",")):
            raise ConfigError(f'{flag}: "{part}" names no GPUs', fix=f"write for example:   {name}:0,1")
        devices = tuple(sorted({int(word) for word in numbers.split(",")})) if colon else ()
        if devices and (slots is None or devices[-1] >= slots):
            has = f"slots={slots}" if slots else "no slots="
            raise ConfigError(f"{flag}: {name} has {has}, and GPU {devices[-1]} is asked for", fix="they count from 0")
        chosen[name] = devices
    return chosen


def _with_devices(host: Host, devices: tuple[int, ...]) -> Host:
    return replace(host, devices=devices, slots=len(devices)) if devices else host
