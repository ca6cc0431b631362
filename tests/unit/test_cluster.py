"""Who is to blame, what a world is started with, and what of a terminal's bytes stays in a log."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from duoka.cluster.blame import judge_world, last_step, read_last_traceback
from duoka.cluster.elastic import open_listeners
from duoka.cluster.launch import (
    WorldSpec,
    build_environment,
    check_port,
    count_processes,
    hold_free_port,
    threads_per_process,
)
from duoka.cluster.meeting import Rules
from duoka.cluster.nodes import judge_node
from duoka.cluster.passthrough import PlainCopy
from duoka.cluster.ranks import RankPlace, Ranks, node_environment
from duoka.cluster.verdict import Kind, Verdict, failed
from duoka.errors import ConfigError, DataError, DoesNotFit, StorageError
from duoka.process.environ import RankEnvironment
from duoka.process.exits import RankExit
from duoka.process.interface import choose_interface, interface_towards
from duoka.process.rank import start_mark
from duoka.runs.events import EventWriter, global_log, log_size
from duoka.runs.failure import clear_failures, read_failures, write_failure
from duoka.runs.folder import RunFolder


@pytest.fixture
def spec(tmp_path: Path) -> WorldSpec:
    run = RunFolder(tmp_path / "run")
    run.make()
    return WorldSpec(("python", "x.py"), 4, run)


def judge(spec: WorldSpec, *exits: RankExit, stopped_by: str = "", late_s: float = 0.0):
    return judge_world(spec, exits, stopped_by=stopped_by, left_at_once=False, killed_late_s=late_s)


def fail(spec: WorldSpec, rank: int, error: BaseException, step: int = 0) -> None:
    try:
        raise error
    except type(error) as raised:
        write_failure(spec.run, rank, raised, step)


def test_all_ranks_done_is_success(spec: WorldSpec) -> None:
    assert judge(spec, *(RankExit(rank, 1, 0, 1.0) for rank in range(4))).exit_code == 0


def test_the_first_failure_in_time_is_the_cause(spec: WorldSpec) -> None:
    fail(spec, 2, RuntimeError("first"), step=41)
    fail(spec, 0, RuntimeError("second"))
    verdict = judge(spec, RankExit(0, 1, 1, 5.0), RankExit(2, 2, 1, 5.0), RankExit(1, 3, -15, 6.0, by_us=True))
    assert verdict.exit_code == 5
    assert verdict.lines[0] == "worker failed: rank 2 of 4 raised RuntimeError: first after step 41"
    assert "2 other ranks were stopped because of it" in verdict.lines[1]
    assert sum("Traceback" in line for line in verdict.details) == 1


def test_a_lost_connection_is_not_the_cause_while_another_rank_has_a_reason(spec: WorldSpec) -> None:
    fail(spec, 0, RuntimeError("[gloo] Connection reset by peer"))
    fail(spec, 3, ValueError("loss is NaN"))
    verdict = judge(spec, RankExit(0, 1, 1, 1.0), RankExit(3, 2, 1, 9.0))
    assert "rank 3 of 4 raised ValueError: loss is NaN" in verdict.lines[0]


def test_a_rank_that_the_watchdog_of_nccl_ended_is_not_the_cause(spec: WorldSpec) -> None:
    """It waited for another one: it has no traceback, and ended first."""
    words = "[rank1]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE)"
    (spec.run.logs / "rank00001.log").write_text(f"--- duoka: rank 1, pid 7, now ---\n{words}\n")
    exits = RankExit(1, 1, -6, 1.0), RankExit(3, 2, -9, 9.0)
    assert "rank 3 of 4 was killed by SIGKILL" in judge(spec, *exits).lines[0]


def test_a_lost_connection_alone_is_told(spec: WorldSpec) -> None:
    fail(spec, 0, RuntimeError("[gloo] Connection reset by peer"))
    assert "rank 0 of 4 raised RuntimeError" in judge(spec, RankExit(0, 1, 1, 1.0)).lines[0]


def test_a_mapped_file_that_is_gone_is_a_storage_error(spec: WorldSpec) -> None:
    verdict = judge(spec, RankExit(1, 1, -7, 1.0), RankExit(0, 1, -15, 2.0, by_us=True))
    assert verdict.kind is Kind.STORAGE and "mapped into memory could not be read" in verdict.lines[0]


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (11, "SIGSEGV"), (64, "SIGRTMAX")])
def test_a_signal_is_named(number: int, name: str, spec: WorldSpec) -> None:
    verdict = judge(spec, RankExit(1, 1, -number, 1.0), RankExit(0, 1, -15, 2.0, by_us=True))
    assert f"rank 1 of 4 was killed by {name}" in verdict.lines[0] and verdict.exit_code == 5


def test_a_fault_that_a_rank_found_is_told_in_its_words_with_its_code(spec: WorldSpec) -> None:
    for rank in range(4):
        fail(spec, rank, DataError("record 7 is empty", where="train.jsonl, line 7"))
    verdict = judge(spec, *(RankExit(rank, 1, 2, 1.0) for rank in range(4)))
    assert verdict.exit_code == 2
    assert verdict.lines[:2] == ("data error: record 7 is empty", "  train.jsonl, line 7")
    assert not any("Traceback" in line for line in verdict.details)


def test_saved_and_left_is_no_failure(spec: WorldSpec) -> None:
    verdict = judge(spec, *(RankExit(rank, 1, 75, 1.0) for rank in range(4)))
    assert verdict.exit_code == 75 and verdict.stopped and not verdict.lines
    verdict = judge(spec, RankExit(0, 1, 75, 1.0), RankExit(1, 1, -15, 2.0, by_us=True))
    assert verdict.exit_code == 75, "one that we ended while it left"


def test_a_crash_during_a_stop_is_a_failure(spec: WorldSpec) -> None:
    exits = (RankExit(0, 1, 75, 1.0), RankExit(1, 1, -11, 2.0, by_us=True))
    assert judge(spec, *exits, stopped_by="SIGTERM").exit_code == 5


def test_a_stop_before_training_can_be_taken_up_again(spec: WorldSpec) -> None:
    exits = [RankExit(rank, 1, -15, 1.0, by_us=True) for rank in range(4)]
    verdict = judge(spec, *exits, stopped_by="SIGTERM")
    assert verdict.exit_code == 75 and "starts again" in verdict.lines[0]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR2", "SIGHUP", "SIGINT"])
def test_a_scheduler_that_signals_all_processes_while_they_load_stops_the_run(spec: WorldSpec, name: str) -> None:
    """Slurm's USR2 before the time limit: with exit code 5 its job was not queued again."""
    number = signal.Signals[name]
    verdict = judge(spec, RankExit(0, 1, -number, 1.0), RankExit(1, 1, 128 + number, 1.0), stopped_by=name)
    assert verdict.exit_code == 75 and f"stopped by {name} before anything could be saved" in verdict.lines[0]
    place = RankPlace(0, 2, 2, "10.0.0.1", 29500)
    assert judge_node(spec.run, place, RankExit(1, 1, -number, 1.0), name).exit_code == 75
    (spec.run.checkpoints / "step-00000040").mkdir()
    verdict = judge(spec, RankExit(0, 1, -number, 1.0), stopped_by=name)
    assert verdict.lines == (f"stopped by {name} with nothing new saved; the same command goes on from step-00000040",)
    assert judge_node(spec.run, place, RankExit(1, 1, -number, 1.0), name).lines == verdict.lines
    assert judge(spec, RankExit(0, 1, -number, 1.0)).exit_code == 5, "nobody asked for an end"


def test_failures_of_an_earlier_start_are_not_taken_for_this_ones(spec: WorldSpec) -> None:
    fail(spec, 1, RuntimeError("old"))
    assert [one.lines for one in read_failures(spec.run)] == [("old",)]
    clear_failures(spec.run)
    assert read_failures(spec.run) == []


def test_a_damaged_account_is_passed_over(spec: WorldSpec) -> None:
    fail(spec, 1, RuntimeError("whole"))
    (spec.run.logs / "failure-rank00002.json").write_text('{"rank": 2, "pi')
    (spec.run.logs / "failure-rank00003.json").write_text('{"rank": 3}')
    assert [one.rank for one in read_failures(spec.run)] == [1]


def test_the_last_step_is_of_this_start(spec: WorldSpec) -> None:
    log = EventWriter(global_log(spec.run))
    for step in (1, 2, 3):
        log.write("step", step=step)
    log.write("eval", step=9)
    log.close()
    with global_log(spec.run).open("a") as file:
        file.write('{"type": "step", "st')
    assert last_step(spec.run, 0) == 3
    begun = log_size(spec.run)
    assert last_step(spec.run, begun) == 0
    with global_log(spec.run).open("a") as file:  # a clock that was set back an hour meanwhile
        file.write(f'\n{{"type": "step", "t": {time.time() - 3600}, "step": 4}}\n')
    assert last_step(spec.run, begun) == 4
    assert last_step(spec.run, 10**9) == 4, "the log was begun anew since"


def test_the_traceback_is_the_last_one_of_the_last_start(tmp_path: Path) -> None:
    log = tmp_path / "rank00001.log"
    old = start_mark(1, 1) + "Traceback (most recent call last):\n  old\nOldError: x\n"
    log.write_text(old + start_mark(1, 2) + "all is well\n")
    assert read_last_traceback(log) == []
    new = (
        "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "x.py", line 3\n[rank1]: ValueError: odd\n[W1] a warning\n'
    )
    log.write_text(old + start_mark(1, 2) + new)
    assert read_last_traceback(log) == [
        "Traceback (most recent call last):", '  File "x.py", line 3', "ValueError: odd",
    ]  # fmt: skip


def test_threads_are_shared_and_a_users_choice_stays(spec: WorldSpec) -> None:
    assert [threads_per_process(8, count) for count in (1, 2, 3, 16)] == [8, 4, 2, 1]
    assert build_environment(spec, 8, {})["OMP_NUM_THREADS"] == "2"
    assert build_environment(spec, 8, {"OMP_NUM_THREADS": "5"})["OMP_NUM_THREADS"] == "5"


@pytest.mark.parametrize("nodes", [1, 2])
def test_every_rank_gets_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int) -> None:
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
             "DUOKA_PARENT_PID", "NNODES", "DUOKA_JOINS")  # fmt: skip
    script = f"import os; open(os.environ['RANK'], 'w').write(' '.join(os.environ.get(n, '-') for n in {names}))"
    start = {**os.environ, "NNODES": "2"}
    env = start if nodes == 1 else node_environment(2, start)
    monkeypatch.chdir(tmp_path)
    ranks = Ranks(RankPlace(nodes - 1, nodes, 2, "10.0.0.1", 1234), [sys.executable, "-c", script], env)
    try:
        while ranks.look():
            time.sleep(0.02)
    finally:
        ranks.close()
    assert [one.code for one in ranks.watch.exits] == [0, 0]
    pid, first = os.getpid(), 2 * (nodes - 1)
    tail = f"10.0.0.1 1234 {pid} {'2 -' if nodes == 1 else '- 1'}"
    for local in (0, 1):
        place = (tmp_path / str(first + local)).read_text()
        assert place == f"{first + local} {local} {nodes - 1} {2 * nodes} 2 {tail}"


@pytest.mark.parametrize(
    ("asked", "gpus", "expected"), [(None, 0, 1), (None, 4, 4), (2, 0, 2), (2, 4, 2), (0, 0, None), (5, 4, None)]
)
def test_one_process_per_gpu_unless_told_otherwise(asked: int | None, gpus: int, expected: int | None) -> None:
    if expected is None:
        with pytest.raises(ConfigError, match=f"--nproc is {asked}"):
            count_processes(asked, gpus)
    else:
        assert count_processes(asked, gpus) == expected


def test_ranks_of_several_machines_use_the_network_that_leads_to_the_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lan0": [SimpleNamespace(address="127.0.0.1")]})
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
    choose_interface(RankEnvironment(0, 0, 2, 2, 0, "127.0.0.1", 1))
    assert not os.environ["GLOO_SOCKET_IFNAME"], "one machine: as its launcher says"
    choose_interface(RankEnvironment(0, 0, 2, 1, 0, "127.0.0.1", 1))
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lan0"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    choose_interface(RankEnvironment(0, 0, 2, 1, 0, "127.0.0.1", 1))
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"
    assert interface_towards("no such host") == ""


def test_ports_are_checked() -> None:
    free, holder = hold_free_port()
    check_port(free)
    with socket.socket() as other, pytest.raises(OSError):
        other.bind(("", free))
    holder.close()
    for port in (0, -1, 70000):
        with pytest.raises(ConfigError, match="ports are 1 to 65535"):
            check_port(port)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            check_port(port)
    assert f"pid {os.getpid()}: " in str(caught.value)


def plain(tmp_path: Path, *chunks: bytes) -> str:
    copy = PlainCopy(tmp_path / "log")
    for chunk in chunks:
        copy.add(chunk)
    copy.close()
    return (tmp_path / "log").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("shown", "kept"),
    [
        (b"one\ntwo\n", "one\ntwo\n"),
        (b"one\r\ntwo\r\n", "one\ntwo\n"),
        (b"\x1b[1;31mred\x1b[0m\n", "red\n"),
        (b"10%\r20%\r30%\n", "30%\n"),
        (b"\r\x1b[2Kbar\r\x1b[2Kstep 1\nbar", "step 1\nbar\n"),
        ("训练中\r完成\n".encode(), "完成\n"),
        (b"\x1b]0;title\x07text\n", "text\n"),
        (b"no end", "no end\n"),
        (b"\n\n", "\n\n"),
    ],
)
def test_a_log_holds_lines_and_no_frames(shown: bytes, kept: str, tmp_path: Path) -> None:
    assert plain(tmp_path, shown) == kept


def test_a_log_is_the_same_however_the_bytes_arrive(tmp_path: Path) -> None:
    shown = "\r\x1b[2K进度 1\r\x1b[2K进度 2\n\x1b[32m好\x1b[0m\r\n".encode()
    (tmp_path / "a").mkdir()
    single = [shown[index : index + 1] for index in range(len(shown))]
    assert plain(tmp_path / "a", *single) == plain(tmp_path, shown) == "进度 2\n好\n"


def test_a_progress_line_that_never_ends_does_not_fill_memory(tmp_path: Path) -> None:
    copy = PlainCopy(tmp_path / "log")
    for number in range(20000):
        copy.add(b"\rstep %06d of many" % number)
    assert len(copy._line) < 70000
    copy.close()
    assert (tmp_path / "log").read_text() == "step 019999 of many\n"


def test_a_name_that_means_this_machine_only_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DUOKA_ALLOW_LOOPBACK", raising=False)
    with pytest.raises(ConfigError, match=r"which here is 127\.0\.0\.1: no other machine can connect"):
        open_listeners(Rules(1, 2, "localhost", 29500))


def kill(rank: int, number: int, step: int = 7) -> Verdict:
    return failed(Kind.WORKER_DIED, f"rank {rank}", rank=rank, cause=f"{signal.Signals(number).name}", step=step)


def test_the_same_failure_is_known_by_its_kind_and_not_by_our_words() -> None:
    assert kill(1, 9).is_same_failure(kill(1, 9))
    assert not kill(1, 9).is_same_failure(kill(0, 9)), "two kills of different ranks are two accidents"
    assert kill(1, 11).is_same_failure(kill(0, 11)), "a crash in compiled code may show on any rank"
    assert not kill(1, 9).is_same_failure(kill(1, 9, step=8)) and not kill(1, 9).is_same_failure(None)
    first, second = (
        failed(Kind.WORKER_DIED, "x", rank=rank, cause=f"RuntimeError: bad tensor at {address}, port {port}", step=3)
        for rank, address, port in ((0, "0x7f3ab of 7f3ab0c4e2d0", 4711), (1, "0x55dead of a5c0ffee1234", 81))
    )
    assert first.is_same_failure(second), "addresses and ports differ each time"
    other = failed(Kind.LOST_RANK, "x", rank=0, cause=first.cause, step=3)
    assert not first.is_same_failure(other)


def test_a_verdict_has_a_kind_with_rank_and_cause(spec: WorldSpec) -> None:
    verdict = judge(spec, RankExit(1, 1, -9, 1.0), RankExit(0, 1, -15, 2.0, by_us=True))
    assert (verdict.kind, verdict.rank, verdict.cause) == (Kind.WORKER_DIED, 1, "SIGKILL") and verdict.may_go_better
    assert judge(spec, RankExit(2, 1, 7, 1.0)).cause == "exit code 7"
    fail(spec, 2, RuntimeError("[gloo] Connection reset by peer"))
    assert judge(spec, RankExit(2, 1, 1, 1.0)).kind is Kind.LOST_RANK
    clear_failures(spec.run)
    kinds = ((DataError, Kind.REFUSED), (StorageError, Kind.STORAGE), (DoesNotFit, Kind.OUT_OF_MEMORY))
    for error, kind in ((one("x"), kind) for one, kind in kinds):
        fail(spec, 3, error)
        verdict = judge(spec, RankExit(3, 1, error.exit_code, 1.0))
        assert (verdict.kind, verdict.exit_code) == (kind, error.exit_code) and not verdict.may_go_better
    late = judge(spec, RankExit(0, 1, -9, 1.0), stopped_by="SIGTERM", late_s=61.0)
    assert late.kind is Kind.NOT_STOPPING and late.lines[0].endswith("within 61 s of SIGTERM, and was killed")
    assert judge(replace(spec, stop_within_s=61.0), RankExit(0, 1, -9, 1.0), stopped_by="SIGTERM", late_s=61.0).lines[
        1:
    ] == ("  faults.stop_within: auto would have waited as long as they moved",)
    assert judge(spec).kind is Kind.DONE


def test_who_was_killed_by_its_own_launcher_is_not_told_that_nothing_in_duoka_kills(spec: WorldSpec) -> None:
    """On one of several machines patience ends there, and whoever judges sees exit codes alone."""
    verdict = judge(spec, RankExit(1, 1, -9, 1.0, by_us=True), stopped_by="SIGTERM")
    assert verdict.exit_code == 5 and len(verdict.lines) == 1, verdict.lines
    assert verdict.lines[0].endswith("rank 1 of 4 did not leave when it was asked to, and was killed")
    place = RankPlace(0, 2, 2, "10.0.0.1", 29500)
    killed = RankExit(1, 1, -9, 1.0, by_us=True)
    assert judge_node(spec.run, place, killed, "SIGTERM").kind is Kind.NOT_STOPPING
    assert "rank 1 of 4 was killed by SIGKILL" in judge_node(spec.run, place, killed, "").lines[0]
    asked = judge_node(spec.run, place, RankExit(1, 1, -15, 1.0, by_us=True), "SIGHUP")
    assert asked.exit_code == 75 and "stopped by SIGHUP before anything could be saved" in asked.lines[0]
    assert "killed by signal 40" in judge_node(spec.run, place, RankExit(1, 1, -40, 1.0), "").lines[0]


def test_a_node_that_lost_another_says_so_and_ends_as_a_failed_worker(spec: WorldSpec) -> None:
    """It ended with exit code 1, a bug's, and a traceback of gloo's."""
    place, end = RankPlace(0, 2, 2, "node0", 1), RankExit(1, 1, 1, 1.0)
    fail(spec, 1, RuntimeError("gloo: Read error: Connection reset by peer"))
    verdict = judge_node(spec.run, place, end, "")
    assert (verdict.kind, verdict.exit_code) == (Kind.LOST_RANK, 5), verdict
    assert "rank 1 of 4 lost its connection to a rank of another machine" in verdict.lines[0]
    assert "the other machines say more" in verdict.lines[1] and "the same command on every node" in verdict.lines[-1]
    fail(spec, 2, ValueError("one record is odd"))
    assert judge_node(spec.run, place, end, "").lines[1] == "  rank 2 raised ValueError: one record is odd"
    fail(spec, 1, KeyError("mine"))
    assert "an error of its own, shown above" in judge_node(spec.run, place, end, "").lines[0]
    assert judge_node(spec.run, place, RankExit(1, 1, 7, 1.0), "", resumes=False).exit_code == 7, "a script's own"


def test_a_verdict_is_the_same_on_another_machine() -> None:
    verdict = failed(Kind.HUNG, "the run hangs", "  more", details=("  logs: x",), rank=2, cause="", step=9)
    assert Verdict.from_json(json.loads(json.dumps(verdict.to_json()))) == verdict
    with pytest.raises(ValueError):
        Verdict.from_json({**verdict.to_json(), "kind": "odd"})


def test_a_rank_that_left_early_with_exit_code_0_is_named_and_not_who_lost_it(spec: WorldSpec) -> None:
    fail(spec, 0, RuntimeError("[gloo] Connection closed by peer"))
    verdict = judge(spec, RankExit(2, 1, 0, 1.0), RankExit(0, 1, 1, 5.0), RankExit(1, 1, -15, 6.0, by_us=True))
    assert (verdict.kind, verdict.rank, verdict.exit_code) == (Kind.LEFT_EARLY, 2, 5)
    assert "rank 2 of 4 left early, with exit code 0" in verdict.lines[0] and "gloo" not in "".join(verdict.lines)
    fail(spec, 0, ValueError("a reason of its own"))
    assert judge(spec, RankExit(2, 1, 0, 1.0), RankExit(0, 1, 1, 5.0)).rank == 0


def test_a_rank_that_was_ended_after_the_others_saved_is_no_failure(spec: WorldSpec) -> None:
    verdict = judge(spec, RankExit(0, 1, 75, 1.0), RankExit(1, 1, -9, 40.0, by_us=True))
    assert (verdict.kind, verdict.exit_code, verdict.lines) == (Kind.STOPPED, 75, ())
