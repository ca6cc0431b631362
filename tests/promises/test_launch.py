"""What duoka starts, it sees to its end: output, signals, failures, exit codes, and nobody left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from commands import start_duoka

END_WITHIN_S = 30.0
MARK = "DUOKA_TEST_MARK"


class Launched:
    """One `duoka launch` under test: started, looked at, and ended whatever the test does."""

    def __init__(self, tmp_path: Path, mark: str) -> None:
        self.tmp_path = tmp_path
        self.output = tmp_path / "out"
        self.mark = mark
        self.process: subprocess.Popen[str] | None = None

    def start(self, script: str, *arguments: str, nproc: int = 2, flags: tuple[str, ...] = (), **env: str) -> None:
        path = self.tmp_path / "script.py"
        path.write_text(script, encoding="utf-8")
        own = {MARK: self.mark, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), **env}
        command = [sys.executable, "-m", "duoka", "launch", "--nproc", str(nproc), "--output", str(self.output), *flags]
        self.process = subprocess.Popen(
            [*command, str(path), *arguments], cwd=self.tmp_path, env={**os.environ, **own}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def wait(self, timeout_s: float = 100) -> tuple[int, str, str]:
        assert self.process is not None
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err

    def run(self, script: str, *arguments: str, **options: object) -> tuple[int, str, str]:
        self.start(script, *arguments, **options)  # type: ignore[arg-type]
        return self.wait()

    def log(self, rank: int) -> str:
        return (self.output / "logs" / f"rank{rank:05d}.log").read_text(encoding="utf-8")

    def status(self) -> dict[str, object]:
        value: dict[str, object] = json.loads((self.output / "status.json").read_text(encoding="utf-8"))
        return value

    def living(self) -> list[psutil.Process]:
        """Every process of this launch, found by what it inherited and not by what duoka says."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def wait_for(self, what: Callable[[], bool], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, f"waited {seconds} s in vain; {self.living()}"
            time.sleep(0.05)

    def ranks_ready(self, count: int) -> Callable[[], bool]:
        return lambda: len(list(self.tmp_path.glob("ready-*"))) == count


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    one = Launched(tmp_path, uuid.uuid4().hex)
    yield one
    left = one.living()
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=10)
    if one.process is not None:
        one.process.communicate()
    assert not [name for name in left if name], f"processes were left behind: {left}"


READY = """
import os, pathlib, signal, sys, time
rank = int(os.environ["RANK"])
def ready():
    pathlib.Path(f"ready-{rank}").write_text(str(os.getpid()))
def wait_for_all():
    while len(list(pathlib.Path().glob("ready-*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.02)
"""
FOREVER = READY + "ready()\ntime.sleep(300)\n"


def test_two_processes_meet_and_each_rank_writes_to_its_own_file(launched: Launched) -> None:
    script = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print("rank", dist.get_rank(), "of", dist.get_world_size(), "sum", total.item())
print("threads", os.environ["OMP_NUM_THREADS"], "arguments", sys.argv[1:])
dist.destroy_process_group()
"""
    code, out, err = launched.run(script, "--lr", "0.1", "--help", OMP_NUM_THREADS="3")
    assert code == 0, err
    assert out.count("rank 0 of 2 sum 3.0") == 1, f"rank 0 is passed on once: {out!r}"
    assert "rank 1" not in out + err, "other ranks stay out of the terminal"
    assert "rank 1 of 2 sum 3.0" in launched.log(1)
    assert "rank 1" not in launched.log(0) and launched.log(0).count("rank 0 of 2 sum 3.0") == 1
    assert "threads 3 arguments ['--lr', '0.1', '--help']" in out, "the user's own values stay"
    assert launched.status()["state"] == "done"


def test_the_rank_that_raised_is_named_with_its_traceback_once(launched: Launched) -> None:
    script = (
        READY
        + """
ready(); wait_for_all()
def inner():
    raise ValueError("the number is odd")
if rank == 1:
    inner()
time.sleep(300)
"""
    )
    start = time.monotonic()
    code, _, err = launched.run(script)
    assert code == 5
    assert err.splitlines()[0] == "worker failed: rank 1 of 2 raised ValueError: the number is odd"
    assert err.count("Traceback (most recent call last)") == 1 and "in inner" in err
    assert "1 other rank was stopped because of it" in err and "rank00001.log" in err
    assert launched.status()["state"] == "failed" and launched.status()["exit_code"] == 5
    assert time.monotonic() - start < 60, "the rest was ended, it did not sleep its 300 s"


def test_a_rank_that_only_lost_its_peer_is_not_blamed(launched: Launched) -> None:
    script = (
        READY
        + """
ready(); wait_for_all()
if rank == 0:
    raise RuntimeError("gloo: Connection closed by peer [127.0.0.1]:1234")
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    code, _, err = launched.run(script)
    assert code == 5
    top = err[err.index("worker failed") :]
    assert top.startswith("worker failed: rank 1 of 2 was killed by SIGKILL"), err


def test_a_rank_that_ends_ends_the_rest_though_they_ignore_sigterm(launched: Launched) -> None:
    script = (
        READY
        + """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ready(); wait_for_all()
if rank == 2:
    os._exit(9)
time.sleep(300)
"""
    )
    launched.start(script, nproc=3)
    launched.wait_for(launched.ranks_ready(3))
    start = time.monotonic()
    code, _, err = launched.wait()
    assert time.monotonic() - start < END_WITHIN_S, "everything is down within 30 s"
    assert code == 5 and "rank 2 of 3 ended with exit code 9" in err.splitlines()[0], err
    assert "2 other ranks were stopped because of it" in err


@pytest.mark.parametrize("victim", ["launcher", "rank"])
def test_nobody_survives_when_one_of_the_family_is_killed(launched: Launched, victim: str) -> None:
    script = (
        READY
        + """
import subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ready()
time.sleep(300)
"""
    )
    launched.start(script)
    launched.wait_for(launched.ranks_ready(2))
    assert launched.process is not None
    rank = int((launched.tmp_path / "ready-0").read_text())
    assert psutil.Process(rank).ppid() == launched.process.pid
    os.kill({"launcher": launched.process.pid, "rank": rank}[victim], signal.SIGKILL)
    launched.wait_for(lambda: not launched.living(), END_WITHIN_S)
    code, _, err = launched.wait()
    assert code == (-signal.SIGKILL if victim == "launcher" else 5), err


def test_helpers_that_a_rank_left_behind_are_ended(launched: Launched) -> None:
    script = (
        READY
        + """
import subprocess
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
"""
    )
    code, _, err = launched.run(script, nproc=1)
    assert code == 0, err
    assert not launched.living()


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR2"])
def test_a_request_to_stop_reaches_every_rank_once_as_sigterm(launched: Launched, name: str, nproc: int) -> None:
    script = (
        READY
        + """
seen = []
signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
ready()
while not seen:
    time.sleep(0.02)
time.sleep(1.0)
print("asked", len(seen), "times; saved", flush=True)
sys.exit(75)
"""
    )
    launched.start(script, nproc=nproc)
    launched.wait_for(launched.ranks_ready(nproc))
    assert launched.process is not None
    launched.process.send_signal(getattr(signal, name))
    if name != "SIGINT":
        time.sleep(0.3)
        launched.process.send_signal(getattr(signal, name))  # schedulers repeat themselves
    code, _, err = launched.wait()
    assert code == 75, err
    for rank in range(nproc):
        assert "asked 1 times; saved" in launched.log(rank), f"rank {rank}"
    assert "worker failed" not in err and launched.status()["state"] == "stopped"


def test_a_second_ctrl_c_ends_at_once(launched: Launched) -> None:
    script = READY + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nready()\ntime.sleep(300)\n"
    launched.start(script)
    launched.wait_for(launched.ranks_ready(2))
    assert launched.process is not None
    launched.process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    assert launched.process.poll() is None, "the first one only asks"
    launched.process.send_signal(signal.SIGINT)
    code, _, err = launched.wait(20)
    assert code == 130 and "left at once" in err


def test_ranks_that_do_not_stop_are_killed_after_the_grace_time(launched: Launched) -> None:
    script = READY + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nready()\ntime.sleep(300)\n"
    launched.start(script, flags=("--grace", "2"))
    launched.wait_for(launched.ranks_ready(2))
    assert launched.process is not None
    launched.process.send_signal(signal.SIGTERM)
    code, _, err = launched.wait(40)
    assert code == 5
    assert "worker failed: ranks 0, 1 did not stop within 2 s of SIGTERM, and were killed" in err


@pytest.mark.parametrize(("leaves_with", "expected"), [(75, 75), (2, 2), (6, 6), (9, 5), (0, 0)])
def test_documented_exit_codes_of_a_rank_come_through(launched: Launched, leaves_with: int, expected: int) -> None:
    code, _, err = launched.run(f"import sys; sys.exit({leaves_with})", nproc=1)
    assert code == expected, err
    if expected == 5:
        assert f"rank 0 of 1 ended with exit code {leaves_with}" in err


@pytest.mark.parametrize("leaves_with", [75, 2])
def test_documented_exit_codes_come_through_from_several_ranks(launched: Launched, leaves_with: int) -> None:
    code, _, err = launched.run(READY + f"ready(); wait_for_all(); sys.exit({leaves_with})")
    assert code == leaves_with, err


def test_a_port_that_is_taken_is_refused_with_its_owner(launched: Launched) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = launched.run("print('started')", flags=("--port", str(port)))
    assert code == 2
    assert f"port {port} is taken" in err and f"by pid {os.getpid()}: " in err
    assert not launched.output.exists(), "nothing was started or written"


def test_a_port_that_is_free_is_used(launched: Launched) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = "import os; print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'], os.environ['WORLD_SIZE'])"
    code, out, err = launched.run(script, nproc=1, flags=("--port", str(port)))
    assert code == 0 and out.split() == ["127.0.0.1", str(port), "1"], err


def test_two_launches_on_one_machine_do_not_meet(tmp_path: Path) -> None:
    """A fixed 29500 would make the second one join the first, or fail."""
    script = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([1.0]); dist.all_reduce(total); print("sum", total.item()); dist.destroy_process_group()
"""
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    launches = [
        start_duoka("launch", "--nproc", "2", "--output", tmp_path / name, "script.py", cwd=tmp_path)
        for name in ("one", "other")
    ]
    for one in launches:
        out, _ = one.communicate(100)
        assert one.returncode == 0 and "sum 2.0" in out, out


def test_the_log_keeps_what_an_earlier_start_wrote(launched: Launched) -> None:
    for word in ("first", "second"):
        code, out, err = launched.run(f"import os; print('{word}', os.environ['RANK'])")
        assert code == 0 and out.strip() == f"{word} 0", err
    for rank in (0, 1):
        log = launched.log(rank)
        assert f"first {rank}" in log and f"second {rank}" in log
        assert log.count("--- duoka: rank") == 2


def test_a_reader_that_goes_away_does_not_end_the_run(launched: Launched) -> None:
    script = READY + "ready()\nfor n in range(30000): print('line', n)\nprint('the end')\n"
    launched.start(script, nproc=1)
    assert launched.process is not None and launched.process.stdout is not None
    launched.process.stdout.readline()
    launched.process.stdout.close()
    assert launched.process.wait(60) == 0
    assert "the end" in launched.log(0)


def test_a_rank_on_a_terminal_has_a_terminal_and_its_log_has_none(tmp_path: Path, launched: Launched) -> None:
    import pty

    script = """
import os, sys, time
print("terminal", sys.stdout.isatty(), os.get_terminal_size().columns)
for n in range(5):
    print(f"\\r\\x1b[2K\\x1b[31mstep {n}\\x1b[0m", end="", flush=True)
print("\\nthe end")
"""
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    main, side = pty.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 91, 0, 0))
    env = {**os.environ, MARK: launched.mark, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    command = [sys.executable, "-m", "duoka", "launch", "--output", str(launched.output), "script.py"]
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=side, stderr=side, stdin=subprocess.DEVNULL)
    os.close(side)
    shown = b""
    while True:
        try:
            data = os.read(main, 65536)
        except OSError:
            break
        shown += data
        if not data:
            break
    os.close(main)
    assert process.wait(30) == 0
    assert b"terminal True 91" in shown and b"\x1b[31mstep 3" in shown, shown
    log = launched.log(0)
    assert "terminal True 91\nstep 4\nthe end\n" in log, f"only lines that stay: {log!r}"


def test_runs_stop_ends_only_that_run(launched: Launched, tmp_path: Path) -> None:
    other = Launched(tmp_path / "other", launched.mark)
    other.tmp_path.mkdir()
    launched.start(FOREVER)
    other.start(FOREVER, nproc=1)
    launched.wait_for(launched.ranks_ready(2))
    other.wait_for(other.ranks_ready(1))
    stop = [sys.executable, "-m", "duoka", "runs", "stop", str(launched.output), "--grace", "20"]
    done = subprocess.run(stop, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    code, _, err = launched.wait(20)
    assert code == 128 + signal.SIGTERM and "stopped by SIGTERM" in err
    assert other.process is not None and other.process.poll() is None, "the other run goes on"
    stop[5:] = [str(other.output), "--now"]
    assert subprocess.run(stop, capture_output=True, timeout=60).returncode == 0
    other.wait(20)
    assert not launched.living()
