"""`duoka top`: what it says of a run, in the terminal, in lines and as JSON, from logs written by a script."""

import io
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from written_runs import GIB, T0, event_line, nonfinite_line, rank_line, step_line, write_run

from duoka.cli import cli
from duoka.cli.asked_to_leave import AskedToLeave, leave_when_asked
from duoka.runs.folder import write_json_atomic
from duoka.runs.heart import Heart, beat_path
from duoka.runs.status import leader_identity
from duoka.watch.follow import FollowedRun
from duoka.watch.report import end_lines
from duoka.watch.screen import Frame, cells, clip, nodes_view, overview, ranks_view
from duoka.watch.standing import read_standing
from duoka.watch.terminal import as_text, can_redraw, watch_in_place


def standing_of(run, **how):
    followed = FollowedRun(run)
    followed.catch_up()
    return followed, read_standing(followed, **how)


def text_of(run, width=80, **how):
    followed, now = standing_of(run, **how)
    frame = Frame(width, 40)
    return "\n".join(as_text(overview(now, followed.history.steps, frame), frame))


def test_everything_people_look_for_is_there_in_80_columns(tmp_path):
    text = text_of(write_run(tmp_path / "a", 40, ranks=8, slow_rank=5, total_steps=80, state="running"), 80)
    for wanted in (
        "running", "step 40 of 80 (50%)", "20 s left", "loss", "▁", "gradient  1.025", "2,000 tokens/s",
        "cost 0.02", "wait 12%", "at most (rank 7)", "plan 1 GiB (512 MiB to 2 GiB)",
        "rank 5 is the slowest: it waits 0.01 s a step", "run `duoka doctor` on its machine", "eval       loss 3.3",
    ):  # fmt: skip
        assert wanted in text, f"{wanted!r} is not in\n{text}"
    assert max(map(cells, text.splitlines())) <= 80


def test_a_cpu_that_ranks_share_costs_once_and_each_card_for_itself(tmp_path):
    """As the plan counts: 20 s at 3 an hour."""
    run = write_run(tmp_path / "a", 40, ranks=8)
    assert standing_of(run)[1].cost == pytest.approx(3 * 20 / 3600)
    plan = json.loads(run.plan.read_text())
    write_json_atomic(run.plan, plan | {"machine": {"device": "cuda", "gpus": [{}] * 8}})
    assert standing_of(run)[1].cost == pytest.approx(8 * 3 * 20 / 3600)


def test_the_slow_rank_is_the_one_that_waits_least_and_only_where_others_wait_for_it(tmp_path):
    assert standing_of(write_run(tmp_path / "a", 20, ranks=8, slow_rank=3))[1].slowest.rank == 3
    assert standing_of(write_run(tmp_path / "b", 20, ranks=8))[1].slowest is None
    assert standing_of(write_run(tmp_path / "c", 20, ranks=1, slow_rank=0))[1].slowest is None
    _, now = standing_of(write_run(tmp_path / "d", 20, ranks=8, slow_rank=3))
    first = as_text(ranks_view(now, Frame(80, 30)), Frame(80, 30))[3]
    assert "     3" in first, "the slow one comes first"
    assert first.split()[6] == "80%", "0.4 of 0.5 s on a core"
    assert as_text(nodes_view(now, Frame(80, 30)), Frame(80, 30))[3].split()[1] == "0-7"


def test_states_are_told_apart(tmp_path, monkeypatch):
    alive = leader_identity()
    gone = {**alive, "pid_started": 1.0}
    cases = {
        "running": ("running", alive), "dead": ("running", gone), "done": ("done", {}), "failed": ("failed", {}),
        "stopped": ("stopped", {}),
    }  # fmt: skip
    for wanted, (state, more) in cases.items():
        assert standing_of(write_run(tmp_path / wanted, 5, state=state, **more))[1].state == wanted
    old = write_run(tmp_path / "old", 5, state="running", **alive)
    elsewhere = write_run(tmp_path / "else", 5, state="running", **{**alive, "host": "another", "boot": "another"})
    for run in (old, elsewhere):
        for path in (run.events / "run.jsonl", run.status, run.progress):
            os.utime(path, (time.time() - 3600, time.time() - 3600))
    assert standing_of(old)[1].state == "stalled"
    assert standing_of(elsewhere)[1].state == "silent", "of another machine's process nothing is known"
    assert "no sign of life for 1h" in text_of(old)


def test_a_long_evaluation_is_no_standstill(tmp_path):
    """It writes no line of a step and no status; rank 0's heartbeat goes on. Each one was told as a stall."""
    run = write_run(tmp_path / "a", 5, state="running", **leader_identity())
    for path in (run.events / "run.jsonl", run.status, run.progress):
        os.utime(path, (time.time() - 3600, time.time() - 3600))
    heart = Heart(run, 0)
    heart.tell("evaluate")
    assert standing_of(run)[1].state == "running"
    os.utime(beat_path(run, 0), (time.time() - 600, time.time() - 600))
    _, now = standing_of(run)
    assert now.state == "stalled" and 590 < now.age_s < 620
    heart.close()


def test_numbers_that_are_none_restarts_and_cut_lines(tmp_path):
    run = write_run(tmp_path / "a", 30, total_steps=60, state="running", **leader_identity())
    with (run.events / "run.jsonl").open("a") as file:
        file.write(event_line("resume", 20, total_steps=60, world_size=4))
        file.write(step_line(21, loss=None, nonfinite={"loss": "nan"}))
        file.write(step_line(22, t=T0 - 5000))  # a machine whose clock is behind
        file.write('{"v": 1, "type": "step", "st')
    _, now = standing_of(run)
    assert (now.step, now.num_restarts, now.num_lost) == (22, 1, 10)
    assert now.seconds == pytest.approx(11.0) and now.tokens_per_s == pytest.approx(2000)
    text = text_of(run)
    assert "1 restart" in text and "the loss or gradient of 1 step was no number" in text
    with (run.events / "rank00001.jsonl").open("a") as file:
        file.write(rank_line(1, 22, wait_s=0.1)[:50])
    assert standing_of(run)[1].ranks[1].step == 30


def test_a_rollback_is_no_restart(tmp_path):
    run = write_run(tmp_path / "a", 30, total_steps=60, state="running", **leader_identity())
    with (run.events / "run.jsonl").open("a") as file:
        why = "step 31: the loss is not finite; back to step-00000020, the batch is tried once more"
        file.write(event_line("resume", 20, reason=why))
        file.write(step_line(21))
    _, now = standing_of(run)
    assert (now.num_restarts, now.num_rollbacks, now.num_lost) == (0, 1, 10)
    assert ", 1 rollback" in text_of(run) and "restart" not in text_of(run)


def test_a_clock_that_is_ahead_is_said_and_does_not_make_ages(tmp_path):
    run = write_run(tmp_path / "a", 5, total_steps=9, state="running", **leader_identity())
    with (run.events / "run.jsonl").open("a") as file:
        file.write(step_line(6, t=time.time() + 7200))
    _, now = standing_of(run)
    assert 0 <= now.age_s < 60 and any("clock is 2h 00min ahead" in hint.seen for hint in now.hints)


def test_files_of_the_future_do_not_keep_a_silent_run_young(tmp_path, monkeypatch):
    """A clock that was set back: until it has caught up, each look called the run new."""
    run = write_run(tmp_path / "a", 5, total_steps=9, state="running", **leader_identity())
    for path in (run.events / "run.jsonl", run.progress, run.status):
        if path.is_file():
            os.utime(path, (time.time() + 7200,) * 2)
    clock = [1000.0]
    monkeypatch.setattr("duoka.watch.follow.time", SimpleNamespace(
        time=time.time, monotonic=lambda: clock[0], thread_time=time.thread_time, perf_counter=time.perf_counter
    ))  # fmt: skip
    followed = FollowedRun(run)
    followed.catch_up()
    assert followed.age_s() == 0
    clock[0] += 900
    followed.catch_up()
    assert followed.age_s() == 900


def test_a_log_that_is_replaced_or_moved_away_begins_anew(tmp_path):
    run = write_run(tmp_path / "a", 30)
    followed = FollowedRun(run)
    followed.catch_up()
    version = followed.version
    followed.catch_up()
    assert followed.version == version, "nothing came"
    other = write_run(tmp_path / "b", 7)
    (other.events / "run.jsonl").replace(run.events / "run.jsonl")
    followed.catch_up()
    assert followed.version > version and read_standing(followed).step == 7
    run.path.rename(tmp_path / "moved")
    followed.catch_up()
    assert read_standing(followed).step == 7


def test_a_long_log_is_read_in_pieces_and_says_how_far(tmp_path):
    run = write_run(tmp_path / "a", 8000, ranks=1, rank_steps=10)
    followed = FollowedRun(run)
    followed.catch_up(0.0)
    assert followed.is_behind and 0 < followed.share_read < 1
    while followed.is_behind:
        followed.catch_up(0.0)
    assert len(followed.history.steps) == 8000 and followed.share_read == 1.0


def test_any_run_can_be_drawn_at_any_size_and_without_unicode(tmp_path):
    runs = [write_run(tmp_path / "a", 3, ranks=300, slow_rank=7), write_run(tmp_path / "多卡的运行", 0, ranks=0)]
    for run in runs:
        for width in (20, 79, 200):
            followed, now = standing_of(run)
            frame = Frame(width, 24, plain=True)
            lines = as_text(overview(now, followed.history.steps, frame), frame)
            assert max(map(cells, lines)) <= width and (now.name in lines[0] or width == 20)
            assert "\n".join(lines).replace("多卡的运行", "").isascii()
    assert as_text([[("多卡多卡", "")], [("a\x1b[2Jb\t", "red")]], Frame(5)) == ["多卡", "a [2J"]
    assert cells("".join(text for text, _ in clip([("多", ""), ("卡x", "")], 3))) <= 3


def test_once_and_json_and_lines_without_a_terminal(tmp_path):
    run = write_run(tmp_path / "runs" / "a", 40, slow_rank=2)
    older = write_run(tmp_path / "runs" / "b", 10)
    for path in (older.events / "run.jsonl", older.status, older.progress):
        os.utime(path, (1, 1))
    folder = ["--folder", str(tmp_path / "runs")]
    once = CliRunner().invoke(cli, ["top", "--once", *folder])
    assert once.exit_code == 0 and once.output.startswith("a  done"), once.output
    found = json.loads(CliRunner().invoke(cli, ["top", "b", "--json", *folder]).output)
    assert (found["step"], found["name"], found["memory"]["max"]) == (10, "b", GIB + 3 * 2**20)
    assert found["slowest"] is None and len(found["ranks"]) == 4
    lines = CliRunner().invoke(cli, ["top", str(run.path)])
    assert lines.exit_code == 0 and "a: done  step 40/40  loss 3." in lines.output and "slowest rank 2" in lines.output


def test_in_a_terminal_it_redraws_in_place_and_answers_keys(tmp_path):
    """A real pseudo-terminal of 80 x 24."""
    run = write_run(tmp_path / "a", 40, ranks=4, slow_rank=2, total_steps=90, state="running", **leader_identity())
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    import fcntl

    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    env = {**os.environ, "LANG": "C.UTF-8", "PYTHONIOENCODING": "utf-8"}
    env.pop("COLUMNS", None), env.pop("LINES", None)
    command = [sys.executable, "-m", "duoka", "top", str(run.path)]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    try:
        assert "step 40 of 90" in read_until(ours, "quit")
        with (run.events / "run.jsonl").open("a") as file:
            file.write(step_line(41))
        # Each wait is for words of the new view alone: what the old one still had to say may come first.
        read_until(ours, "step 41 of 90")
        os.write(ours, b"r")
        read_until(ours, "wait s")
        os.write(ours, b"l")
        read_until(ours, "训练")
        os.write(ours, b"q")
        end = read_until(ours, "\x1b[?1049l")
        assert "\x1b[?25h" in end and process.wait(20) == 0
        assert termios.tcgetattr(theirs) == before, "the terminal is as it was"
    finally:
        process.kill()
        process.wait()
        os.close(ours), os.close(theirs)


def test_a_terminal_that_is_closed_ends_what_is_shown_on_it(tmp_path, monkeypatch):
    """SIGHUP comes with it. It was lost where the screen was to be given back: exit code 6, and advice about disks."""

    def close():
        os.kill(os.getpid(), signal.SIGHUP)  # first: a terminal that is gone ends what would listen
        os.close(ours)

    followed = FollowedRun(write_run(tmp_path / "a", 4, total_steps=90, state="running", **leader_identity()))
    ours, theirs = pty.openpty()
    with open(theirs, "r+b", buffering=0) as raw, pytest.raises(AskedToLeave):
        monkeypatch.setattr(sys, "stdin", raw)
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, write_through=True))
        with leave_when_asked():
            threading.Timer(0.3, close).start()
            watch_in_place(followed, price_per_hour=None, every_s=60)


def test_a_dumb_terminal_gets_lines(tmp_path):
    """A shell inside an editor showed the codes that move a cursor."""
    ours, theirs = pty.openpty()
    with open(theirs, "r+b", buffering=0) as raw:
        assert can_redraw(raw, raw, {"TERM": "xterm"}) and not can_redraw(raw, raw, {"TERM": "dumb"})
    os.close(ours)


def read_until(handle, wanted, limit_s=60):
    seen, deadline = b"", time.monotonic() + limit_s
    while wanted not in seen.decode("utf-8", "replace"):
        assert time.monotonic() < deadline, f"{wanted!r} never came:\n{seen.decode('utf-8', 'replace')}"
        if select.select([handle], [], [], 1.0)[0]:
            seen += os.read(handle, 65536)
    return seen.decode("utf-8", "replace")


def test_a_status_without_a_log_is_a_run_too(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    write_json_atomic(folder / "status.json", {"state": "starting", **leader_identity()})
    done = CliRunner().invoke(cli, ["top", str(folder), "--once"])
    assert done.exit_code == 0 and "starting" in done.output


def test_steps_whose_batch_was_left_out_are_counted(tmp_path):
    """They have no line of their own (faults.nonfinite: skip, rollback), so that none was ever counted."""
    run = write_run(tmp_path / "a", 3)
    log = run.events / "run.jsonl"
    with log.open("a") as file:
        file.writelines([nonfinite_line(4), step_line(5), nonfinite_line(6), nonfinite_line(6)])
        file.write(event_line("warning", 6, text="a disk is slow"))
    assert "loss or gradient of 2 steps not finite, first at step 4" in "\n".join(end_lines(run))
    assert "the loss or gradient of 2 steps was no number" in [hint.seen for hint in standing_of(run)[1].hints]
    with log.open("a") as file:
        file.write(event_line("resume", 5))
    assert "of 1 step not finite, first at step 4" in "\n".join(end_lines(run)), "step 6 is done again"
