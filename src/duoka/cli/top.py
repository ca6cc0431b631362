"""`duoka top [RUN]`: a run while it trains, in the terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click


@click.command("top")
@click.argument("run", required=False)
@click.option("--folder", default="runs", show_default=True, help="Where runs are looked for by name.")
@click.option("--once", is_flag=True, help="Print it once, as plain text.")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers once, as JSON.")
@click.option("--every", type=click.FloatRange(0.1), metavar="SECONDS", help="How often to look; default: as it moves.")
@click.option("--price", type=click.FloatRange(0), help="Price of one device per hour, to show what the run has cost.")
def command(
    run: str | None, folder: str, once: bool, as_json: bool, every: float | None, price: float | None
) -> int | None:
    """Watch RUN (a name in runs/, or a folder; default: the newest) while it trains.

    Alive or not, loss, speed, time left, where the time goes, memory beside the plan, which rank is slow, what to do.
    Keys: o overview, r ranks, n nodes, l logs, q quit. Without a terminal: a line at each change, until the run ends.
    """
    from duoka.runs.find import find_run, newest_run
    from duoka.watch.follow import FollowedRun
    from duoka.watch.screen import overview
    from duoka.watch.standing import read_standing
    from duoka.watch.terminal import as_text, can_redraw, frame_of, watch_in_lines, watch_in_place

    followed = FollowedRun(find_run(run, Path(folder)) if run else newest_run(Path(folder)))
    if once or as_json:
        followed.catch_up()
        now = read_standing(followed, price_per_hour=price)
        if as_json:
            click.echo(json.dumps(now.to_json(), indent=2, ensure_ascii=False, allow_nan=False))
        else:
            frame = frame_of(sys.stdout)
            click.echo("\n".join(as_text(overview(now, followed.history.steps, frame), frame)))
    elif can_redraw(sys.stdin, sys.stdout):
        watch_in_place(followed, price_per_hour=price, every_s=every)
    else:
        watch_in_lines(followed, sys.stdout, every_s=every or 10.0)
    return None
