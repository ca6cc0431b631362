"""`duoka doctor`: are this machine, or several, fit for training? Exit code 3 when a finding is a blocker."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from duoka.cli.hosts import HostFlags, host_options, typed_hosts

if TYPE_CHECKING:
    from duoka.cluster.compare import NodeFinding
    from duoka.cluster.doctor import Finding
    from duoka.cluster.survey import Question
    from duoka.config.hosts import Host
    from duoka.config.loaded import Loaded

_MARKS = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red"), "skip": ("-   ", None)}


@click.command("doctor", help="Check this machine, or those of --hosts (and of CONFIG): are they fit, and alike?")
@click.argument("config", type=click.Path(), required=False)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@host_options
@click.option(
    "--level", type=click.Choice(["quick", "net"]), default="quick", show_default=True,
    help="net: connect all pairs of hosts, both ways.",
)  # fmt: skip
@click.option("--output", default="", help="The folder that runs will be written to; default: CONFIG's, or runs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    config: str | None, overrides: tuple[str, ...], hosts: str, hostfile: str, include: str, exclude: str, level: str,
    output: str, as_json: bool,
) -> int:  # fmt: skip
    from duoka.cluster.doctor import examine
    from duoka.config.hosts import read_hosts
    from duoka.config.load import load_config
    from duoka.errors import ConfigError

    loaded = load_config(config, overrides) if config else None
    found = typed_hosts(HostFlags(hosts, hostfile, include, exclude))
    if not found and loaded is not None and loaded.config.cluster.hosts:
        found = read_hosts(loaded.config.cluster.hosts)
    output = output or (loaded.config.output if loaded is not None else "runs")
    if found:
        return _examine_hosts(found, loaded, output, level, as_json)
    if level != "quick":
        raise ConfigError(f"--level {level} is about several machines", fix="name them:   --hosts a,b")
    return _show_one(examine(Path(output)), as_json)


def _show_one(findings: Sequence[Finding], as_json: bool) -> int:
    if as_json:
        return _print_json(findings)
    width = max(len(one.check) for one in findings)
    for one in findings:
        _print_line(one.severity, one.check.ljust(width), one.seen)
        if one.severity in ("warn", "fail"):
            _print_more(width, wanted=one.wanted, do=one.fix)
    return _print_sum(findings, "training would not work here")


def _print_json(findings: Sequence[Finding] | Sequence[NodeFinding]) -> int:
    blockers = [one for one in findings if one.severity == "fail"]
    answer: dict[str, Any] = {"fit": not blockers, "findings": [asdict(one) for one in findings]}
    click.echo(json.dumps(answer, indent=2, ensure_ascii=False))
    return _exit_code(len(blockers))


def _exit_code(num_blockers: int) -> int:
    from duoka.errors import DoctorError

    return DoctorError.exit_code if num_blockers else 0


def _print_line(severity: str, check: str, seen: str) -> None:
    word, color = _MARKS[severity]
    click.echo(f"{click.style(word, fg=color)}  {check}  {seen}")


def _print_more(width: int, **words: str) -> None:
    for name, text in words.items():
        if text:
            click.echo(f"{' ' * (width + 8)}{name}: {text}")


def _print_sum(findings: Sequence[Finding] | Sequence[NodeFinding], consequence: str) -> int:
    num_blockers = sum(one.severity == "fail" for one in findings)
    warned = sum(one.severity == "warn" for one in findings)
    if num_blockers:
        click.echo(f"\n{num_blockers} blocker{'s' if num_blockers > 1 else ''}: {consequence}")
    else:
        click.echo(f"\nfit for training{f', with {warned} warning' + 's' * (warned > 1) if warned else ''}")
    return _exit_code(num_blockers)


# --- several machines ---


def _examine_hosts(hosts: list[Host], loaded: Loaded | None, output: str, level: str, as_json: bool) -> int:
    from duoka.cluster.survey import examine_nodes

    question = _question(loaded, output)
    findings = examine_nodes(hosts, question, "net" if level == "net" else "quick")
    if as_json:
        return _print_json(findings)
    width = max(len(one.check) for one in findings)
    for one in findings:
        values = [f"{name}: {value}" if name != "all" else value for name, value in one.nodes.items()]
        if one.check == "reach" and one.severity == "ok":
            values = [f"{len(one.nodes)} machines answer: {', '.join(one.nodes)}"]
        _print_line(one.severity, one.check.ljust(width), "; ".join(values))
        if one.severity in ("warn", "fail"):
            _print_more(width, cause=one.cause, do=one.fix)
    return _print_sum(findings, "training over these machines would not work")


def _question(loaded: Loaded | None, output: str) -> Question:
    """The config, its data and its model: what must be the same everywhere."""
    from duoka.cluster.survey import Question
    from duoka.data.read.registry import find_sets
    from duoka.hub.models import find_model

    if loaded is None:
        return Question(output=output)
    files = [path for found in find_sets(loaded.config, loaded.base) for path in found.files]
    folder = find_model(loaded.config.model, loaded.base).folder
    paths = [loaded.path, *files, *((folder,) if folder else ())]
    return Question(list(dict.fromkeys(os.path.abspath(path) for path in paths)), output)
