"""Elastic rendezvous: which machines are here, which world begins, when it ends, and why.

A thread in the launcher of the one machine that owns the meeting's address; every launcher, that one too, is a member
over a connection (elastic.py), let in by admission.py. It starts no process. Its own end is the end of the run: the
same command goes on.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from duoka.cluster.admission import Admission
from duoka.cluster.blame import judge_world, last_step
from duoka.cluster.connection import Wire
from duoka.cluster.launch import WorldSpec, hold_free_port
from duoka.cluster.restart import FIRST_WAIT_S, LONGEST_WAIT_S, note_in_log, with_line
from duoka.cluster.supervise import write_end, write_start
from duoka.cluster.verdict import INTERRUPTED, Kind, Verdict, failed, stopped
from duoka.errors import StoppedEarly, StorageError
from duoka.process.exits import ENDED_BY_STOP, RankExit
from duoka.runs.events import log_size
from duoka.runs.failure import clear_failures, drop_reserved
from duoka.runs.folder import RunFolder, read_json
from duoka.runs.heart import clear_beats
from duoka.runs.stop_request import clear_stop_request, write_stop_request
from duoka.units import format_seconds

LAST_CALL_S = 5.0  # after the latest arrival, for those that were started at the same time
_LOOK_EVERY_S = 0.1
FAREWELL_S = 5.0
# What parsing a malformed message may raise: its sender is treated as lost.
_NONSENSE = (ArithmeticError, AttributeError, KeyError, TypeError, ValueError)


@dataclass(frozen=True)
class Rules:
    """The rendezvous settings typed on every machine: between `least` and `most` of them, at host:port."""

    least: int
    most: int
    host: str
    port: int
    wait_s: float = 1800.0  # for machines to come, at the start and after a loss
    restarts: int = 0  # how often ranks may fail while their machines stay

    @property
    def place(self) -> str:
        """As it is typed."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass
class Member:
    wire: Wire
    name: str
    order: tuple[int, int]
    is_host: bool
    leaving: str = ""  # the signal that asked for it
    exits: list[RankExit] | None = None  # of the world that is under way, once its ranks there have ended


@dataclass
class _World:
    number: int
    members: list[Member]
    spec: WorldSpec
    newcomers: list[Member]
    held_port: socket.socket
    lost: list[str] = field(default_factory=list)
    asked: bool = False  # all machines were told to save and leave
    cut: bool = False  # all machines were told that one is lost


class Meeting(threading.Thread):
    def __init__(
        self, listeners: Sequence[socket.socket], rules: Rules, run: RunFolder, num_processes: int,
        identity: Mapping[str, str], secret: str, counts: Sequence[int] = (),
    ) -> None:  # fmt: skip
        super().__init__(name="duoka-meeting", daemon=True)
        self.rules, self.run_folder, self.num_processes, self.identity = rules, run, num_processes, dict(identity)
        self._counts = sorted(counts) or range(rules.least, rules.most + 1)  # of machines that a world may have
        self.verdict: Verdict | None = None
        self._listeners, self._admission = listeners, Admission(listeners, secret)
        self._members: list[Member] = []
        self._world: _World | None = None
        self._number = self._num_arrived = self._num_failures = 0
        self._gathers_since = self._changed_at = time.monotonic()
        self._not_before, self._wait_s = 0.0, FIRST_WAIT_S
        self._before: Verdict | None = None  # the failure before
        self._stop_by = ""
        self._told_count = -1

    def run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                for listener in self._listeners:
                    selector.register(listener, selectors.EVENT_READ)
                while self.verdict is None:
                    selector.select(_LOOK_EVERY_S)
                    self.tend()
            deadline = time.monotonic() + FAREWELL_S
            while self._members and time.monotonic() < deadline:
                for member in list(self._members):
                    member.wire.take()
                    if member.wire.is_lost:
                        self._drop(member)
                time.sleep(_LOOK_EVERY_S / 5)
        finally:
            self._admission.close()
            for member in self._members:
                member.wire.close_now()

    def leave(self) -> None:
        """Its launcher ends: by then all machines have been told, or their broken connections tell them."""
        self.verdict = self.verdict or stopped(exit_code=INTERRUPTED)
        self.join()

    def tend(self) -> None:
        """One look at everything; never waits."""
        for wire, hello in self._admission.look():
            try:
                self._greet(wire, hello)
            except _NONSENSE:
                self._admission.part(wire)
        while self._admission.notes:
            self._tell_all(self._admission.notes.pop())
        for member in list(self._members):
            try:
                for message in member.wire.take():
                    self._hear(member, message)
            except _NONSENSE:
                member.wire.is_lost = True
            if member.wire.is_lost and member in self._members:
                self._lose(member)
        if self._world is not None:
            self._tend_world(self._world)
        else:
            self._gather()

    # --- members ---

    def _hear(self, member: Member, message: dict[str, Any]) -> None:
        world = self._world
        if "ended" in message and world is not None and message["ended"] == world.number and member in world.members:
            member.exits = _read_exits(message["exits"], world.members.index(member), self.num_processes)
        elif "leaving" in message:
            member.leaving = _plain(message["leaving"])
            if member.is_host:
                self._stop_by = member.leaving

    def _greet(self, wire: Wire, hello: dict[str, Any]) -> None:
        # The machine of the meeting comes first: rank 0, and the address where ranks meet, stay with it.
        is_host = hello["is_host"] is True
        order = (-1 if is_host else int(hello["wish"]), self._num_arrived + 1)
        member = Member(wire, _plain(hello["name"]), order, is_host)
        theirs = hello["identity"]
        differ = [
            f"{name} is {_plain(theirs.get(name))} on {member.name} and {value} on the machine of the meeting"
            for name, value in self.identity.items()
            if theirs.get(name) != value
        ]
        if differ:
            return self._refuse(member, "; ".join(differ))
        self._num_arrived += 1
        self._members.append(member)
        self._changed_at = time.monotonic()
        if self._world is not None or self._number:
            self._tell_all(f"{member.name} has joined")

    def _refuse(self, member: Member, why: str) -> None:
        member.wire.send(refused=why)
        self._tell_all(f"{member.name} was refused: {why}", but=member)
        if member in self._members:
            self._members.remove(member)
        self._admission.part(member.wire)

    def _lose(self, member: Member) -> None:
        self._drop(member)
        world = self._world
        if world is not None and member in world.members and member.exits is None:
            world.lost.append(member.name)
            self._tell_all(f"{member.name} is lost")

    def _drop(self, member: Member) -> None:
        self._members.remove(member)
        member.wire.close_now()

    def _tell_all(self, text: str, *, but: Member | None = None) -> None:
        for member in self._members:
            if member is not but:
                member.wire.send(say=text)

    # --- a world under way ---

    def _tend_world(self, world: _World) -> None:
        here = [member for member in world.members if member in self._members]
        is_stopping = world.asked or bool(self._stop_by)
        if (world.lost or any(_has_failed(member, is_stopping) for member in here)) and not world.cut:
            world.cut = True
            for member in here:
                member.wire.send(end=world.number)
        wanted = self._stop_by or any(member.leaving for member in here) or self._can_grow(world)
        if wanted and not world.asked and not world.cut:
            world.asked = True
            if self._stop_by:
                write_stop_request(self.run_folder, self._stop_by)
            for member in here:
                member.wire.send(stop=world.number)
        if all(member.exits is not None for member in here):
            self._close(world)

    def _can_grow(self, world: _World) -> bool:
        waiting = [one for one in self._members if not one.leaving and one not in world.members]
        is_larger = self._most_of(len(world.members) + len(waiting)) > len(world.members)
        return is_larger and time.monotonic() - self._changed_at > LAST_CALL_S

    def _most_of(self, num_here: int) -> int:
        """How many of them a world takes; 0: it needs more."""
        return max((count for count in self._counts if count <= num_here), default=0)

    def _close(self, world: _World) -> None:
        """All ranks have ended: the run's end, or another world."""
        world.held_port.close()
        self._world, self._gathers_since = None, time.monotonic()
        exits = sorted((one for member in world.members for one in member.exits or ()), key=lambda one: one.time)
        by = self._stop_by or ("SIGTERM" if world.asked else "")
        verdict = judge_world(world.spec, exits, stopped_by=by, left_at_once=False)
        drop_reserved(self.run_folder)
        if any(one.rank == 0 and one.code == 0 for one in exits) and (verdict.kind is Kind.DONE or self._is_complete()):
            return self._finish(Verdict(Kind.DONE))  # the result is complete; a failure after that changes nothing
        if self._stop_by and verdict.stopped:
            text = f"stopped by {self._stop_by}; the same command goes on"
            return self._finish(verdict if verdict.lines else stopped(text))
        if self._stop_by:
            return self._finish(verdict)
        step = last_step(self.run_folder, world.spec.log_from)
        if not (verdict.may_go_better or verdict.stopped or verdict.again):  # what a rank refused is refused again
            return self._refuse_newcomers(world, verdict, step) if world.newcomers else self._finish(verdict)
        if world.lost:
            return self._next(f"{' and '.join(world.lost)} left{_after(step)}; the others go on", step)
        if verdict.again:
            return self._next("\n".join(verdict.lines), verdict.step)
        if verdict.stopped and world.asked:
            leavers = " and ".join(member.name for member in world.members if member.leaving)
            text = f"{leavers} leaves on request" if leavers else "machines have joined"
            return self._next(f"{text}: a new world goes on{_after(step)}", step)
        if verdict.stopped:
            return self._finish(verdict)
        return self._try_again(verdict)

    def _is_complete(self) -> bool:
        """Whether rank 0, which has ended with exit code 0, says so; of a script nobody can know more than its code."""
        progress = read_json(self.run_folder.progress)
        return progress is None or progress.get("state") == "done"

    def _refuse_newcomers(self, world: _World, verdict: Verdict, step: int) -> None:
        """A machine with other data or libraries must not end the run of those that joined before it."""
        for member in world.newcomers:
            if member in self._members:
                self._refuse(member, "; ".join(line.strip() for line in verdict.lines))
        self._next("the others go on without it", step)

    def _try_again(self, verdict: Verdict) -> None:
        most, before = self.rules.restarts, self._before
        if verdict.is_same_failure(before):
            return self._finish(with_line(verdict, "the same failure at the same step twice: not started again"))
        if self._num_failures == most:
            more = f"all {most} restarts are used up" if most else "--restarts 3 would have gone on by itself"
            return self._finish(with_line(verdict, more))
        if before is not None and verdict.step > before.step:
            self._wait_s = FIRST_WAIT_S
        self._before, self._num_failures = verdict, self._num_failures + 1
        self._not_before = time.monotonic() + self._wait_s
        text = f"restart {self._num_failures} of {most} in {format_seconds(self._wait_s)}"
        self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)
        self._next("\n".join((*verdict.lines, f"  {text}")), verdict.step)

    def _next(self, text: str, step: int) -> None:
        self._tell_all(text)
        note_in_log(self.run_folder, text, step)
        with contextlib.suppress(StorageError):  # a disk that is full is said when the world begins
            write_start(self.run_folder)

    def _finish(self, verdict: Verdict) -> None:
        self.verdict = verdict
        write_end(self.run_folder, verdict)
        for member in self._members:
            member.wire.send(done=verdict.to_json())

    # --- between worlds ---

    def _gather(self) -> None:
        rules, now = self.rules, time.monotonic()
        if self._stop_by:
            text = f"stopped by {self._stop_by} between two worlds; the same command goes on"
            return self._finish(stopped(text))
        here = sorted((member for member in self._members if not member.leaving), key=lambda one: one.order)
        is_last_call = self._number == 0 and now - self._changed_at <= LAST_CALL_S
        if now < self._not_before or (is_last_call and len(here) < rules.most):
            return
        num_machines, least = self._most_of(len(here)), self._counts[0]
        if num_machines and any(member.is_host for member in here):
            return self._start(here[:num_machines])
        if now - self._gathers_since > rules.wait_s:
            what = f"{len(here)} of at least {least} machines joined within {format_seconds(rules.wait_s)}"
            fix = f"  start the same command on the others; the rendezvous is {rules.place}"
            return self._finish(failed(Kind.LAUNCHER_LOST, what, fix))
        if len(here) != self._told_count:
            self._told_count = len(here)
            self._tell_all(f"{len(here)} of at least {least} machines are here; waiting for the others")

    def _start(self, members: list[Member]) -> None:
        before = self._number
        self._number, self._told_count = before + 1, -1
        known = {member.name for member in members if member.exits is not None}
        for member in members:
            member.exits = None
        newcomers = [member for member in members if member.name not in known] if before else []
        try:
            clear_failures(self.run_folder)
            clear_stop_request(self.run_folder)
            clear_beats(self.run_folder)
        except OSError as error:
            what = f"{StorageError.title}: cannot write in {self.run_folder.logs}: {error.strerror or error}"
            return self._finish(Verdict(Kind.STORAGE, StorageError.exit_code, (what,)))
        port, held = hold_free_port()
        size = len(members) * self.num_processes
        spec = WorldSpec((), size, self.run_folder, num_restarts=before, log_from=log_size(self.run_folder))
        self._world = _World(self._number, members, spec, newcomers, held)
        names = ", ".join(member.name for member in members)
        self._tell_all(f"world {self._number}: {_count(len(members), 'machine')} ({names}), {_count(size, 'rank')}")
        for node, member in enumerate(members):
            member.wire.send(go=self._number, node=node, num_nodes=len(members), port=port)


def _has_failed(member: Member, is_stopping: bool) -> bool:
    good = (0, StoppedEarly.exit_code, *(ENDED_BY_STOP if is_stopping else ()))
    return any(one.code not in good for one in member.exits or ())


def _after(step: int) -> str:
    """Empty where the world had learned nothing yet: where the next one begins, it says itself."""
    return f" after step {step}" if step else ""


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _plain(value: object) -> str:
    """Another machine's name for itself, safe for a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(value))[:100]


def _read_exits(raw: list[dict[str, Any]], node: int, num_processes: int) -> list[RankExit]:
    """How the ranks of one machine ended: all of its own, and of no other."""
    exits = [
        RankExit(int(one["rank"]), int(one["pid"]), int(one["code"]), float(one["time"]), one["by_us"] is True)
        for one in raw
    ]
    if sorted(one.rank for one in exits) != list(range(node * num_processes, (node + 1) * num_processes)):
        raise ValueError("not the ranks of this machine")
    return exits
