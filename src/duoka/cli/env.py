"""`duoka env`: what a bug report needs of this machine and installation, to paste; secrets are left out."""

from __future__ import annotations

import json

import click


@click.command("env", help="Print what a bug report needs: versions, machine, settings. Secrets are left out.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    from duoka.cluster.bug_report import fact_lines, read_facts

    facts = read_facts()
    click.echo(json.dumps(facts, indent=2, ensure_ascii=False) if as_json else "\n".join(fact_lines(facts)))
