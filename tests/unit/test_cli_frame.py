"""The command line's frame: help is light, mistakes are answered, errors end with their codes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from duoka import __version__
from duoka import cli as frame
from duoka.errors import ConfigError, DoesNotFit, DuokaError, Fault, Faults, StorageError

HEAVY = ("torch", "transformers", "peft", "pydantic", "numpy", "pyarrow", "yaml", "rich", "psutil")


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in frame.COMMANDS)], ids=" ".join)
def test_help_of_any_command_imports_nothing_heavy(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom duoka.cli import run\n"
        f"code = run({arguments!r})\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "print('HEAVY', heavy, file=sys.stderr)\nsys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: duoka"), done.stdout
    assert done.stderr.strip().endswith("HEAVY []"), done.stderr


def test_every_command_in_the_table_exists_with_that_name() -> None:
    group = frame.cli
    assert isinstance(group, frame.LazyGroup)
    context = click.Context(group)
    for name in frame.COMMANDS:
        found = group.get_command(context, name)
        assert found is not None and found.name == name


def test_no_arguments_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.run([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in frame.COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.run(["--version"]) == 0
    assert capsys.readouterr().out == f"duoka {__version__}\n"


@pytest.mark.parametrize(("typed", "meant"), [("trian", "train"), ("docter", "doctor"), ("Export", "export")])
def test_a_misspelled_command_is_answered_with_the_right_one(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert frame.run([typed, "x.yaml"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[0] == f"usage error: there is no command '{typed}'"
    assert f"did you mean:   duoka {meant} x.yaml" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fly"], "there is no command 'fly'"),
        (["train"], "missing argument 'CONFIG'"),
        (["train", "x.yaml", "--nprok", "2"], "did you mean --nproc?"),
        (["train", "x.yaml", "--nproc", "two"], "'two' is neither a number of processes nor auto"),
        (["--jason"], "there is no option --jason"),
        (["completion", "tcsh"], "'tcsh' is not one of"),
        (["runs", "stop"], "missing argument 'NAME'"),
    ],
)
def test_usage_errors_are_short_and_exit_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert frame.run(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("usage error: ") and words in err and "--help" in err
    assert "Traceback" not in err


@pytest.fixture
def raising() -> Iterator[dict[str, BaseException]]:
    """A command `init` that raises what the test puts here."""
    box: dict[str, BaseException] = {}

    class Module:
        @click.command("init")
        def command() -> None:  # type: ignore[misc]
            raise box["error"]

    before = sys.modules.get("duoka.cli.init")
    sys.modules["duoka.cli.init"] = Module  # type: ignore[assignment]
    yield box
    if before is None:
        del sys.modules["duoka.cli.init"]
    else:
        sys.modules["duoka.cli.init"] = before


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (ConfigError("no", where="here", fix="do"), 2, "config error: no\n  here\n  do\n"),
        (DoesNotFit("big"), 4, "does not fit: big\n"),
        (StorageError("full"), 6, "storage error: full\n"),
        (Faults([Fault("a", key="k"), Fault("b")]), 2, "config error: a\nconfig error: b\n"),
        (DuokaError("odd"), 1, "error: odd\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_an_error_is_a_message_with_its_exit_code(
    error: BaseException, code: int, shown: str, raising: dict[str, BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    raising["error"] = error
    assert frame.run(["init"]) == code
    assert capsys.readouterr().err.strip() == shown.strip()


def test_a_full_disk_is_a_storage_error_and_no_bug(
    raising: dict[str, BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    raising["error"] = OSError(errno.ENOSPC, "No space left on device", "/data/x")
    assert frame.run(["init"]) == 6
    err = capsys.readouterr().err
    assert "no space left" in err and "/data/x" in err and "Traceback" not in err


@pytest.mark.parametrize("line", [["runs"], ["doctor"], ["plan", "/nowhere.yaml"]])
def test_a_current_folder_that_is_gone_is_said_to_be(
    line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Deleted or made anew (a checkout, rsync) under an open terminal: train, eval and doctor ended in tracebacks, and
    chat and serve in "Intel oneMKL FATAL ERROR"."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert frame.run(line) == 6
    said = capsys.readouterr().err
    assert "the current folder is gone" in said and "Traceback" not in said, said
    assert frame.run(["--help"]) == 0 and frame.run([]) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize(
    ("line", "code"), [(["plan", "nowhere.yaml"], 2), (["nosuch"], 2), (["doctor", "--level", "x"], 2)]
)
def test_an_exit_code_holds_where_its_message_finds_no_room(line: list[str], code: int) -> None:
    """`2>train.log` on a full disk: every end was a bug's, and a note ended a run that could have been trained."""
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "duoka", *line], stdout=full, stderr=full, timeout=60)
    assert done.returncode == code


def test_a_bug_shows_its_traceback_and_asks_for_a_report(
    raising: dict[str, BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    raising["error"] = ZeroDivisionError("oops")
    assert frame.run(["init"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err and "ZeroDivisionError: oops" in err and "bug in duoka" in err


def run_duoka(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    command = [sys.executable, "-m", "duoka", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**clean, **env})


def test_python_m_duoka_is_the_same_program() -> None:
    assert run_duoka("--version").stdout == f"duoka {__version__}\n"


def test_colors_only_on_a_terminal_and_never_with_no_color(tmp_path: Path) -> None:
    import pty

    def on_terminal(**env: str) -> bytes:
        main, side = pty.openpty()
        clean = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
        command = [sys.executable, "-m", "duoka", "fly"]
        child = subprocess.Popen(command, stdout=side, stderr=side, env={**clean, **env})
        os.close(side)
        shown = b""
        try:
            while data := os.read(main, 4096):
                shown += data
        except OSError:
            pass
        child.wait(30)
        os.close(main)
        return shown

    assert b"\x1b[31m" in on_terminal(TERM="xterm")
    assert b"\x1b" not in on_terminal(TERM="xterm", NO_COLOR="1")
    assert "\x1b" not in run_duoka("fly").stderr


def test_a_closed_pipe_is_no_error() -> None:
    command = [sys.executable, "-m", "duoka", "completion", "bash"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert done.stderr == "" and done.returncode == frame.BROKEN_PIPE


def test_a_reader_that_leaves_a_run_s_screen_is_an_error_that_the_run_survives() -> None:
    """Rich left with exit(1) instead: `torchrun ... duoka train | head` ended the run, `duoka data inspect` with 1."""
    from duoka.sinks.console import open_screen

    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as out, pytest.raises(BrokenPipeError):
        try:
            open_screen(file=out).print("step 1")
        finally:
            os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("--lr=3", "optim.lr=..."), ("--learning_rate", "optim.lr=..."), ("--max-length", "data.max_length=..."),
     ("--nprocs", "did you mean --nproc?")],
)  # fmt: skip
def test_an_option_that_is_a_key_of_the_yaml_is_told_as_one(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--lr` was answered with: did you mean --slurm?"""
    assert frame.run(["train", "x.yaml", typed, "3"]) == 2
    assert meant in capsys.readouterr().err


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_empty_ones(closed: str, tmp_path: Path) -> None:
    """Python has None for them: chat asked None whether it is a terminal, and a file took the number of the output."""
    line = f'exec "$0" -m duoka init new.yaml {closed}'
    done = subprocess.run(["sh", "-c", line, sys.executable], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    written = (tmp_path / "new.yaml").read_text(encoding="utf-8")
    assert "model:" in written and "next:" not in written


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_name_our_variable(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.run(["completion", shell]) == 0
    assert frame.COMPLETE_VAR in capsys.readouterr().out


def test_the_shell_is_offered_commands_and_options() -> None:
    done = run_duoka(**{frame.COMPLETE_VAR: "bash_complete", "COMP_WORDS": "duoka tr", "COMP_CWORD": "1"})
    assert done.stdout.split() == ["plain,train"], done.stderr
    done = run_duoka(**{frame.COMPLETE_VAR: "bash_complete", "COMP_WORDS": "duoka train --np", "COMP_CWORD": "2"})
    assert done.stdout.split() == ["plain,--nproc"], done.stderr


def test_chinese_on_an_ascii_terminal_is_no_crash(tmp_path: Path) -> None:
    env = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = run_duoka("launch", str(tmp_path / "没有.py"), **env)
    assert done.returncode == 2 and "there is no script" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("module, code", [("click", -signal.SIGINT), ("duoka.cli.typed", 130), ("duoka.cli.plan", 130)])
def test_an_interrupt_while_modules_are_imported_is_no_traceback(module: str, code: int) -> None:
    """In the first tenths of a second a Ctrl-C met imports, outside of what catches it."""
    script = f"""
import os, runpy, signal, sys

class Stop:
    def find_spec(self, name, *rest):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Stop())
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv[1:] = ["plan", "x.yaml"]
runpy.run_module("duoka", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
