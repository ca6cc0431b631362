"""Supervise one world of processes: start it, forward its output and the signals, reap it, leave no process behind.

`run_once` is called by restart.py in the process that a user started. It ends only processes that it started itself,
and returns what happened; blame.py finds the cause.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from duoka.cluster.blame import judge_world
from duoka.cluster.forks import ForkServer
from duoka.cluster.hang import Hang, HangWatch
from duoka.cluster.launch import WorldSpec, build_environment, hold_free_port
from duoka.cluster.passthrough import Channel, PlainCopy, open_channels
from duoka.cluster.patience import StopPatience
from duoka.cluster.ranks import RankPlace, Ranks
from duoka.cluster.verdict import Verdict
from duoka.errors import StorageError
from duoka.plan.hardware import count_oom_kills, count_usable_cores
from duoka.process.environ import LOOPBACK
from duoka.process.exits import STOP_SIGNALS
from duoka.process.no_room import disk_error, more_room
from duoka.process.rank import log_name, start_mark
from duoka.runs.events import log_size
from duoka.runs.failure import clear_failures, drop_reserved
from duoka.runs.folder import RunFolder
from duoka.runs.heart import ASK_FOR_STACKS, clear_beats
from duoka.runs.status import State, leader_identity, update_status
from duoka.runs.stop_request import clear_stop_request, write_stop_request

_LOOK_EVERY_S = 0.1
_DRAIN_S = 0.3  # for the output left in a pipe that another process keeps open


@dataclass
class Request:
    """What signals have asked of the launcher so far."""

    stop_by: str = ""  # the first signal's name
    at: float = 0.0
    leave_now: bool = False
    resized: bool = False
    stacks: bool = False  # wanted, of the ranks


def run_once(spec: WorldSpec, request: Request) -> Verdict:
    """Start the world, wait for its end, and say how it ended. Writes the run's status.

    The caller listens to signals, also between two worlds.
    """
    clear_failures(spec.run)
    clear_stop_request(spec.run)
    clear_beats(spec.run)
    spec = replace(spec, log_from=log_size(spec.run), oom_kills=count_oom_kills())
    write_start(spec.run, world_size=spec.num_processes)
    world = _World(spec, request)
    try:
        world.run()
    finally:
        world.end_everything()
    verdict = judge_world(
        spec, world.ranks.watch.exits, stopped_by=request.stop_by, left_at_once=request.leave_now,
        killed_late_s=world.killed_late_s, hang=world.hang,
    )  # fmt: skip
    clear_beats(spec.run)
    drop_reserved(spec.run)
    write_end(spec.run, verdict)
    return verdict


class _World:
    """The ranks, the output of the first one, and their deadlines."""

    def __init__(self, spec: WorldSpec, request: Request) -> None:
        self.spec = spec
        self.request = request
        self.killed_late_s = 0.0  # after the request to stop
        self.hang: Hang | None = None
        self._watch = HangWatch(spec.run, spec.hang_after_s)
        self._patience = StopPatience(spec.run, spec.stop_within_s)
        self._is_over = False
        self._channels = open_channels(_descriptor(sys.stdout, 1), _descriptor(sys.stderr, 2))
        path = spec.run.logs / log_name(0)
        self._copies = [PlainCopy(path) for _ in self._channels]
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        port, self._held_port = hold_free_port()
        place = RankPlace(0, 1, spec.num_processes, LOOPBACK, spec.port or port)
        self.ranks = Ranks(
            place, spec.command, build_environment(spec, count_usable_cores()),
            streams=(self._channels[0].child_end, self._channels[-1].child_end), forks=spec.forks,
        )  # fmt: skip
        self._copies[0].write_line(start_mark(0, self.ranks.watch.pids[0]))
        for channel in self._channels:
            channel.close_child_end()

    def run(self) -> None:
        """Until the ranks have ended and their output is read."""
        selector = selectors.DefaultSelector()
        for channel, copy in zip(self._channels, self._copies, strict=True):
            selector.register(channel.reader, selectors.EVENT_READ, (channel, copy))
        ended_at = None
        while True:
            moved = self._pump(selector, _LOOK_EVERY_S if ended_at is None else 0.02)
            self._is_over = self._is_over or not self.ranks.look()
            if ended_at is None and self._is_over:
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

    def _answer_signals(self) -> None:
        request = self.request
        if request.resized:
            request.resized = False
            for channel in self._channels:
                channel.copy_size()
        if self._is_over:
            return
        if request.stacks:
            request.stacks = False
            print(self._watch.write_stacks(), file=sys.stderr, flush=True)
        if request.stop_by and not self.ranks.is_asked:
            write_stop_request(self.spec.run, request.stop_by)
            self.ranks.ask()
        if request.leave_now:
            self.ranks.kill()
        elif request.stop_by and not self.killed_late_s and self._patience.is_over(request.at):
            self.killed_late_s = time.monotonic() - request.at
            self.ranks.kill()

    def _look_for_hang(self) -> None:
        if self._is_over or self.request.stop_by or self.hang:
            return
        left = [one.rank for one in self.ranks.watch.exits if one.code == 0]
        # A script of the user's own need not write heartbeats.
        hang = self._watch.look(left, self.ranks.watch.running if self.spec.resumes else None)
        if hang is not None:
            where = self._watch.write_stacks()
            self.hang = replace(hang, lines=(*hang.lines, f"  {where}"))
            self.ranks.kill()

    def end_everything(self) -> None:
        """In every case: no process of this world and no file of the launcher stays open."""
        self.ranks.close()
        self._held_port.close()
        for copy in self._copies:
            copy.close()
        for channel in self._channels:
            channel.close()


def _descriptor(stream: Any, default: int) -> int:
    try:
        return int(stream.fileno())
    except (AttributeError, OSError, ValueError):  # replaced or closed, as test runners do
        return default


@contextlib.contextmanager
def listen_to_signals(request: Request, forks: ForkServer | None = None) -> Iterator[None]:
    """What signals ask is noted here and answered in the loop; a signal that is ignored (nohup) stays ignored.

    The one that asks a rank for its stacks asks the launcher for those of all: it must not end the run.
    """
    if forks is not None:
        forks.is_hurried = lambda: bool(request.stop_by)

    def on_stop(number: int, frame: FrameType | None) -> None:
        if request.stop_by and number == signal.SIGINT:
            request.leave_now = True
        if not request.stop_by:
            request.stop_by = signal.Signals(number).name
            request.at = time.monotonic()

    def on_resize(number: int, frame: FrameType | None) -> None:
        request.resized = True

    def on_stacks(number: int, frame: FrameType | None) -> None:
        request.stacks = True

    handlers: dict[signal.Signals, Callable[[int, FrameType | None], None]] = {signal.SIGWINCH: on_resize}
    handlers |= {signal.Signals[ASK_FOR_STACKS]: on_stacks}
    handlers |= dict.fromkeys(STOP_SIGNALS, on_stop)
    before = {}
    for number, handler in handlers.items():
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def write_start(run: RunFolder, **facts: Any) -> None:
    """A world begins, or will: this process is the run's leader, and outlives the world's ranks."""
    _note_status(run, "starting", exit_code=None, cause="", **facts, **leader_identity())


def write_end(run: RunFolder, verdict: Verdict) -> None:
    state: State = "done" if verdict.exit_code == 0 else "stopped" if verdict.stopped else "failed"
    if state == "stopped" and not verdict.lines:  # rank 0 has recorded what requested it
        _note_status(run, state, exit_code=verdict.exit_code)
    else:
        _note_status(run, state, exit_code=verdict.exit_code, cause="\n".join(verdict.lines))


def _note_status(run: RunFolder, state: State, **changes: Any) -> None:
    try:
        update_status(run, state=state, **changes)
    except OSError as error:
        if state == "starting":
            fix = (
                f"{more_room(error)}, and the same command goes on" if disk_error(error) else "check the output folder"
            )
            raise StorageError(f"cannot write {run.status}: {error.strerror or error}", fix=fix) from None
        # At the end the run's own outcome matters more than a note that cannot be written.
        print(f"could not write {run.status}: {error.strerror or error}", file=sys.stderr)
