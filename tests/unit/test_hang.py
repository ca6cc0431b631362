"""When a world counts as hanging: nobody moves for longer than this phase allows; never because one part is slow."""

import math
import os
import sys

from duoka.cluster import hang
from duoka.cluster.hang import HangWatch, find_last
from duoka.cluster.launch import WorldSpec
from duoka.cluster.supervise import Request, listen_to_signals, run_once
from duoka.runs import heart
from duoka.runs.heart import Beat, Heart, clear_beats, read_beats


def wait(watch, clock, seconds, every_s=5.0):
    """Looks every few seconds for so long; the first hang that is found."""
    end = clock[0] + seconds
    while clock[0] < end:
        clock[0] += every_s
        found = watch.look()
        if found:
            return found
    return None


def warm(run, rank, clock, slowest_s=0.0):
    one = Heart(run, rank)
    one.warm_up()
    one.tell("forward", 12)
    one.beat.slowest_s = slowest_s
    one.tell("backward")
    return one


def test_the_rank_that_the_others_wait_for_is_named(run, clock):
    hearts = [warm(run, rank, clock) for rank in range(3)]
    for rank in (0, 2):
        hearts[rank].begin_exchange("all_reduce of gradients, bucket 0")
    watch = HangWatch(run, None)
    found = wait(watch, clock, 1000)
    assert 1300 < clock[0] < 1330, "auto is five minutes"
    assert found.rank == 1 and found.step == 12
    assert found.lines[0].startswith("the run hangs after step 12: rank 1 of 3 has not moved for 5min")
    assert "rank 1 (pid" in found.lines[1] and "in backward after step 12" in found.lines[1]
    assert sum("last collective: all_reduce of gradients, bucket 0" in line for line in found.lines) == 2


def test_who_asks_the_launcher_for_stacks_gets_them_and_ends_no_run(run, capfd):
    """docs/faults.md: kill -USR1 PID. Of the launcher's PID it killed launcher and ranks, with nothing saved."""
    script = "import os, signal, time; os.kill(os.getppid(), signal.SIGUSR1); time.sleep(0.5)"
    request = Request()
    with listen_to_signals(request):
        verdict = run_once(WorldSpec((sys.executable, "-c", script), 1, run), request)
    assert verdict.exit_code == 0 and "stacks of 0 of 0 ranks" in capfd.readouterr().err


def test_one_rank_that_moves_is_enough(run, clock):
    _, busy = warm(run, 0, clock), warm(run, 1, clock)
    watch = HangWatch(run, 20.0)
    for _ in range(100):
        busy.tell("evaluate")
        assert wait(watch, clock, 15) is None
    assert wait(watch, clock, 30) is not None


def test_loading_the_first_step_and_saving_have_half_an_hour(run, clock):
    one = Heart(run, 0)
    watch = HangWatch(run, 20.0)
    assert wait(watch, clock, 1700) is None, "loading"
    one.tell("forward")
    assert wait(watch, clock, 1700) is None, "the first step"
    one.warm_up()
    one.tell("save")
    assert wait(watch, clock, 1700) is None, "saving"
    one.tell("step", 1)
    assert wait(watch, clock, 40) is not None


def test_auto_is_ten_times_the_slowest_part_of_a_slow_machine(run, clock):
    warm(run, 0, clock, slowest_s=100.0)
    watch = HangWatch(run, None)
    assert wait(watch, clock, 990) is None
    assert wait(watch, clock, 30) is not None


def test_never_is_never_and_our_own_absence_is_nobodys_hang(run, clock):
    warm(run, 0, clock)
    assert wait(HangWatch(run, math.inf), clock, 10000) is None
    watch = HangWatch(run, 20.0)
    assert wait(watch, clock, 15) is None
    clock[0] += 5000  # this process was stopped, or the machine slept
    assert watch.look() is None and wait(watch, clock, 15) is None
    assert wait(watch, clock, 15) is not None


def test_a_stopped_rank_is_named_before_the_others_patience_ends(run, clock, monkeypatch):
    for rank in range(2):
        warm(run, rank, clock)
    monkeypatch.setattr(hang, "is_stopped", lambda pid: True)
    watch = HangWatch(run, None)
    found = wait(watch, clock, 200)
    assert 1060 < clock[0] < 1080 and "stopped (SIGSTOP" in found.lines[0]


def test_who_is_last_is_blamed_and_who_waits_is_not():
    ahead, inside = Beat(rank=0, step=5, num_collectives=9), Beat(rank=1, step=5, num_collectives=8, is_inside=True)
    assert find_last({0: ahead, 1: inside}) == [1]
    outside = Beat(rank=2, step=5, num_collectives=8)
    assert find_last({0: ahead, 1: inside, 2: outside}) == [2]
    assert find_last({0: ahead, 3: Beat(rank=3, step=4, num_collectives=99)}) == [3]


def test_a_beat_is_read_as_written_and_old_ones_go(run):
    one = Heart(run, 3)
    one.tell("forward", 7)
    with one.exchange("barrier"):
        assert read_beats(run)[3].is_inside
    found = read_beats(run)[3]
    assert (found.step, found.phase, found.collective, found.is_inside) == (7, "forward", "barrier", False)
    assert found.pid == os.getpid() and found.is_slow
    one.close()
    clear_beats(run)
    assert not read_beats(run) and not list(run.logs.iterdir())


def test_a_rank_without_a_supervisor_watches_itself(run, monkeypatch):
    monkeypatch.setattr(heart, "LOOK_EVERY_S", 0.02)
    one = Heart(run, 0)
    one.warm_up()
    one.tell("backward", 4)
    said = []
    thread = heart.watch_itself(one, run, 0.1, said.append)
    thread.join(10)
    assert len(said) == 1 and "in backward after step 4" in said[0]
    assert "test_hang.py" in heart.stacks_path(run, 0).read_text()


def test_a_rank_that_left_with_exit_code_0_is_named_when_the_others_wait_for_it(run, clock):
    hearts = [warm(run, rank, clock) for rank in range(3)]
    hearts[0].tell("step", 12)
    watch = HangWatch(run, None)
    for _ in range(100):
        clock[0] += 5.0
        if found := watch.look(left=[2]):
            break
    assert found.rank == 2 and "rank 2 of 3 left early, with exit code 0, and no other rank has moved" in found.lines[0]


def test_a_rank_that_hangs_before_its_first_heartbeat_is_named(run, clock):
    waiting = Heart(run, 0)
    waiting.beat.is_inside = True
    waiting.begin_exchange("meeting of all processes")
    watch, found = HangWatch(run, 20.0), None
    while found is None and clock[0] < 5000:
        clock[0] += 5.0
        found = watch.look(running={0: os.getpid(), 1: os.getppid()})
    assert 2800 < clock[0] < 2830, "it is given the half hour of loading"
    assert found.rank == 1 and "rank 1 of 2 has not moved" in found.lines[0]
    assert f"rank 1 (pid {os.getppid()}), silent for" in found.lines[1] and "has begun nothing yet" in found.lines[1]
    assert "meeting of all processes, in which it waits" in found.lines[2]


def test_a_world_without_any_heartbeat_hangs_too_and_one_of_scripts_does_not(run, clock):
    watch, scripts = HangWatch(run, None), HangWatch(run, None)
    found = None
    for _ in range(1000):
        clock[0] += 5.0
        found = found or watch.look(running={0: os.getpid(), 1: os.getppid()})
        assert scripts.look() is None
    assert found is not None and "every rank has not moved" in found.lines[0]


def test_a_rank_that_left_before_its_first_heartbeat_is_named(run, clock):
    waiting = Heart(run, 0)
    waiting.begin_exchange("meeting of all processes")
    watch, found = HangWatch(run, 20.0), None
    while found is None and clock[0] < 5000:
        clock[0] += 5.0
        found = watch.look(left=[1], running={0: os.getpid()})
    assert found.rank == 1 and "rank 1 of 2 left early, with exit code 0" in found.lines[0]
