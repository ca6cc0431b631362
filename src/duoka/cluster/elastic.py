"""One machine's part in a run whose machines may leave and come back: `duoka train X --nodes 1:2 --meet HOST:PORT`.

Called by the command line on every machine. It starts and ends this machine's ranks as the meeting (meeting.py) says,
world after world, and reports how they ended. The machine that owns HOST also holds the meeting, beside its ranks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from duoka.cluster.connection import SECRET, Wire, is_proven, new_nonce, prove, read_secret, write_secret
from duoka.cluster.launch import ALLOW_LOOPBACK, find_port_owner, wait_for_name
from duoka.cluster.launcher import Say, Spec
from duoka.cluster.meeting import Meeting, Rules
from duoka.cluster.patience import StopPatience
from duoka.cluster.ranks import RankPlace, Ranks, node_environment
from duoka.cluster.run_lock import hold_meeting
from duoka.cluster.supervise import Request, listen_to_signals, write_end
from duoka.cluster.verdict import INTERRUPTED, LEFT_AT_ONCE, Kind, Verdict, stopped, verdict_of
from duoka.errors import ConfigError, DuokaError, StorageError, WorkerFailed
from duoka.process.interface import find_addresses, interface_environment, is_loopback, is_own_address
from duoka.process.lifeline import JOINS, QUIET
from duoka.process.rank import LOGS_FOLDER, NUM_RESTARTS
from duoka.units import format_seconds

RETURN_S = 60.0  # limit for reconnecting to the meeting after it was lost
FOREIGN_S = 90.0  # limit for retrying a peer that is not this run's meeting: a shared disk may be late with the secret
_LOOK_EVERY_S = 0.1
RETRY_EVERY_S = 0.5  # from one try to connect to the next
_CONNECT_S = 2.0
_NO_ADDRESS_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_NOT_OURS = "the peer there is no duoka rendezvous"


class MeetingLost(WorkerFailed):
    """The launcher that owns the rendezvous is gone, or was never reached."""


@dataclass(frozen=True)
class ComingAndGoing:
    """The launcher of one of several machines that find each other, and may leave and come back."""

    rules: Rules
    wish: int = 0  # the place among the machines that was asked for
    num_processes: int | None = None
    notes: tuple[str, ...] = ()
    prepares: bool = False

    @property
    def num_machines(self) -> int:
        return self.rules.most

    def check(self) -> None:
        """The meeting checks it: it compares the machines."""

    def start(self, spec: Spec, say: Say) -> Verdict:
        """Run until the run ends or this machine leaves."""
        try:
            return self._take_part(spec, say)
        except MeetingLost as error:
            return verdict_of(error, Kind.LAUNCHER_LOST)
        except DuokaError as error:
            return verdict_of(error)

    def _take_part(self, spec: Spec, say: Say) -> Verdict:
        run, rules, request = spec.run, self.rules, Request()
        run.make()
        with listen_to_signals(request, spec.forks), self._meet(spec, say, request) as meeting:
            hello = {
                "name": f"{socket.gethostname()}-{os.getpid()}", "identity": _identity(rules, spec),
                "is_host": meeting is not None, "wish": self.wish,
            }  # fmt: skip
            machine = Machine(rules, spec, hello, say, request)
            if meeting is not None:
                machine.is_meeting_well = lambda: meeting.is_alive() or meeting.verdict is not None
                say(f"this machine owns the rendezvous at {rules.place}; when it ends, the run ends")
            elif not request.stop_by:
                owner = find_owner_here(rules)
                where = f"held here, by {owner}" if owner else "on another machine"
                say(f"the rendezvous is {where}: {rules.place}")
            try:
                while (verdict := machine.look()) is None:
                    time.sleep(_LOOK_EVERY_S)
            finally:
                machine.close()
            if meeting is not None and meeting.verdict is None:  # left at once: the meeting has no verdict yet
                meeting.leave()
                write_end(run, verdict)
            return verdict

    @contextlib.contextmanager
    def _meet(self, spec: Spec, say: Say, request: Request) -> Iterator[Meeting | None]:
        """The meeting, where it is held here, once its address is known: a signal that comes before is obeyed too."""
        wait_for_name(self.rules.host, say, is_stopped=lambda: bool(request.stop_by))
        with contextlib.nullcontext() if request.stop_by else open_meeting(self.rules, spec) as meeting:
            yield meeting


def _identity(rules: Rules, spec: Spec) -> dict[str, str]:
    """What must be the same on all machines."""
    ours = {"--nproc": str(spec.num_processes), "--nodes": f"{rules.least}:{rules.most}"}
    return {**spec.identity, **ours}


@contextlib.contextmanager
def open_meeting(rules: Rules, spec: Spec) -> Iterator[Meeting | None]:
    """The meeting, on the machine that has the address; None on all others."""
    run = spec.run
    listeners = open_listeners(rules)
    if not listeners:
        yield None
        return
    with contextlib.ExitStack() as cleaning:
        for one in listeners:
            cleaning.callback(one.close)
        cleaning.enter_context(hold_meeting(run))
        try:
            secret = write_secret(run.path)
        except OSError as error:
            raise StorageError(f"cannot write in {run.path}: {error.strerror or error}") from None
        meeting = Meeting(listeners, rules, run, spec.num_processes, _identity(rules, spec), secret, spec.counts)
        meeting.start()
        try:
            yield meeting
        finally:
            meeting.leave()
            if read_secret(run.path) == secret:
                (run.path / SECRET).unlink(missing_ok=True)


def open_listeners(rules: Rules) -> list[socket.socket]:
    """At each address that the name has here: others may reach one of them alone. Empty on all other machines."""
    try:
        found = list(dict.fromkeys(find_addresses(rules.host)))
    except OSError as error:
        raise ConfigError(
            f"the rendezvous address is {rules.host}, which does not resolve: {error.strerror}",
            fix="write the address of one of them; hostname -I prints a machine's own",
        ) from None
    first = found[0][1][0]
    if is_loopback(first) and not os.environ.get(ALLOW_LOOPBACK):
        raise ConfigError(
            f"the rendezvous address is {rules.host}, which here is {first}: no other machine can connect to that",
            fix="write the machine's address in your network (hostname -I prints it), or mend the name in /etc/hosts",
        )
    listeners: list[socket.socket] = []
    for family, address in found:
        if is_loopback(address[0]) and not is_loopback(first):
            continue
        try:
            listeners.append(_listen(family, address, rules.port))
        except OSError as error:
            if error.errno in _NO_ADDRESS_HERE:  # a name may stand for more than this machine has
                continue
            for one in listeners:
                one.close()
            if error.errno == errno.EADDRINUSE:  # another launcher here owns the rendezvous already
                return []
            raise ConfigError(f"cannot listen at {rules.place}: {error.strerror}") from None
    return listeners


def find_owner_here(rules: Rules) -> str:
    """The process that has the rendezvous' port where its address is this machine's own; else empty."""
    return find_port_owner(rules.port) if is_own_address(rules.host) else ""


def _listen(family: socket.AddressFamily, address: tuple[Any, ...], port: int) -> socket.socket:
    """Raises OSError."""
    host, _, *scope = address
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port, *scope))
        listener.listen(64)
    except OSError:
        listener.close()
        raise
    return listener


@dataclass
class Machine:
    """This machine's side of the connection, and its ranks."""

    rules: Rules
    spec: Spec
    hello: dict[str, Any]
    say: Say
    request: Request
    wire: Wire | None = None
    ranks: Ranks | None = None
    world: int = 0
    was_there: bool = False
    told: bool = False
    nonces: tuple[str, str] = ("", "")
    is_welcome: bool = False  # on this connection: each side has shown the other that it knows the secret
    apart_since: float = field(default_factory=time.monotonic)
    foreign_since: float | None = None
    try_at: float = 0.0
    is_meeting_well: Callable[[], bool] = lambda: True

    def look(self) -> Verdict | None:
        """One poll of connection and ranks; the verdict once this machine's part has ended."""
        if self.request.leave_now:
            return stopped(LEFT_AT_ONCE, INTERRUPTED)
        if not self.is_meeting_well():
            raise RuntimeError("the rendezvous thread of this machine has ended by itself")
        if self.wire is None and (ended := self._connect()):
            return ended
        if self.wire is None:
            return None
        if self.request.stop_by and not self.told:
            if self.is_welcome:
                self.told = True
                self.wire.send(leaving=self.request.stop_by)
            if not (self.is_welcome and self.hello["is_host"]) and self.ranks is None:
                return self._left()
        for message in self.wire.take():
            ended = self._hear(message) if self.is_welcome else self._greet(message)
            if ended is not None:
                return ended
            if self.wire is None:
                return None
        if self.wire.is_lost:
            self._fall_apart()
            return None
        return self._look_at_ranks()

    def _connect(self) -> Verdict | None:
        if self.request.stop_by:
            return self._left()
        rules = self.rules
        if time.monotonic() < self.try_at:
            return None
        self.try_at = time.monotonic() + RETRY_EVERY_S
        try:
            connection = socket.create_connection((rules.host, rules.port), timeout=_CONNECT_S)
        except OSError as error:
            self._be_patient(error.strerror or str(error))
            return None
        if connection.getsockname() == connection.getpeername():  # a TCP self-connect: no listener there
            connection.close()
            return None
        self.wire, self.is_welcome = Wire(connection), False
        return None

    def _be_patient(self, why: str) -> None:
        """No connection yet, or not any more: raises after `wait_s` or RETURN_S."""
        rules, limit_s = self.rules, RETURN_S if self.was_there else self.rules.wait_s
        if time.monotonic() - self.apart_since < limit_s:
            return
        what = f"no rendezvous at {rules.place}"
        what = f"the rendezvous at {rules.place} did not come back" if self.was_there else what
        raise MeetingLost(
            f"{what} within {format_seconds(limit_s)}",
            where=why,
            fix="start the same command on the machine that has this address (hostname -I prints a machine's own), "
            "and here; the run goes on from the newest checkpoint",
        )

    def _greet(self, message: dict[str, Any]) -> Verdict | None:
        """Mutual authentication: no other message is obeyed before it."""
        assert self.wire is not None
        if "meeting" in message:
            self.nonces = (str(message["meeting"]), new_nonce())
            proof = prove(read_secret(self.spec.run.path), "machine", self.nonces)
            self.wire.send(hello=self.hello, nonce=self.nonces[1], proof=proof)
        elif is_proven(message.get("welcome"), read_secret(self.spec.run.path), "meeting", self.nonces):
            self.is_welcome, self.told, self.foreign_since = True, False, None
        else:
            known = message.get("unknown") is True
            self._drop_foreign("the rendezvous there is of another run" if known else _NOT_OURS)
        return None

    def _drop_foreign(self, why: str) -> None:
        """The peer is not this run's meeting, or not yet: retry until FOREIGN_S is over."""
        assert self.wire is not None
        self.wire.close_now()
        self.wire, now, place = None, time.monotonic(), self.rules.place
        if self.foreign_since is None:
            self.foreign_since = now
            self.say(f"{place}: {why}; trying again for {format_seconds(FOREIGN_S)}")
        elif now - self.foreign_since > FOREIGN_S:
            kind, owner = MeetingLost if self.was_there else ConfigError, find_owner_here(self.rules)
            taken = f"\nthe port is taken here by {owner}" if owner else ""
            raise kind(
                f"this machine cannot join at {place}: {why}",
                where=f"the rendezvous secret is read from {self.spec.run.path / SECRET}{taken}",
                fix="output: must be the same folder for all machines, on a disk that they share; another run needs a "
                "port of its own",
            )

    def _fall_apart(self) -> None:
        """The connection is lost, and no rank here can go on without the meeting."""
        assert self.wire is not None
        if not self.is_welcome and (self.wire.is_foreign or self.wire.is_silent):
            is_silent = not self.wire.is_foreign
            return self._drop_foreign("the peer there accepts and sends nothing" if is_silent else _NOT_OURS)
        self.wire.close_now()
        was_welcome, self.wire, self.is_welcome = self.is_welcome, None, False
        if was_welcome:
            text = f"the rendezvous at {self.rules.place} is lost: ending the ranks here, and"
            self.say(f"{text} trying to reconnect for {format_seconds(RETURN_S)}")
            self.apart_since = time.monotonic()
        else:  # a port forwarder, say, whose other end is down: it accepts and closes at once
            self._be_patient("the peer there closes each connection at once")
        self._end_ranks()

    def _hear(self, message: dict[str, Any]) -> Verdict | None:
        self.was_there = True
        if "say" in message:
            self.say(str(message["say"]))
        elif "go" in message:
            self._begin(message)
        elif "stop" in message and self.ranks is not None and message["stop"] == self.world:
            self.ranks.ask()
        elif "end" in message and self.ranks is not None and message["end"] == self.world:
            self.ranks.end()
        elif "done" in message:
            return Verdict.from_json(message["done"])
        elif "refused" in message:
            raise ConfigError(
                f"the rendezvous at {self.rules.place} refused this machine",
                where=str(message["refused"]),
                fix="all machines need the same command, YAML, data and versions",
            )
        return None

    def _begin(self, message: dict[str, Any]) -> None:
        self._end_ranks()
        self.world = int(message["go"])
        place = RankPlace(
            int(message["node"]),
            int(message["num_nodes"]),
            self.spec.num_processes,
            self.rules.host,
            int(message["port"]),
        )
        # Ranks write their failures to files; the meeting prints one cause for all machines.
        env = node_environment(self.spec.num_processes) | dict(self.spec.env) | {
            LOGS_FOLDER: str(self.spec.run.logs.resolve()), NUM_RESTARTS: str(self.world - 1), JOINS: QUIET,
        }  # fmt: skip
        env |= interface_environment(self.rules.host, env)
        patience = StopPatience(self.spec.run, self.spec.stop_within_s)
        if self.spec.forks is not None:
            self.spec.forks.is_hurried = self._waits_for_imports
        self.ranks = Ranks(place, self.spec.command, env, patience=patience, forks=self.spec.forks)
        if self.request.stop_by:
            self.ranks.ask()

    def _waits_for_imports(self) -> bool:
        """Torch on a busy disk takes longer to import than the meeting waits for a silent machine."""
        if self.wire is not None:
            self.wire.beat()
        return bool(self.request.stop_by)

    def _look_at_ranks(self) -> Verdict | None:
        if self.ranks is None or self.wire is None:
            return None
        if self.request.stop_by:
            self.ranks.ask()
        if self.ranks.look():
            return None
        exits = [asdict(one) for one in self.ranks.watch.exits]
        self.wire.send(ended=self.world, exits=exits)
        self._end_ranks()
        is_over = all(one["code"] == 0 for one in exits)
        return self._left() if self.request.stop_by and not self.hello["is_host"] and not is_over else None

    def _left(self) -> Verdict:
        text = f"stopped by {self.request.stop_by}: this machine has left; the same command joins again"
        return stopped(text)

    def _end_ranks(self) -> None:
        if self.ranks is not None:
            self.ranks.close()
            self.ranks = None

    def close(self) -> None:
        self._end_ranks()
        if self.wire is not None:
            self.wire.close()
            self.wire = None
