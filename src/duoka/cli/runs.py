"""`duoka runs`: which runs are here and how they stand; `duoka runs show NAME` is a report, `stop NAME` ends one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from duoka.cluster.listing import RunRow

HELP = "List runs with state, step, loss and age; show or stop one."


class RunsGroup(click.Group):
    """`duoka runs [FOLDER]` lists; the word `list` need not be written."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.commands, "--help"):
            args = ["list", *args]
        return super().parse_args(ctx, args)


@click.group("runs", cls=RunsGroup, help=HELP, subcommand_metavar="[FOLDER] | show NAME | stop NAME")
def command() -> None:
    pass


@command.command("list", help="List the runs in FOLDER (the default).")
@click.argument("folder", default="runs")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list.")
def show(folder: str, as_json: bool) -> None:
    from duoka.cluster.listing import list_runs

    path = Path(folder)
    rows = [] if folder == "runs" and not path.exists() else list_runs(path)
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows], indent=2, ensure_ascii=False))
        return
    if not rows:
        click.echo(f"no runs in {folder}; start one:   duoka init && duoka train sft.yaml")
        return
    for line in table(rows):
        click.echo(line)


def table(rows: list[RunRow]) -> list[str]:
    from duoka.units import format_seconds
    from duoka.watch.screen import cells as columns
    from duoka.watch.screen import printable

    cells = [("name", "state", "step", "loss", "tokens/s", "ranks", "age", "")]
    for row in rows:
        steps = f"{row.step:,}/{row.total_steps:,}" if row.total_steps else f"{row.step:,}"
        loss = "-" if row.loss is None else f"{row.loss:.4f}"
        speed = "-" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}"
        has_cause = row.state in ("failed", "queued") or row.cause.startswith("job ")
        note = f"pid {row.pid}" if row.is_alive else row.cause.partition("\n")[0] if has_cause else ""
        age = format_seconds(row.age_s)
        cells.append((printable(row.name), row.state, steps, loss, speed, str(row.world_size), age, note))
    widths = [max(columns(line[column]) for line in cells) for column in range(7)]

    def lay_out(line: tuple[str, ...]) -> str:
        # Not by letters: a Chinese one takes two columns.
        texts = [cell + " " * (width - columns(cell)) for cell, width in zip(line[:2], widths[:2], strict=True)]
        texts += [cell.rjust(width) for cell, width in zip(line[2:7], widths[2:], strict=True)]
        return "  ".join([*texts, line[7]]).rstrip()

    return [lay_out(line) for line in cells]


@command.command("show", help="The closing report of the run NAME (a name in runs/, or a folder), at any time.")
@click.argument("name")
@click.option("--folder", default="runs", show_default=True, help="Where runs are looked for by name.")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON: losses, times, bytes per rank.")
def report(name: str, folder: str, as_json: bool) -> None:
    from duoka.runs.find import find_run
    from duoka.watch.report import end_lines, summary_to_json

    run = find_run(name, Path(folder))
    if as_json:
        click.echo(json.dumps(summary_to_json(run), indent=2, ensure_ascii=False))
    else:
        click.echo("\n".join(end_lines(run)))


@command.command(help="Ask the run NAME (a name in runs/, or a folder) to save and leave; end it if it does not.")
@click.argument("name")
@click.option("--folder", default="runs", show_default=True, help="Where runs are looked for by name.")
@click.option("--grace", type=float, help="Seconds that it may take to save; default: as faults.stop_within says.")
@click.option("--now", is_flag=True, help="Do not wait for a save: end it at once.")
def stop(name: str, folder: str, grace: float | None, now: bool) -> None:
    from duoka.cluster.listing import stop_run
    from duoka.cluster.slurm_jobs import find_job, stop_job
    from duoka.runs.find import find_run

    found = (find_job(path) for path in (Path(name), Path(folder) / name))
    if job := next((one for one in found if one is not None), None):
        return stop_job(job, lambda text: click.echo(text, err=True))
    run = find_run(name, Path(folder))
    stop_run(run, grace_s=grace, at_once=now, say=lambda text: click.echo(text, err=True))
    click.echo(f"stopped {run.path}")
