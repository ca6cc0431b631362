"""How far away the next look of a board or a terminal is."""

from __future__ import annotations

from pathlib import Path

import pytest
from written_runs import write_run

from duoka.watch.board import Asked, Board
from duoka.watch.follow import FollowedRun


@pytest.fixture
def costly(monkeypatch: pytest.MonkeyPatch):
    """Costs of the looks to come, in seconds of the processor."""
    costs, clock, read = [], [0.0], FollowedRun.catch_up

    def catch_up(self: FollowedRun, budget_s: float = float("inf")) -> None:
        read(self, budget_s)
        clock[0] += costs.pop(0)

    monkeypatch.setattr("time.thread_time", lambda: clock[0])
    monkeypatch.setattr(FollowedRun, "catch_up", catch_up)
    return costs


def test_a_look_that_costs_much_once_does_not_put_the_next_off(tmp_path: Path, costly: list[float]) -> None:
    """A garbage collection of 0.2 s within one look kept a page still for half a minute."""
    write_run(tmp_path / "a", 10)
    board = Board(tmp_path)
    costly += [0.3, 0.0, 0.2, 0.0, 0.1, 0.2]
    looks = [board.look(Asked(runs=("a",), focus="a"))["next_s"] for _ in range(6)]
    assert looks == [2.0, 2.0, 2.0, 2.0, 2.0, 15.0]


def test_what_read_a_long_log_says_nothing_of_looks_to_come(
    tmp_path: Path, costly: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duoka.watch.board.READ_S", 0.0)
    write_run(tmp_path / "a", 8000)
    board = Board(tmp_path)
    costly += [0.25] * 100
    looks = [board.look(Asked(runs=("a",), focus="a")) for _ in range(8)]
    last = next(number for number, look in enumerate(looks) if not look["is_behind"])
    assert last > 0 and [look["next_s"] for look in looks[: last + 2]] == [0.0] * last + [2.0, 37.5]
