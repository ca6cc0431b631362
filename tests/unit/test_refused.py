"""What the system refuses a process, memory or files, is told in words with a limit and what to do."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from duoka.cli import cli, find_known_fault, run
from duoka.cluster.blame import judge_world
from duoka.cluster.launch import WorldSpec
from duoka.cluster.verdict import Kind
from duoka.errors import ConfigError
from duoka.process.exits import RankExit
from duoka.process.rank import start_mark
from duoka.runs.folder import RunFolder


@pytest.fixture
def spec(tmp_path: Path) -> WorldSpec:
    run = RunFolder(tmp_path / "run")
    run.make()
    return WorldSpec(("python", "x.py"), 4, run)


def judge(spec: WorldSpec, one: RankExit):
    return judge_world(spec, [one], stopped_by="", left_at_once=False, killed_late_s=0.0)


@pytest.mark.parametrize("words", [
    "OpenBLAS error: Memory allocation still failed after 10 retries, giving up.\n",
    "Traceback (most recent call last):\nMemoryError\nException ignored in: <object repr() failed>\n",
])  # fmt: skip
def test_a_process_that_got_no_memory_ends_with_exit_code_4_though_it_wrote_nothing_down(
    spec: WorldSpec, words: str
) -> None:
    log = spec.run.logs / "rank00001.log"
    log.write_text(start_mark(1, 1) + words, encoding="utf-8")
    verdict = judge(spec, RankExit(1, 1, 1, 1.0))
    assert (verdict.kind, verdict.exit_code) == (Kind.OUT_OF_MEMORY, 4) and "does not fit" in verdict.lines[0]
    assert not any("Traceback" in line for line in verdict.details)
    assert judge(spec, RankExit(1, 1, -9, 1.0)).kind is Kind.WORKER_DIED
    log.write_text(start_mark(1, 1) + words + start_mark(1, 2) + "another start\n", encoding="utf-8")
    assert judge(spec, RankExit(1, 1, 1, 1.0)).kind is Kind.WORKER_DIED


def test_a_process_that_could_open_no_more_files_ends_with_exit_code_3(spec: WorldSpec) -> None:
    words = (
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n what(): accept: Too many open files\n"
    )
    (spec.run.logs / "rank00001.log").write_text(start_mark(1, 1) + words, encoding="utf-8")
    verdict = judge(spec, RankExit(1, 1, -signal.SIGABRT, 1.0))
    assert verdict.exit_code == 3 and "ulimit -n" in verdict.lines[0]


def test_refused_memory_is_known_however_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said = (MemoryError(), OSError(12, "Cannot allocate memory"), ImportError("x.so: failed to map segment from shared "
            "object"), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"))  # fmt: skip
    assert all(find_known_fault(error).exit_code == 4 for error in said)
    assert find_known_fault(RuntimeError("memory of a goldfish")) is None
    refused = RuntimeError("can't start new thread")
    assert find_known_fault(refused).exit_code == 3, "without a limit on memory it is one on processes"
    monkeypatch.setattr("duoka.process.no_memory.address_limit", lambda: 780 << 20)
    assert "limited to 780 MiB (ulimit -v)" in find_known_fault(refused).lines()[0]
    assert find_known_fault(RuntimeError("could not create a primitive")).exit_code == 4, "all that oneDNN says of it"
    monkeypatch.undo()
    assert find_known_fault(RuntimeError("could not create a primitive")) is None


def test_refused_processes_are_known_however_it_is_said() -> None:
    """Under `ulimit -u` or a container's pids.max it was a bug of duoka, or a rendezvous that did not complete."""
    panic = type("PanicException", (BaseException,), {})
    said = (
        BlockingIOError(11, "Resource temporarily unavailable"), RuntimeError("Resource temporarily unavailable"),
        RuntimeError("can't start new thread"), panic("ThreadPoolBuildError { kind: IOError(Os { code: 11 }) }"),
    )  # fmt: skip
    for error in said:
        fault = find_known_fault(error)
        assert fault is not None and fault.exit_code == 3 and "ulimit -u" in fault.fix, error
    waited = RuntimeError("recv from 10.0.0.1: Resource temporarily unavailable")
    assert find_known_fault(waited) is None and find_known_fault(panic("index out of bounds")) is None


@pytest.mark.parametrize(
    "words",
    ["libgomp: Thread creation failed: Resource temporarily unavailable\n",
     "terminate called after throwing 'std::system_error'\n  what():  Resource temporarily unavailable\n"],
)  # fmt: skip
def test_a_rank_that_could_start_no_thread_ends_with_exit_code_3(spec: WorldSpec, words: str) -> None:
    (spec.run.logs / "rank00001.log").write_text(start_mark(1, 1) + words, encoding="utf-8")
    verdict = judge(spec, RankExit(1, 1, -signal.SIGABRT, 1.0))
    assert verdict.exit_code == 3 and "no more processes or threads" in verdict.lines[0]


def test_a_panic_of_a_library_s_threads_is_told_by_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    panic = type("PanicException", (BaseException,), {})

    def raise_it(**options: object) -> None:
        raise panic(said[0])

    monkeypatch.setattr(cli, "main", raise_it)
    said = ["ThreadPoolBuildError { kind: IOError }"]
    assert run(["doctor"]) == 3 and "no more processes or threads" in capsys.readouterr().err
    said[0] = "index out of bounds"
    with pytest.raises(panic):
        run(["doctor"])


def test_too_few_open_files_are_known_however_it_is_said() -> None:
    """Files of a model and connections of a group are refused alike; what a reader advised then is no advice."""
    said = "Too many open files"
    plain = [OSError(24, said), RuntimeError(f"accept: {said}"), Exception(f"{said} (os error 24)")]
    plain.append(RuntimeError("Failed to init uv loop"))  # at `ulimit -n 16` two processes met for 10 minutes, it said
    wrapped = [told_of(error) for error in plain]
    for error in (*plain, *wrapped):
        fault = find_known_fault(error)
        assert fault.exit_code == 3 and "ulimit -n" in fault.what and "65536" in fault.fix
    quoted = ConfigError(f"log.to must be a list of names, got '{said}'")
    assert find_known_fault(quoted) is quoted and find_known_fault(ValueError(said)) is None


def told_of(error: Exception) -> ConfigError:
    """A reader's fault of a file, as it comes out of an `except`."""
    try:
        try:
            raise error
        except type(error) as seen:
            raise ConfigError(f"the tokenizer cannot be read ({seen})", fix="copy the folder again") from None
    except ConfigError as told:
        return told


def test_a_process_that_joins_others_may_open_what_the_system_grants() -> None:
    code = (
        "import resource; from duoka.process.open_files import raise_open_files; name = resource.RLIMIT_NOFILE\n"
        "hard = min(resource.getrlimit(name)[1], 4096); resource.setrlimit(name, (64, hard)); raise_open_files()\n"
        "assert resource.getrlimit(name) == (hard, hard)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_refused_memory_is_said_without_importing_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise MemoryError

    with monkeypatch.context() as without_memory:
        without_memory.setattr("builtins.__import__", refuse)
        found = find_known_fault(MemoryError())
    assert found.exit_code == 4
