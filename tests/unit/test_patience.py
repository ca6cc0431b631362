"""How long ranks that were asked to stop are waited for: as long as they work, by what was measured, or as written."""

import math

from duoka.cluster.patience import StopPatience
from duoka.config.schema import FaultsConfig
from duoka.runs import heart
from duoka.runs.heart import Heart, read_beats


def is_over_after(waiting, clock, seconds, asked_at):
    end = clock[0] + seconds
    while clock[0] < end:
        clock[0] += 1.0
        if waiting.is_over(asked_at):
            return True
    return False


def warm(run, **measured):
    one = Heart(run, 0)
    one.warm_up()
    one.tell("forward", 5)
    for name, value in measured.items():
        setattr(one.beat, name, value)
    one.tell("backward")
    return one


def test_scripts_without_heartbeats_have_a_minute_and_a_written_time_is_kept_to(run, clock):
    asked_at = clock[0]
    assert not is_over_after(StopPatience(run, None), clock, 59, asked_at)
    assert is_over_after(StopPatience(run, None), clock, 3, asked_at)
    asked_at = clock[0]
    assert not is_over_after(StopPatience(run, 5.0), clock, 5, asked_at)
    assert is_over_after(StopPatience(run, 5.0), clock, 1, asked_at)
    assert not is_over_after(StopPatience(run, math.inf), clock, 9999, asked_at)


def test_ranks_that_move_are_waited_for_and_those_that_train_on_are_not(run, clock):
    one, waiting, asked_at = warm(run), StopPatience(run, None), clock[0]
    for _ in range(10):  # ten minutes of a step of many micro-batches
        one.tell("backward")
        assert not is_over_after(waiting, clock, 50, asked_at)
    assert not is_over_after(waiting, clock, 100, asked_at)
    assert is_over_after(waiting, clock, 55, asked_at), "three times the 50 s that its slowest part took"
    one, waiting, asked_at = warm(run), StopPatience(run, None), clock[0]
    for step in range(6, 20):
        one.tell("step", step)
        if is_over_after(waiting, clock, 30, asked_at):
            break
    assert step >= 8, "it has finished two more steps since it was asked, and goes on"
    assert step < 13, "though it moves"


def test_a_slow_step_and_a_slow_save_have_three_times_what_was_measured(run, clock):
    warm(run, slowest_s=100.0)
    waiting, asked_at = StopPatience(run, None), clock[0]
    assert not is_over_after(waiting, clock, 300, asked_at) and is_over_after(waiting, clock, 5, asked_at)
    one = warm(run)
    one.tell("save")
    waiting, asked_at = StopPatience(run, None), clock[0]
    assert not is_over_after(waiting, clock, 1700, asked_at), "no save was ever measured: nobody knows what it takes"
    one = warm(run)
    one.note_save(200.0)
    one.tell("save")
    waiting, asked_at = StopPatience(run, None), clock[0]
    assert not is_over_after(waiting, clock, 600, asked_at) and is_over_after(waiting, clock, 5, asked_at)


def test_a_save_is_measured(run, monkeypatch):
    now = [50.0]
    monkeypatch.setattr(heart.time, "monotonic", lambda: now[0])
    one = warm(run)
    one.tell("save")
    now[0] += 70.0
    one.tell("forward")
    (beat,) = read_beats(run).values()
    assert beat.slowest_save_s == 70.0 and beat.slowest_s == 0.0


def test_the_key_says_how_long():
    for written, seconds in (("auto", None), ("never", math.inf), ("10min", 600.0), (90, 90.0)):
        assert FaultsConfig(stop_within=written).stop_within_s == seconds
