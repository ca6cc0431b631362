"""`duoka doctor`: is this machine fit for training? Prints findings; exit code 3 when one is a blocker."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

_MARKS = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red"), "skip": ("-   ", None)}


@click.command("doctor", help="Check this machine: packages, cores, memory, GPUs, folders, network, clock.")
@click.option("--output", default="runs", show_default=True, help="The folder that runs will be written to.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(output: str, as_json: bool) -> int:
    from duoka.cluster.doctor import examine
    from duoka.errors import DoctorError

    findings = examine(Path(output))
    blockers = [one for one in findings if one.severity == "fail"]
    if as_json:
        answer = {"fit": not blockers, "findings": [asdict(one) for one in findings]}
        click.echo(json.dumps(answer, indent=2, ensure_ascii=False))
        return DoctorError.exit_code if blockers else 0
    width = max(len(one.check) for one in findings)
    for one in findings:
        word, color = _MARKS[one.severity]
        click.echo(f"{click.style(word, fg=color)}  {one.check.ljust(width)}  {one.seen}")
        if one.severity in ("warn", "fail"):
            indent = " " * (width + 8)
            click.echo(f"{indent}wanted: {one.wanted}" if one.wanted else "", nl=bool(one.wanted))
            click.echo(f"{indent}do: {one.fix}" if one.fix else "", nl=bool(one.fix))
    warned = sum(one.severity == "warn" for one in findings)
    if blockers:
        click.echo(f"\n{len(blockers)} blocker{'s' if len(blockers) > 1 else ''}: training would not work here")
        return DoctorError.exit_code
    click.echo(f"\nfit for training{f', with {warned} warning' + 's' * (warned > 1) if warned else ''}")
    return 0
