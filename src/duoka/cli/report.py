"""`duoka report RUN`: one run on one page, in one file."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("report")
@click.argument("run")
@click.option("--folder", default="runs", show_default=True, help="Where runs are looked for by name.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where to; default: report.html in the run.")
def command(run: str, folder: str, output: Path | None) -> None:
    """Write the page of RUN (a name in runs/, or a folder): curves, times, memory, config. It fetches nothing."""
    from duoka.runs.find import find_run
    from duoka.runs.folder import write_asked
    from duoka.watch.history import read_history
    from duoka.watch.report import report_page, write_report

    found = find_run(run, Path(folder))
    if output is None:
        click.echo(write_report(found))
        return
    write_asked(output, report_page(read_history(found)))
    click.echo(output)
