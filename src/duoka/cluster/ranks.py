"""This machine's ranks of a world, each with its fixed place: all of them, or those of one node of several.

Used by supervise.py (one machine), nodes.py (several, by hand) and elastic.py (world after world). It starts ranks,
sees them end, passes a request to stop on, and leaves nobody behind. It judges nothing: who asks reads `watch.exits`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from duoka.cluster.launch import python_module, share_of_machine
from duoka.cluster.patience import StopPatience
from duoka.cluster.probe import count_usable_cores
from duoka.process.exits import DRAIN_KILLED_S, DRAIN_S, DRAIN_SAVED_S, RESUME_ME, SIGTERM_S, ExitWatch
from duoka.process.lifeline import JOINS, PARENT_PID

# Variables that describe a start, not a rank: what a rank starts itself must not take itself for a node.
START_NAMES = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE", "MIN_NNODES", "MAX_NNODES",
               "MAX_RESTARTS", "RDZV_ID", "FORCE_TORCHRUN")  # fmt: skip
TOKEN = "DUOKA_WORLD"  # the same in every process of one world, so that only these are ever ended
_PR_SET_CHILD_SUBREAPER = 36
_SUDDEN = (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS)  # no consequence of another rank's end
_LEAVING = (RESUME_ME, -signal.SIGTERM, 128 + signal.SIGTERM)  # while they were asked to


@dataclass(frozen=True)
class RankPlace:
    """This machine among `num_nodes` that start `num_processes` ranks each."""

    node: int
    num_nodes: int
    num_processes: int
    master_addr: str
    master_port: int

    @property
    def size(self) -> int:
        return self.num_nodes * self.num_processes

    @property
    def first(self) -> int:
        return self.node * self.num_processes

    def __str__(self) -> str:
        last = self.first + self.num_processes - 1
        ranks = f"rank {last}" if self.num_processes == 1 else f"ranks {self.first} to {last}"
        where = f"{self.master_addr}:{self.master_port}"
        return f"node {self.node} of {self.num_nodes}: {ranks} of {self.size}, meeting at {where}"


class Ranks:
    """The processes, from their start to `close`. `look` is to be called every tenth of a second or so."""

    def __init__(
        self,
        place: RankPlace,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        patience: StopPatience | None = None,
        streams: tuple[int | None, int | None] = (None, None),
    ) -> None:
        self.place = place
        self.patience = patience  # with ranks that were asked to stop; None: whoever asked has it
        self._failed_at = self._asked_at = self._ended_at = 0.0
        self._token = uuid.uuid4().hex
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        _adopt_orphans()
        try:
            for local in range(place.num_processes):
                self._processes[place.first + local] = _start(
                    place, local, command, {**env, TOKEN: self._token}, streams
                )
        except BaseException:  # a Ctrl-C too must leave no rank behind that nobody watches yet; it goes on upwards
            for process in self._processes.values():
                process.kill()
                process.wait()
            raise
        self.watch = ExitWatch({rank: process.pid for rank, process in self._processes.items()})

    def look(self) -> bool:
        """Whether any rank still runs; the rest of a world that failed is ended in time."""
        self.watch.look()
        if not self.watch.running:
            return False
        now, failed = time.monotonic(), self.watch.first_failure
        if failed is not None and not self._failed_at and not (self._asked_at and failed.code in _LEAVING):
            self._failed_at = now
        if failed is not None and self._failed_at:
            # They notice the loss by themselves, and can say so; what a killed one died of, they cannot.
            is_killed = failed.code in _SUDDEN and not self._asked_at
            drain_s = DRAIN_KILLED_S if is_killed else DRAIN_SAVED_S if failed.code == RESUME_ME else DRAIN_S
            over_s = now - self._failed_at - drain_s
            if over_s > (0 if is_killed else SIGTERM_S):
                self.watch.send(signal.SIGKILL)
            elif over_s > 0:
                self.ask()
        if (self._ended_at and now - self._ended_at > DRAIN_S) or (
            self.patience and self._asked_at and self.patience.is_over(self._asked_at)
        ):
            self.watch.send(signal.SIGKILL)
        return True

    @property
    def is_asked(self) -> bool:
        return bool(self._asked_at)

    def ask(self) -> None:
        """SIGTERM, once: they save if they can, and leave."""
        if not self._asked_at:
            self._asked_at = time.monotonic()
            self.watch.send(signal.SIGTERM)

    def end(self) -> None:
        """A rank elsewhere is gone: there is nothing left to save, only to say."""
        self._ended_at = self._ended_at or time.monotonic()

    def kill(self) -> None:
        """All at once, with the helpers that they started (tokenizers, loaders)."""
        for process in find_world(self._token):
            with contextlib.suppress(psutil.Error):
                process.kill()  # psutil refuses when the pid has become somebody else's

    def close(self) -> None:
        """Nobody stays."""
        self.watch.look()
        self.watch.send(signal.SIGKILL)
        for process in self._processes.values():
            process.wait()
        self.kill()


def find_world(token: str) -> list[psutil.Process]:
    """The living processes of one world: our descendants that carry its token."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(TOKEN) == token:
                found.append(process)
        except psutil.Error:
            continue
    return found


def _adopt_orphans() -> None:
    """Children of a rank that dies become ours, so that they can be found and ended."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def node_environment(num_processes: int, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What ranks of a world of several nodes get beside their place: nobody prepares the run folder for them."""
    out = {name: value for name, value in env.items() if name not in START_NAMES}
    return share_of_machine(num_processes, count_usable_cores(), out) | {JOINS: "1"}


def rank_environment(place: RankPlace, local: int) -> dict[str, str]:
    """A rank's place, by the names that torch.distributed and its launchers know."""
    return {
        "RANK": str(place.first + local), "LOCAL_RANK": str(local), "GROUP_RANK": str(place.node),
        "WORLD_SIZE": str(place.size), "LOCAL_WORLD_SIZE": str(place.num_processes),
        "MASTER_ADDR": place.master_addr, "MASTER_PORT": str(place.master_port),
    }  # fmt: skip


def _start(
    place: RankPlace,
    local: int,
    command: Sequence[str],
    env: Mapping[str, str],
    streams: tuple[int | None, int | None],
) -> subprocess.Popen[bytes]:
    own = {**rank_environment(place, local), PARENT_PID: str(os.getpid())}
    return subprocess.Popen(
        [*python_module("duoka.process.rank"), *command],
        stdin=subprocess.DEVNULL,
        stdout=streams[0],
        stderr=streams[1],
        env={**env, **own},
        start_new_session=True,  # a Ctrl-C in the terminal is the launcher's to pass on, once
    )
