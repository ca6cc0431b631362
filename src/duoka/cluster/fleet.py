"""`duoka train X --hosts a,b`: the part of every machine, started, shown and stopped from one terminal over ssh.

Called by cli/hosts.py. On each node `duoka train` runs with its place in the world and the rendezvous's address, as if
it had been typed there (elastic.py, meeting.py): restarts, stops and verdicts are theirs. Here: are the nodes fit and
alike, before anything starts; one connection to each (ssh.py), whose far end (tether.py) ends when this process does.
"""

from __future__ import annotations

import contextlib
import io
import ipaddress
import math
import os
import secrets
import shlex
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from duoka.cluster.fleet_check import check_nodes, check_shared
from duoka.cluster.launcher import Say
from duoka.cluster.one_voice import OneVoice
from duoka.cluster.passthrough import PlainCopy
from duoka.cluster.ssh import CONNECT_S, Connection, Reader, in_folder, ssh_command
from duoka.cluster.supervise import Request, listen_to_signals, write_end
from duoka.cluster.tether import code_digest, file_digest
from duoka.cluster.verdict import INTERRUPTED, KIND_OF_CODE, LEFT_AT_ONCE, Kind, Verdict, failed, stopped
from duoka.config.hosts import Host
from duoka.process.interface import address_towards
from duoka.process.interpreter import python_module
from duoka.process.rank import log_name
from duoka.runs.folder import RunFolder

# Of this terminal's environment, what the nodes get too. It travels inside the connection, not on a command line.
FORWARDED = (
    "DUOKA_", "OMP_NUM_THREADS", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "HF_", "TRANSFORMERS_", "TOKENIZERS_",
    "WANDB_", "MLFLOW_", "SWANLAB_", "TRACKIO_", "CUDA_VISIBLE_DEVICES", "NO_COLOR", "LANG", "LC_ALL", "ATEN_",
    "ONEDNN_", "MKL_",
)  # fmt: skip
NOT_FORWARDED = ("DUOKA_SSH", "DUOKA_LOGS", "DUOKA_PARENT_PID", "DUOKA_JOINS", "DUOKA_NUM_RESTARTS")
BEAT_EVERY_S = 2.0
GRACE_S = 10.0  # after a node has ended: the others hear the verdict from the rendezvous, and end by themselves
SAVE_S = 60.0  # from our SIGTERM, when the run cannot go on, until we hang up
FETCH_S = 120.0
_CLOSE_S = 12.0  # the far side ends within 10 s
CALL_BACK_EVERY_S = 10.0  # a machine that is lost, where the others go on without it
_LOOK_EVERY_S = 0.1
_DRAIN_S = 1.0


@dataclass(frozen=True)
class Fleet:
    """What is to run where."""

    hosts: Sequence[Host]
    arguments: tuple[str, ...]  # of duoka train: the config, and values of it
    config: Path
    run: RunFolder
    flags: tuple[str, ...] = ()  # --nproc, --restarts, --wait, as they were typed
    least: int = 0  # nodes without which it cannot go on; 0: all
    meet: tuple[str, int] | None = None  # the rendezvous; None: the first node, at a free port
    port: int = 0  # of the rendezvous; 0: a free one
    folder: str = field(default_factory=os.getcwd)

    @property
    def names(self) -> list[str]:
        return [str(host) for host in self.hosts]

    def command(self, meet: str) -> tuple[str, ...]:
        """The same on all nodes."""
        least = self.least or len(self.hosts)
        world = ("--nodes", f"{least}:{len(self.hosts)}", "--meet", meet)
        return python_module("duoka", "train", *self.arguments, *self.flags, *world)


def node_variables(host: Host, node: int, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    found = {name: value for name, value in env.items() if name.startswith(FORWARDED) and name not in NOT_FORWARDED}
    if host.devices:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, host.devices))
    return found | {"NODE_RANK": str(node)}


def run_fleet(fleet: Fleet, say: Say) -> Verdict:
    """Check the nodes, start, show, wait. Raises NodesUnfit before anything has started."""
    request = Request()
    with listen_to_signals(request):
        link = _Link(fleet, request)
        try:
            meet = link.agree()
            if meet is None:
                return _left_before(request)
            names = ", ".join(fleet.names)
            say(f"{len(fleet.hosts)} machines over ssh: {names}; the rendezvous is {meet}; logs: {fleet.run.logs}")
            link.start(meet)
            verdict = link.follow(say)
        finally:
            link.close()
    if not link.shares_folder:
        say(fetch_logs(fleet.hosts[0], fleet.folder, fleet.run))
    if link.shares_folder and verdict.kind is Kind.LOST_RANK and fleet.run.path.is_dir():
        write_end(fleet.run, verdict)  # the nodes that are left only know that they were stopped
    return verdict


def fetch_logs(host: Host, folder: str, run: RunFolder) -> str:
    """All ranks' logs into the run folder here; returns what to tell the user."""
    there = os.path.join(folder, run.path)
    script = f"cd -- {shlex.quote(there)} && exec tar -cf - logs"
    try:
        done = subprocess.run(ssh_command(host, script), capture_output=True, stdin=subprocess.DEVNULL, timeout=FETCH_S)
        run.logs.mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            for member in archive:
                file = archive.extractfile(member)  # None for folders and the like
                if file is not None:
                    (run.logs / Path(member.name).name).write_bytes(file.read())
    except (OSError, subprocess.SubprocessError, tarfile.TarError) as error:
        return f"the logs stay on {host}, in {there}/logs: {error}"
    return f"this machine does not share the run folder: {host} has it, as {there}; logs were copied to {run.logs}"


def _left_before(request: Request) -> Verdict:
    if request.leave_now:
        return stopped(LEFT_AT_ONCE, INTERRUPTED)
    return stopped(f"stopped by {request.stop_by} before anything was started")


class _Link:
    """All connections, from the first word to the last."""

    def __init__(self, fleet: Fleet, request: Request) -> None:
        self.fleet, self.request = fleet, request
        self.shares_folder = True  # whether this machine sees the nodes' run folder
        self._script = in_folder(fleet.folder, python_module("duoka.cluster.tether"))
        self._meet = ""
        self._call_at: dict[int, float] = {}  # when a machine that is lost is tried again
        self._called_at: dict[int, float] = {}
        self._lost: set[int] = set()  # and that has been said
        self.reader = Reader()
        self.nodes = [Connection(host, self._script) for host in fleet.hosts]
        for node in self.nodes:
            self.reader.add(node)
        self._ended: set[int] = set()
        self._cause: Verdict | None = None  # why the run cannot go on
        self._end_at = self._hang_up_at = self._beat_at = 0.0
        self._is_told = False
        self._errors = [b""] * len(self.nodes)  # the last words of each node's stderr
        self._copy: PlainCopy | None = None
        self.voice = OneVoice(fleet.names, _write)

    # --- before anything starts ---

    def agree(self) -> str | None:
        """The rendezvous's address, once all nodes are alike; None when a signal asked to stop."""
        fleet, mark = self.fleet, f".duoka-{secrets.token_hex(6)}"
        look = {"config": str(fleet.config), "run": os.path.join(fleet.folder, fleet.run.path)}
        asks: list[dict[str, Any]] = [{"look": {**look, "mark": "" if n else mark}} for n in range(len(self.nodes))]
        facts = check_nodes(self.nodes, self.reader, self.request, asks, code_digest(), file_digest(fleet.config))
        if facts is None:
            return None
        try:
            if not check_shared(self.nodes, self.reader, self.request, facts[0]):
                return None
            self.shares_folder = Path(facts[0]["mark"]).exists()
        finally:
            self.nodes[0].send({"forget": True})
        host, port = fleet.meet or (self._address(facts), fleet.port or int(facts[0]["port"]))
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _address(self, facts: Sequence[Mapping[str, Any]]) -> str:
        """By which the others reach the first node: where ssh has found it, or this machine, if it is this one."""
        found = str(facts[0]["address"])
        if len(facts) > 1 and (not found or ipaddress.ip_address(found.split("%")[0]).is_loopback):
            return address_towards(str(facts[1]["address"])) or found
        return found or self.fleet.hosts[0].name

    # --- the run ---

    def start(self, meet: str) -> None:
        self._meet = meet
        for number in range(len(self.nodes)):
            self._start_node(number)

    def _start_node(self, number: int) -> None:
        command = list(self.fleet.command(self._meet))
        env = node_variables(self.fleet.hosts[number], number)
        self.nodes[number].send({"run": {"command": command, "env": env}})

    def _call_back(self, now: float) -> None:
        """Machines that were lost: when one answers again, it joins the others, which have gone on meanwhile."""
        for number in [one for one, at in self._call_at.items() if now > at]:
            del self._call_at[number]
            if 0 in self._ended or self._cause is not None or self.request.stop_by:
                continue
            self.reader.drop(self.nodes[number])
            self.nodes[number].close(0)
            self.nodes[number] = Connection(self.fleet.hosts[number], self._script)
            self.reader.add(self.nodes[number])
            self._errors[number] = b""
            self._called_at[number] = now
            self._ended.discard(number)
            self._start_node(number)

    def follow(self, say: Say) -> Verdict:
        drained_at = 0.0
        while True:
            self._pump()
            now = time.monotonic()
            if now - self._beat_at > BEAT_EVERY_S:
                self._beat_at = now
                for node in self.nodes:
                    node.send()
            self._pass_signals()
            for number, node in enumerate(self.nodes):
                node.flush()
                if not node.look() and number not in self._ended:
                    self._ended.add(number)
                    self._note_end(number, say)
            self._call_back(now)
            self._end_the_rest(now)
            if len(self._ended) == len(self.nodes):
                drained_at = drained_at or now
                if self.reader.is_idle or now - drained_at > _DRAIN_S:
                    break
        self.voice.show(all_of_it=True)
        return self._verdict()

    def _pump(self) -> None:
        for node, stream, data in self.reader.read(_LOOK_EVERY_S):
            number = self.nodes.index(node)
            if self._is_calling(number):
                self._errors[number] = (self._errors[number] + data)[-2000:]
                continue
            if stream == 1:
                self._errors[number] = (self._errors[number] + data)[-2000:]
            if number == 0:
                self._record(stream, data)
            self.voice.add(number, stream, data)
        self.voice.show()

    def _is_calling(self, number: int) -> bool:
        """Whether what comes from there are ssh's words on another try; a connection that lasts ends that."""
        lasts = number not in self._ended and time.monotonic() - self._called_at.get(number, math.inf) > CONNECT_S
        if lasts:
            self._lost.discard(number)
        return number in self._lost

    def _record(self, stream: int, data: bytes) -> None:
        """Rank 0 prints into its launcher's terminal, which is this one; the other ranks write their own logs."""
        if self._copy is None and stream == 0:
            with contextlib.suppress(OSError):  # the screen shows it anyway
                self.fleet.run.logs.mkdir(parents=True, exist_ok=True)
                self._copy = PlainCopy(self.fleet.run.logs / log_name(0))
        if self._copy is not None:
            self._copy.add(data)

    def _pass_signals(self) -> None:
        if self.request.stop_by and not self._is_told:
            self._is_told = True
            # The first node owns the rendezvous: it asks all, and all save and leave together.
            self.nodes[0].send({"signal": self.request.stop_by})
        if self.request.leave_now and not self._hang_up_at:
            self._hang_up_at = time.monotonic() + 1
            for node in self.nodes:
                node.send({"kill": True})

    def _note_end(self, number: int, say: Say) -> None:
        node, name = self.nodes[number], self.fleet.names[number]
        left = len(self.nodes) - len(self._ended)
        if number == 0 and self._called_at:  # one that is on its way to the rendezvous would wait for it
            self._end_at = time.monotonic() + GRACE_S
        if node.code == 0 or self._cause is not None or self.request.stop_by:
            return
        can_go_on = number > 0 and left >= (self.fleet.least or len(self.nodes))
        if node.is_lost:
            text = f"{name} is lost: {_last_line(self._errors[number]) or 'the connection has ended'}"
            if can_go_on:
                self._call_at[number] = time.monotonic() + CALL_BACK_EVERY_S
                if number not in self._lost:
                    say(f"{text}; the others go on, and it joins them when it is back")
                self._lost.add(number)
                return
            fix = "  the same command goes on from the newest checkpoint, once all machines are there"
            self._cause = failed(Kind.LOST_RANK, text, fix, cause="connection lost")
            self._end_at = time.monotonic()
        elif not can_go_on:
            code = int(node.code or 0)
            kind = KIND_OF_CODE.get(code, Kind.WORKER_DIED)
            self._cause = Verdict(kind, code, cause=f"exit code {code} on {name}")
            self._end_at = time.monotonic() + GRACE_S

    def _end_the_rest(self, now: float) -> None:
        if self._end_at and now > self._end_at:
            self._end_at, self._hang_up_at = 0.0, now + SAVE_S
            for node in self.nodes:
                if node.look():
                    node.send({"signal": "SIGTERM"})
        if self._hang_up_at and now > self._hang_up_at:
            for node in self.nodes:
                node.hang_up()

    def _verdict(self) -> Verdict:
        if self.request.leave_now:
            return stopped(LEFT_AT_ONCE, INTERRUPTED)
        if self._cause is not None:
            return self._cause
        first = self.nodes[0]
        if first.is_lost:
            why = _last_line(self._errors[0]) or "the connection has ended"
            return failed(Kind.LOST_RANK, f"{self.fleet.names[0]} is lost: {why}", cause="connection lost")
        code = int(first.code or 0)
        return Verdict(KIND_OF_CODE.get(code, Kind.WORKER_DIED), code, cause=f"exit code {code}" if code else "")

    def close(self) -> None:
        for node in self.nodes:
            node.hang_up()
        until = time.monotonic() + _CLOSE_S
        for node in self.nodes:
            node.close(max(0.0, until - time.monotonic()))
        self.reader.close()
        if self._copy is not None:
            self._copy.close()


def _last_line(data: bytes) -> str:
    lines = [line.strip() for line in data.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _write(stream: int, data: bytes) -> None:
    """To our own stdout or stderr. A closed reader (a pager, a terminal) does not end the run."""
    target = sys.stderr if stream else sys.stdout
    with contextlib.suppress(OSError, ValueError):
        target.buffer.write(data)
        target.buffer.flush()
