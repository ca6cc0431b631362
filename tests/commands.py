"""`duoka ...`, or `python script.py`, as a user types it, but forked from the process that worlds are (worlds.py).

A `duoka train` costs five seconds of CPU for imports alone, in its fork server, and a script that imports torch as
much: a test that looks at what a run does, not at how a process starts, begins here. The command is a process of its
own with its own arguments, variables, folder and output; what it would start with this Python is forked from it.
Nothing else differs but what the system tells of it: its variables in /proc are those of what it was forked from,
so a launcher cannot find what it would end all at once, and worlds that hang start really, as do those of
test_fork_server.py, test_worlds_of_others.py and test_launch.py.
"""

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from functools import partial
from multiprocessing import resource_tracker
from types import SimpleNamespace

from worlds import PRELOADED

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
PACE = "DUOKA_TESTS_PACE"  # while the file of this variable is there, a step of a run takes half a second of waiting

# A script that knows nothing of duoka: the sum of 2 to the power of each rank.
OWN_SCRIPT = """import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([2.0 ** dist.get_rank()])
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item():g} {sys.argv[1]}", flush=True)
dist.destroy_process_group()
"""


class Command:
    """As much of subprocess.Popen as tests use; the output goes to files, which `communicate` reads."""

    def __init__(self, words, *, cwd=None, env=None, merged=True):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        with contextlib.ExitStack() as stack:
            self._out = stack.enter_context(tempfile.NamedTemporaryFile("r", encoding="utf-8"))
            self._err = self._out if merged else stack.enter_context(tempfile.NamedTemporaryFile("r", encoding="utf-8"))
            env = {**os.environ, **(env or {})}
            given = (list(map(str, words)), str(cwd or os.getcwd()), env, self._out.name, self._err.name)
            self._process = context.Process(target=_be_command, args=given)
            self._process.start()
            self._files = stack.pop_all()
        self.pid = self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    poll = returncode.fget

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("duoka", timeout, self.said())
        return self.returncode

    def communicate(self, timeout=None):
        self.wait(timeout)
        return self.said(), None if self._err is self._out else _read(self._err)

    def said(self):
        """The output up to now."""
        return _read(self._out)

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def start_duoka(*arguments, **options):
    """`duoka ARGUMENTS`, started."""
    return Command(["-m", "duoka", *arguments], **options)


def run_python(*words, timeout=170, **options):
    """`python WORDS`, to its end: what subprocess.run gives back."""
    command = Command(words, merged=False, **options)
    try:
        out, err = command.communicate(timeout)
    finally:
        command.kill()
    return subprocess.CompletedProcess(words, command.returncode, out, err)


def run_duoka(*arguments, **options):
    return run_python("-m", "duoka", *arguments, **options)


def _read(file):
    file.seek(0)
    return file.read()


def _be_command(words, cwd, env, out, err):
    """In the new process."""
    import duoka.cli.bench_runs
    import duoka.cluster.forks
    import duoka.cluster.pipeline.execute
    import duoka.cluster.ranks

    _take_streams(os.open(os.devnull, os.O_RDONLY), *(os.open(path, os.O_WRONLY | os.O_APPEND) for path in (out, err)))
    os.chdir(cwd)
    _take_environment(env)
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    for module in (duoka.cluster.forks, duoka.cluster.ranks):
        module.subprocess = SimpleNamespace(Popen=_fork_instead, DEVNULL=subprocess.DEVNULL)
    if words[:3] == ["-m", "duoka", "run"]:
        duoka.cluster.pipeline.execute.subprocess = SimpleNamespace(Popen=_Stage, PIPE=subprocess.PIPE)
    if words[:3] == ["-m", "duoka", "bench"]:
        duoka.cli.bench_runs.run_to_end = _run_forked
    _leave_after(partial(_be_python, words))


def _be_python(words):
    """`python WORDS`, in a process that is nothing yet."""
    words = [word for word in words if word != "-P"]
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(words[1], {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
        runpy.run_path(words[0], run_name="__main__")


def _fork_instead(command, *, stdin, stdout, stderr, env, start_new_session):
    """In the launcher: its fork server, or a rank that none forks. Both have sessions of their own."""
    from duoka.cluster.forks import ForkedRank

    assert command[0] == sys.executable and start_new_session, f"what would this be? {command}"
    pid = os.fork()
    if pid:
        return ForkedRank(pid)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    _start_anew(*(null if one == subprocess.DEVNULL else one for one in (stdin, stdout, stderr)), env)
    name, *arguments = command[command.index("-m") + 1 :]
    _leave_after(partial({"duoka.process.fork_server": _be_server, "duoka.process.rank": _be_rank}[name], arguments))


class _Stage:
    """In `duoka run`: the command of a stage, as far as subprocess.Popen's face is used."""

    def __init__(self, command, stdin=None, stdout=None, text=True, encoding="utf-8"):
        assert command[0] == sys.executable and text
        reader, writer = os.pipe() if stdout == subprocess.PIPE else (None, 1)
        told, teller = os.pipe() if stdin == subprocess.PIPE else (os.open(os.devnull, os.O_RDONLY), None)
        self.pid = os.fork()
        if not self.pid:
            _start_anew(told, writer, 2, dict(os.environ))
            _leave_after(partial(_be_python, command[1:]))
        os.close(told)
        self.stdin = None if teller is None else os.fdopen(teller, "w", encoding=encoding)
        if reader is not None:
            os.close(writer)
            self.stdout = os.fdopen(reader, encoding=encoding)

    def send_signal(self, number):
        os.kill(self.pid, number)

    def wait(self):
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _run_forked(command):
    """In `duoka bench`: what run_to_end gives back."""
    assert command[0] == sys.executable
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out, tempfile.TemporaryFile("w+", encoding="utf-8") as err:
        pid = os.fork()
        if not pid:
            _start_anew(os.open(os.devnull, os.O_RDONLY), out.fileno(), err.fileno(), dict(os.environ))
            _leave_after(partial(_be_python, command[1:]))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return subprocess.CompletedProcess(command, code, _read(out), _read(err))


def _start_anew(stdin, stdout, stderr, env):
    """In a process that was forked from a command: nothing is left of that one's own."""
    _take_streams(stdin, stdout, stderr)
    # What it holds open, the lock of a run's folder among it, is not for others to hold.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    tracker = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None  # the one of the process that all are forked from: closed here
    weakref.finalize._registry.clear()  # its temporary folders are its own to remove
    for number in SIGNALS:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _take_environment(env)


def _be_server(modules):
    from duoka.process.fork_server import main

    if PACE in os.environ:
        _keep_pace(os.environ[PACE])
    main(modules)


def _keep_pace(file):
    import duoka.train.loop

    step = duoka.train.loop.optimizer_step

    def paced(*arguments, **options):
        if os.path.exists(file):
            time.sleep(0.5)
        return step(*arguments, **options)

    duoka.train.loop.optimizer_step = paced


def _be_rank(command):
    """As duoka.process.rank does, but without becoming another program."""
    from duoka.process.lifeline import die_with_parent, parent_pid
    from duoka.process.rank import send_output_to_log

    die_with_parent(parent_pid())
    send_output_to_log()
    assert command[0] == sys.executable
    _be_python(command[1:])


def _take_streams(*descriptors):
    sys.stdout.flush()
    sys.stderr.flush()
    copies = [os.dup(one) for one in descriptors]  # one of them may lie where another is to go
    for target, copy in enumerate(copies):
        os.dup2(copy, target)
        os.close(copy)
    for one in {*descriptors} - {0, 1, 2}:
        os.close(one)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, encoding="utf-8", closefd=False, buffering=1)
        for number, mode in enumerate(("r", "w", "w"))
    )


def _take_environment(env):
    os.environ.clear()
    os.environ.update(env)


def _leave_after(work):
    """Do it, and end as Python ends: threads, functions of atexit, the exit code."""
    code = 0
    try:
        work()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - as Python does at its end
        traceback.print_exc()
        code = 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
