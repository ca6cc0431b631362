"""Where a run stands: two files with one writer each, put together by one function, old runs' single file included."""

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, replace

import psutil
import pytest

from duoka.cli.runs import table
from duoka.cluster.listing import list_runs, stop_run
from duoka.cluster.run_lock import check_nobody_works
from duoka.errors import ConfigError, StorageError
from duoka.runs.folder import RunFolder
from duoka.runs.status import ProgressFile, Status, is_alive, leader_identity, read_status, update_status

NUM_WRITES = 300


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.make()
    return folder


def start(run, **more):
    """A launcher that begins, and rank 0 which has made three steps."""
    update_status(run, state="starting", world_size=2, exit_code=None, cause="", **leader_identity())
    progress = ProgressFile(run)
    progress.update(state="running", step=3, total_steps=9, loss=1.5, tokens_per_s=10.0, **more)
    return progress


def test_a_running_world_shows_the_launchers_process_and_rank_0s_numbers(run):
    start(run)
    seen = read_status(run)
    assert (seen.state, seen.step, seen.total_steps, seen.loss, seen.world_size) == ("running", 3, 9, 1.5, 2)
    assert seen.pid == os.getpid() and seen.host and time.time() - seen.updated < 60


def test_the_launchers_verdict_outlasts_whatever_rank_0_still_writes(run):
    progress = start(run)
    update_status(run, state="stopped", cause="ended by duoka runs stop")
    progress.update(step=4, loss=1.25)  # it was in its last step
    seen = read_status(run)
    assert (seen.state, seen.cause, seen.step, seen.loss) == ("stopped", "ended by duoka runs stop", 4, 1.25)


def test_rank_0_says_which_signal_it_was_when_the_launcher_gives_no_cause(run):
    progress = start(run)
    progress.update(state="stopped", step=5, exit_code=75, cause="stopped by SIGTERM")
    assert read_status(run).cause == "stopped by SIGTERM" and read_status(run).exit_code == 75
    update_status(run, state="stopped", exit_code=75)
    assert read_status(run).cause == "stopped by SIGTERM"
    update_status(run, state="starting", exit_code=None, cause="")
    seen = read_status(run)
    assert (seen.state, seen.cause, seen.exit_code, seen.step) == ("starting", "", None, 5), "a new start"


def test_rank_0_may_name_who_leads_when_the_leader_has_not_written_yet(run):
    update_status(run, state="failed", exit_code=5, cause="of last week")
    progress = ProgressFile(run)
    progress.update(state="running", step=0, world_size=3, exit_code=None, cause="", **leader_identity())
    seen = read_status(run)
    assert (seen.state, seen.world_size, seen.pid, seen.cause) == ("running", 3, os.getpid(), "")


def test_a_run_of_an_older_duoka_is_read_and_gone_on_with(run):
    old = Status("stopped", 7, 9, loss=2.0, world_size=4, pid=1, host="there", exit_code=75, cause="SIGTERM")
    run.status.write_text(json.dumps(asdict(old)))
    seen = read_status(run)
    assert (seen.state, seen.step, seen.loss, seen.cause, seen.world_size) == ("stopped", 7, 2.0, "SIGTERM", 4)
    update_status(run, state="starting", exit_code=None, cause="", **leader_identity())
    seen = read_status(run)
    assert (seen.state, seen.step, seen.cause, seen.host) == ("starting", 7, "", leader_identity()["host"])


def test_no_file_no_status_and_a_damaged_one_does_not_matter(run):
    assert read_status(run) is None
    start(run)
    run.status.write_text('{"state": "runn')
    assert read_status(run).step == 3
    run.progress.write_text("[]")
    assert read_status(run) is None
    run.status.write_text(json.dumps({"state": "done", "version": "x", "updated": None, "exit_code": 0}))
    assert read_status(run).state == "done"


def _lead(folder, go):
    go.wait()
    for number in range(NUM_WRITES):
        update_status(RunFolder(folder), state="failed", exit_code=number, cause=f"cause {number}")


def _progress(folder, progress, go):
    go.wait()
    for number in range(NUM_WRITES):
        progress.update(state="running", step=number, loss=float(number))


def test_two_writers_that_race_lose_nothing(run):
    """What read-modify-write of one file did: the number of one writer or the word of the other went back."""
    progress = start(run)
    update_status(run, state="failed", exit_code=-1, cause="cause -1")
    context = multiprocessing.get_context("fork")
    go = context.Event()
    writers = [
        context.Process(target=_lead, args=(run.path, go)),
        context.Process(target=_progress, args=(run.path, progress, go)),
    ]
    for writer in writers:
        writer.start()
    go.set()
    last = (-2, -1)
    while any(writer.is_alive() for writer in writers):
        seen = read_status(run)
        assert seen.state == "failed" and seen.cause == f"cause {seen.exit_code}" and seen.pid == os.getpid()
        now = (seen.exit_code, seen.step if seen.loss != 1.5 else -1)
        assert now[0] >= last[0] and now[1] >= last[1], f"{now} after {last}: something was lost"
        last = now
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    seen = read_status(run)
    assert (seen.exit_code, seen.step, seen.total_steps) == (NUM_WRITES - 1, NUM_WRITES - 1, 9)


def test_a_process_is_the_same_one_when_the_systems_clock_was_set(run, monkeypatch):
    """A run whose machine found the time after it had begun was told to be dead, and its alerts ended with that."""
    ours = Status(state="running", **leader_identity())
    of_old = replace(ours, pid_started=psutil.Process().create_time())
    assert is_alive(ours) and is_alive(of_old)
    if sys.platform == "linux":
        later = psutil.boot_time() + 3600.0
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda: later)
        assert is_alive(ours)
    assert not is_alive(replace(ours, pid_started=ours.pid_started + 1))


@pytest.mark.skipif(sys.platform != "linux", reason="by the kernel's name of a boot")
def test_a_running_run_is_found_when_its_machine_got_another_name(run, monkeypatch):
    """`duoka runs stop` found no process on this machine, and a second start none that works in the folder."""
    start(run)
    monkeypatch.setattr("socket.gethostname", lambda: "another-name")
    assert is_alive(read_status(run)) and list_runs(run.path)[0].is_alive
    assert not is_alive(replace(read_status(run), boot="of another machine"))


def test_a_copy_of_a_running_runs_folder_is_not_led_by_that_process(run, tmp_path):
    """A start there was refused, and `duoka runs stop COPY` would have stopped the run that it is a copy of."""
    start(run)
    with subprocess.Popen(["sleep", "600"]) as leader:
        update_status(run, state="running", **leader_identity(leader.pid))
        copied = RunFolder(tmp_path / "copy")
        shutil.copytree(run.path, copied.path)
        seen = read_status(copied)
        assert (seen.state, seen.step) == ("running", 3) and not is_alive(seen) and is_alive(read_status(run))
        check_nobody_works(copied)
        with pytest.raises(ConfigError, match="no process of"):
            stop_run(copied, grace_s=0, at_once=False, say=print)
        assert leader.poll() is None
        run.path.rename(tmp_path / "moved")
        assert is_alive(read_status(RunFolder(tmp_path / "moved"))), "the same folder under another name"
        update_status(copied, state="running", **leader_identity(leader.pid))
        assert is_alive(read_status(copied)), "who goes on in the copy leads there"
        leader.kill()


@pytest.mark.parametrize("told", [{"state": 5, "step": "x", "cause": None}, {"state": "running", "step": None}])
def test_a_damaged_status_ends_no_list_of_runs(run, told):
    """A value of another kind ended `duoka runs` for all runs, with a traceback."""
    run.status.write_text(json.dumps({"total_steps": 9, "loss": "a", "updated": "z", "pid": None} | told))
    good = RunFolder(run.path.with_name("a\nb"))
    good.make()
    start(good)
    lines = table(list_runs(run.path.parent))
    assert len(lines) == 3 and lines[1].startswith("a b ") and "3/9" in lines[1] and "0/9" in lines[2], lines


def test_an_output_behind_a_link_to_a_disk_that_is_not_mounted_is_named(tmp_path):
    """It was said that the folder exists."""
    (tmp_path / "runs").symlink_to("/mnt/not-there")
    with pytest.raises(StorageError, match="runs is a link to /mnt/not-there, which is not there"):
        RunFolder(tmp_path / "runs" / "a").make()


@pytest.mark.parametrize("at_once", [False, True])
def test_another_users_run_is_not_stopped_and_that_is_said(run, monkeypatch, at_once):
    """`duoka runs stop` of a colleague's run was a bug in duoka, and with --now it tried for 10 seconds."""
    start(run)

    def refuse(pid, number):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "kill", refuse)
    with pytest.raises(ConfigError, match=r"is a run of .*: this user may not stop it"):
        stop_run(run, grace_s=1.0, at_once=at_once, say=print)


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o002, 0o664)])
def test_files_of_a_run_have_the_mode_that_the_umask_asks_for(run, umask, mode):
    """config.yaml may hold a webhook's address, and everybody could read it."""
    before = os.umask(umask)
    try:
        start(run)
    finally:
        os.umask(before)
    assert run.status.stat().st_mode & 0o777 == run.progress.stat().st_mode & 0o777 == mode
    assert not [path.name for path in run.path.iterdir() if path.name.startswith(".status")]
