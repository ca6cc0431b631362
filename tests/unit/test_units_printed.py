"""Times as they are printed, at the borders between units; and the table of runs, whose names may be Chinese."""

import pytest

from duoka.cli.runs import table
from duoka.cluster.listing import RunRow
from duoka.units import format_seconds
from duoka.watch.screen import cells


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.034, "34 ms"), (0.0994, "99 ms"), (0.0996, "0.1 s"), (0.1, "0.1 s"), (9.94, "9.9 s"), (9.96, "10 s"),
     (59.4, "59 s"), (59.7, "1min 00s"), (60, "1min 00s"), (5025, "1h 23min")],
)  # fmt: skip
def test_a_time_is_never_written_with_an_exponent_or_as_sixty_seconds(seconds, shown):
    assert format_seconds(seconds) == shown


def row(name):
    return RunRow(name=name, path=name, state="done", step=1, total_steps=2, loss=None, tokens_per_s=None, age_s=1.0,
                  world_size=1, pid=1, host="h", exit_code=0, is_alive=False, cause="")  # fmt: skip


def test_the_columns_of_runs_stand_below_each_other():
    lines = table([row("运行 一"), row("abc")])
    places = {cells(line[: line.index(word)]) for line, word in zip(lines, ("state", "done", "done"), strict=True)}
    assert len(places) == 1, lines
