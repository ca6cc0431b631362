"""See one world of processes from its start to its end: pass its output on, pass signals down, leave nobody behind.

`run_world` is called by `duoka train` and `duoka launch` in the process that a user started. It ends only processes
that it started itself, and returns what happened; blame.py finds the cause.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from duoka.cluster.blame import Verdict, judge_world
from duoka.cluster.hang import Hang, HangWatch
from duoka.cluster.launch import TOKEN, WorldSpec, build_child_command, build_environment
from duoka.cluster.passthrough import Channel, PlainCopy, open_channels
from duoka.cluster.probe import count_usable_cores
from duoka.errors import WorkerFailed
from duoka.parallel.exits import RankExit, WorldReport, read_report
from duoka.parallel.rank import log_name, start_mark
from duoka.runs.failure import clear_failures
from duoka.runs.folder import RunFolder
from duoka.runs.heart import clear_beats
from duoka.runs.status import State, leader_identity, update_status

_LOOK_EVERY_S = 0.1
_DRAIN_S = 0.3  # output that is still in a pipe that somebody else keeps open
_AGENT_END_S = 15.0  # from the last rank's end to the agent's
_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Request:
    """What signals asked for so far."""

    stop_by: str = ""  # the first signal's name
    at: float = 0.0
    forwarded: bool = False
    leave_now: bool = False
    resized: bool = False


def run_world(spec: WorldSpec) -> Verdict:
    """Start the world, wait for its end, and say how it ended. Writes the run's status."""
    request = Request()
    with listen_to_signals(request):
        return run_once(spec, request)


def run_once(spec: WorldSpec, request: Request) -> Verdict:
    """`run_world` for a caller that listens to signals itself, as restarts do between two worlds."""
    clear_failures(spec.run)
    clear_beats(spec.run)
    _note_status(spec.run, "starting", world_size=spec.num_processes, exit_code=None, cause="", **leader_identity())
    _adopt_orphans()
    world = _World(spec, request)
    try:
        world.run()
    finally:
        world.end_everything()
    report = world.report()
    verdict = judge_world(
        spec, report, stopped_by=request.stop_by, left_at_once=request.leave_now, killed_late=world.killed_late,
        hang=world.hang,
    )  # fmt: skip
    clear_beats(spec.run)
    write_end(spec.run, verdict)
    return verdict


class _World:
    """The child (a rank, or the agent of several), its output, and its deadlines."""

    def __init__(self, spec: WorldSpec, request: Request) -> None:
        self.spec = spec
        self.request = request
        self.killed_late = False
        self.hang: Hang | None = None
        self._watch = HangWatch(spec.run, spec.hang_after_s)
        self._code: int | None = None
        self._seen_alive = time.time()
        self._channels = open_channels(_descriptor(sys.stdout, 1), _descriptor(sys.stderr, 2))
        path = spec.run.logs / log_name(0)
        self._copies = [PlainCopy(path) for _ in self._channels]
        command = build_child_command(spec)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        self.child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._channels[0].child_end,
            stderr=self._channels[-1].child_end,
            env=build_environment(spec, count_usable_cores()),
            start_new_session=True,  # a Ctrl-C in the terminal is ours to pass on, once
        )
        self._copies[0].write_line(start_mark(0, self.child.pid))
        for channel in self._channels:
            channel.close_child_end()

    def run(self) -> None:
        """Until the child has ended and its output is read."""
        selector = selectors.DefaultSelector()
        for channel, copy in zip(self._channels, self._copies, strict=True):
            selector.register(channel.reader, selectors.EVENT_READ, (channel, copy))
        ended_at = None
        while True:
            moved = self._pump(selector, _LOOK_EVERY_S if ended_at is None else 0.02)
            if ended_at is None and not self._is_running():
                ended_at = time.monotonic()
            if ended_at is not None and (
                not selector.get_map() or (not moved and time.monotonic() - ended_at > _DRAIN_S)
            ):
                break
            self._answer_signals()
            self._look_for_hang()
        selector.close()

    def _pump(self, selector: selectors.BaseSelector, wait_s: float) -> bool:
        if not selector.get_map():
            time.sleep(wait_s)
            return False
        moved = False
        for key, _ in selector.select(wait_s):
            channel: Channel = key.data[0]
            copy: PlainCopy = key.data[1]
            data = channel.read()
            if data is None:
                selector.unregister(channel.reader)
                continue
            moved = True
            channel.pass_on(data)
            copy.add(data)
        return moved

    def _is_running(self) -> bool:
        now = time.time()
        self._code = self.child.poll()
        if self._code is None:
            self._seen_alive = now
        return self._code is None

    def _answer_signals(self) -> None:
        request = self.request
        if request.resized:
            request.resized = False
            for channel in self._channels:
                channel.copy_size()
        if self._code is not None:
            return
        if request.stop_by and not request.forwarded:
            request.forwarded = True
            self.child.send_signal(signal.SIGTERM)
        if request.leave_now:
            self._kill_all()
        elif request.stop_by and time.monotonic() - request.at > self.spec.stop_grace_s and not self.killed_late:
            self.killed_late = True
            self._kill_ranks()
        elif self.killed_late and time.monotonic() - request.at > self.spec.stop_grace_s + _AGENT_END_S:
            self._kill_all()

    def _look_for_hang(self) -> None:
        if self._code is not None or self.request.stop_by or self.hang:
            return
        hang = self._watch.look()
        if hang is not None:
            where = self._watch.write_stacks()
            self.hang = replace(hang, lines=(*hang.lines, f"  {where}"))
            self._kill_all()

    def _kill_ranks(self) -> None:
        """Only the ranks, so that the agent lives to tell who they were."""
        alone = not self.spec.has_agent
        for process in find_world(self.spec.token):
            if alone or process.pid != self.child.pid:
                _kill(process)

    def _kill_all(self) -> None:
        for process in find_world(self.spec.token):
            _kill(process)

    def end_everything(self) -> None:
        """Whatever happened: nobody of this world stays, and nothing of ours stays open."""
        if self.child.poll() is None:
            self._kill_all()
        self._code = self.child.wait()
        # Helpers of ranks (tokenisers, loaders) that outlived them.
        self._kill_all()
        for copy in self._copies:
            copy.close()
        for channel in self._channels:
            channel.close()

    def report(self) -> WorldReport:
        code = self._code if self._code is not None else 1
        if not self.spec.has_agent:
            by_us = self.request.forwarded or self.request.leave_now
            return WorldReport((RankExit(0, self.child.pid, code, self._seen_alive, by_us),))
        written = read_report(self.spec.report_path)
        if written is not None:
            return written
        ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return WorldReport((), f"torch's elastic agent (pid {self.child.pid}) {ending} and left no report")


def _descriptor(stream: Any, default: int) -> int:
    try:
        return int(stream.fileno())
    except (AttributeError, OSError, ValueError):  # replaced or closed, as test runners do
        return default


def find_world(token: str) -> list[Any]:
    """The living processes that this process's world consists of: our descendants that carry its token."""
    import psutil

    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(TOKEN) == token:
                found.append(process)
        except psutil.Error:
            continue
    return found


def _kill(process: Any) -> None:
    import psutil

    with contextlib.suppress(psutil.Error):
        process.kill()  # psutil refuses when the pid has become somebody else's


def _adopt_orphans() -> None:
    """Children of a rank that dies become ours, so that they can be found and ended."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextlib.contextmanager
def listen_to_signals(request: Request) -> Iterator[None]:
    """Stop requests are noted here and answered in the loop; a signal that is ignored (nohup) stays ignored."""

    def on_stop(number: int, frame: FrameType | None) -> None:
        if request.stop_by and number == signal.SIGINT:
            request.leave_now = True
        if not request.stop_by:
            request.stop_by = signal.Signals(number).name
            request.at = time.monotonic()

    def on_resize(number: int, frame: FrameType | None) -> None:
        request.resized = True

    handlers = {signal.SIGWINCH: on_resize}
    handlers |= dict.fromkeys((signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP), on_stop)
    before = {}
    for number, handler in handlers.items():
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def write_end(run: RunFolder, verdict: Verdict) -> None:
    state: State = "done" if verdict.exit_code == 0 else "stopped" if verdict.stopped else "failed"
    cause = verdict.lines[0] if verdict.lines else ""
    _note_status(run, state, exit_code=verdict.exit_code, cause=cause)


def _note_status(run: RunFolder, state: State, **changes: Any) -> None:
    try:
        update_status(run, state=state, **changes)
    except OSError as error:
        if state == "starting":
            raise WorkerFailed(
                f"cannot write {run.status}: {error.strerror or error}", fix="check the output folder"
            ) from None
        # At the end the run's own outcome matters more than a note that cannot be written.
        print(f"could not write {run.status}: {error.strerror or error}", file=sys.stderr)
