"""`duoka train run.yaml --hosts a,b`: which machines are meant, and the run on all of them from this terminal."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from duoka.cli.prepare import Say

if TYPE_CHECKING:
    from duoka.cluster.fleet import Fleet
    from duoka.cluster.nodes import Flags
    from duoka.config.hosts import Host
    from duoka.config.loaded import Loaded
    from duoka.runs.folder import RunFolder


@dataclass(frozen=True)
class HostFlags:
    """What was typed about machines."""

    hosts: str = ""
    hostfile: str = ""
    include: str = ""
    exclude: str = ""


def host_options(function: Any) -> Any:
    """--hosts and its kin, for commands that work on several machines."""
    for option in reversed((
        click.option("--hosts", default="", metavar="A,B", help="Machines by their ssh names: start on all of them."),
        click.option("--hostfile", default="", metavar="FILE", help="From a file: a line `name slots=4` for each."),
        click.option("--include", default="", metavar="A@B:0,1", help="Of the hostfile, these (and their GPUs) only."),
        click.option("--exclude", default="", metavar="A@B:0,1", help="Of the hostfile, all but these."),
    )):  # fmt: skip
        function = option(function)
    return function


def typed_hosts(typed: HostFlags) -> list[Host]:
    """The machines that were typed; none: the YAML, or this machine."""
    from duoka.config.hosts import check_hosts, choose_hosts, parse_hosts, read_hostfile
    from duoka.errors import ConfigError

    if typed.hosts and typed.hostfile:
        raise ConfigError("--hosts and --hostfile are both given", fix="keep one of them")
    if (typed.include or typed.exclude) and not typed.hostfile:
        raise ConfigError(
            "--include and --exclude choose from a hostfile", fix="write for example:   --hostfile hostfile"
        )
    if typed.hosts:
        return parse_hosts(typed.hosts)
    if not typed.hostfile:
        return []
    return check_hosts(choose_hosts(read_hostfile(typed.hostfile), typed.include, typed.exclude), typed.hostfile)


def find_hosts(config: str, overrides: tuple[str, ...], typed: HostFlags, flags: Flags) -> list[Host]:
    """The machines that this command is to start, by what was typed or by the YAML; none: it is one machine's part."""
    from duoka.cluster.ranks import START_NAMES
    from duoka.config.hosts import read_hosts
    from duoka.config.load import load_config
    from duoka.errors import ConfigError, Faults

    hosts = typed_hosts(typed)
    places = [name for name in START_NAMES if os.environ.get(name, "").strip() and name != "FORCE_TORCHRUN"]
    if hosts and places:
        what = f"--hosts starts all machines, and {', '.join(places)} in the environment is one machine's part"
        raise ConfigError(what, fix=f"keep one of the two:   unset {' '.join(places)}")
    if hosts or places or flags.nodes or flags.meet:
        return hosts
    try:
        names = load_config(config, overrides).config.cluster.hosts
    except Faults:  # with all others of this machine, in one message
        return []
    return read_hosts(names) if names else []


def train_on(hosts: list[Host], config: str, overrides: tuple[str, ...], flags: Flags, *, dry_run: bool) -> int:
    """Start, show and wait; the exit code is the run's, as on one machine."""
    from duoka.cli.outcome import print_verdict
    from duoka.cluster.fleet import run_fleet
    from duoka.cluster.run_lock import find_run_folder
    from duoka.config.load import load_config

    loaded = load_config(config, overrides)
    fleet = build_fleet(hosts, config, overrides, find_run_folder(loaded), flags)
    if dry_run:
        return _print_dry_run(fleet, loaded, config, overrides, flags)
    verdict = run_fleet(fleet, Say())
    print_verdict(verdict)
    return verdict.exit_code


def build_fleet(hosts: list[Host], config: str, overrides: tuple[str, ...], run: RunFolder, flags: Flags) -> Fleet:
    from duoka.cluster.fleet import Fleet
    from duoka.errors import ConfigError

    slots = slots_of(hosts)
    if slots and flags.nproc and slots != flags.nproc:
        raise ConfigError(f"slots={slots} and --nproc {flags.nproc}", fix="keep one of them")
    least = _least(flags.nodes, len(hosts))
    nproc = flags.nproc or slots
    words = (("--nproc", nproc), ("--restarts", flags.restarts), ("--wait", flags.wait))
    passed = tuple(part for name, value in words if value for part in (name, str(value)))
    return Fleet(
        hosts, (config, *overrides), Path(config), run, passed, least, _meeting_place(flags.meet), flags.port or 0,
    )  # fmt: skip


def slots_of(hosts: Sequence[Host]) -> int | None:
    """Processes on each machine, where one of them says so."""
    return next((host.slots for host in hosts if host.slots), None)


def _least(nodes: str, count: int) -> int:
    from duoka.errors import ConfigError

    if not nodes:
        return count
    low, _, high = nodes.partition(":")
    if not (low.isdecimal() and (high or low).isdecimal() and 1 <= int(low) <= int(high or low) == count):
        raise ConfigError(
            f"--nodes is {nodes}, and there are {count} hosts",
            fix=f"write --nodes {count}, or the least, --nodes 1:{count}",
        )
    return int(low)


def _meeting_place(meet: str) -> tuple[str, int] | None:
    from duoka.errors import ConfigError

    if not meet:
        return None
    host, _, port = meet.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigError(f'--meet is "{meet}"', fix="write an address of the first host:   --meet 192.168.1.100:29500")
    return host.strip("[]"), int(port)


def _print_dry_run(fleet: Fleet, loaded: Loaded, config: str, overrides: tuple[str, ...], flags: Flags) -> int:
    """What would be started where, and then the plan."""
    from duoka.cli.outcome import print_plan
    from duoka.cluster.fleet import node_variables
    from duoka.cluster.launch import count_processes
    from duoka.cluster.run_lock import check_claim
    from duoka.plan.hardware import read_machine
    from duoka.process.secrets import mask_secrets

    for number, host in enumerate(fleet.hosts):
        shown = mask_secrets(node_variables(host, number))
        env = " ".join(f"{name}={shlex.quote(value)}" for name, value in shown.items())
        words = shlex.join(fleet.command("ADDRESS:PORT"))
        click.echo(f"{host}:   cd {shlex.quote(fleet.folder)} && {env} {words}")
    click.echo("ADDRESS is the first machine's, as ssh reaches it, and PORT one that is free there\n")
    nproc = flags.nproc or slots_of(fleet.hosts) or count_processes(None, len(read_machine().gpus))
    return print_plan(config, overrides, fleet.run, check_claim(loaded, fleet.run), nproc * len(fleet.hosts))
