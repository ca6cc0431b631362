"""`duoka alerts RUN`: follows a run until it ends and tells others; a run with `log.alert` starts one by itself."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from duoka.config.schema_running import AlertConfig
    from duoka.runs.folder import RunFolder

OUTPUT = "alerts.log"  # in the run's logs/


@click.command("alerts")
@click.argument("run")
@click.option("--folder", default="runs", show_default=True, help="Where runs are looked for by name.")
@click.option("--command", "hook", help="A shell command, with DUOKA_ALERT, DUOKA_RUN and DUOKA_TEXT set.")
@click.option("--webhook", help="An address that gets a POST with JSON.")
def command(run: str, folder: str, hook: str | None, webhook: str | None) -> None:
    """Follow RUN until it ends, and tell when it is done, failed, stands still, or its loss jumps.

    Whom, says log.alert of the run's config, or the options. What was told is in logs/alerts.log of the run.
    """
    from duoka.errors import ConfigError
    from duoka.runs.find import find_run
    from duoka.watch.alerts import Alert, follow_and_tell, only_one, post, run_command

    found = find_run(run, Path(folder))
    alert = _config(found)
    hook, webhook = (hook, webhook) if hook or webhook else (alert.command, alert.webhook)
    if not (hook or webhook):
        raise ConfigError(f"nobody is named to be told of {found.path}", fix="add --command, --webhook or log.alert")

    def tell(what: Alert) -> None:
        problems = [run_command(hook, what)] if hook else []
        problems += [post(webhook, what)] if webhook else []
        line = " ".join([time.strftime("%Y-%m-%d %H:%M:%S"), what.kind, what.text, *filter(None, problems)])
        click.echo(line)
        with (found.logs / OUTPUT).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    with only_one(found) as is_first:
        if is_first:
            follow_and_tell(found, tell, alert.events)
        else:
            click.echo("another process tells of this run already", err=True)


def _config(run: RunFolder) -> AlertConfig:
    """Of a run without a config (somebody's own loop): the defaults."""
    from duoka.config.load import load_config
    from duoka.config.schema_running import AlertConfig

    return load_config(run.config).config.log.alert if run.config.is_file() else AlertConfig()
