"""This machine's ranks of a world, each with its fixed place: all of them, or those of one node of several.

Used by supervise.py (one machine), nodes.py (several, by hand) and elastic.py (world after world). It starts ranks,
reaps them, forwards stop requests, and leaves no process behind. It judges nothing: callers read `watch.exits`.
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

from duoka.cluster.forks import ForkedRank, ForkServer
from duoka.cluster.launch import share_of_machine
from duoka.cluster.patience import StopPatience
from duoka.plan.hardware import count_usable_cores
from duoka.process.exits import (
    DRAIN_KILLED_S,
    DRAIN_S,
    DRAIN_SAVED_S,
    ENDED_BY_STOP,
    RESUME_ME,
    SIGTERM_S,
    ExitWatch,
)
from duoka.process.interpreter import python_module
from duoka.process.lifeline import JOINS, PARENT_PID, WORLD_TOKEN

# Variables of a launch, not of a rank: a rank's own child processes must not take themselves for nodes.
START_NAMES = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE", "MIN_NNODES", "MAX_NNODES",
               "MAX_RESTARTS", "RDZV_ID", "FORCE_TORCHRUN")  # fmt: skip
_PR_SET_CHILD_SUBREAPER = 36
_SUDDEN = (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS)  # not a consequence of another rank's exit
_LEAVING = (RESUME_ME, *ENDED_BY_STOP)  # while they were asked to


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
        host = f"[{self.master_addr}]" if ":" in self.master_addr else self.master_addr
        where = f"{host}:{self.master_port}"
        return f"node {self.node} of {self.num_nodes}: {ranks} of {self.size}, rendezvous at {where}"


class Ranks:
    """The processes, from their start to `close`. `look` is to be called every tenth of a second or so."""

    def __init__(
        self,
        place: RankPlace,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        patience: StopPatience | None = None,
        streams: tuple[int, int] = (1, 2),
        forks: ForkServer | None = None,
    ) -> None:
        self.place = place
        self.patience = patience  # from a stop request to SIGKILL; None: the caller times it
        self._failed_at = self._asked_at = self._ended_at = 0.0
        self._forks = forks
        self._token = forks.token if forks is not None else uuid.uuid4().hex
        self._processes: dict[int, subprocess.Popen[bytes] | ForkedRank] = {}
        adopt_orphans()
        try:
            for local in range(place.num_processes):
                own = {**env, **rank_environment(place, local), PARENT_PID: str(os.getpid()), WORLD_TOKEN: self._token}
                forked = forks.fork(command, own, streams) if forks is not None else None
                self._processes[place.first + local] = forked or _start(command, own, streams)
        except BaseException:  # a Ctrl-C too must leave no unsupervised rank behind; raised again
            for process in self._processes.values():
                process.kill()
                process.wait()
            raise
        self.watch = ExitWatch({rank: process.pid for rank, process in self._processes.items()})

    def look(self) -> bool:
        """Whether any rank still runs; the rest of a failed world is ended after a grace period."""
        self.watch.look()
        if not self.watch.running:
            return False
        now, failed = time.monotonic(), self.watch.first_failure
        if failed is not None and not self._failed_at and not (self._asked_at and failed.code in _LEAVING):
            self._failed_at = now
        if failed is not None and self._failed_at:
            # They notice the lost peer themselves and can record it; the reason of a kill is known only here.
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
        """A rank on another machine is lost: nothing can be saved, only recorded."""
        self._ended_at = self._ended_at or time.monotonic()

    def kill(self) -> None:
        """All at once, with the helpers that they started (tokenizers, loaders)."""
        for process in find_world(self._token, but=self._forks.pid if self._forks is not None else 0):
            with contextlib.suppress(psutil.Error):
                process.kill()  # psutil refuses when the pid was reused

    def close(self) -> None:
        """End and reap every process of this world."""
        self.watch.look()
        self.watch.send(signal.SIGKILL)
        for process in self._processes.values():
            process.wait()
        self.kill()


def find_world(token: str, but: int = 0) -> list[psutil.Process]:
    """The living processes of one world: our descendants that carry its token, but not the one that forks them."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.pid == but or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(WORLD_TOKEN) == token:
                found.append(process)
        except psutil.Error:
            continue
    return found


def adopt_orphans() -> None:
    """Children of a rank that dies become ours, so that they can be found and ended."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def node_environment(num_processes: int, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment of ranks on several nodes, beside their rank: they prepare the run folder themselves (JOINS)."""
    out = {name: value for name, value in env.items() if name not in START_NAMES}
    return share_of_machine(num_processes, count_usable_cores(), out) | {JOINS: "1"}


def rank_environment(place: RankPlace, local: int) -> dict[str, str]:
    """A rank's place, by the names that torch.distributed and its launchers know."""
    return {
        "RANK": str(place.first + local), "LOCAL_RANK": str(local), "GROUP_RANK": str(place.node),
        "WORLD_SIZE": str(place.size), "LOCAL_WORLD_SIZE": str(place.num_processes),
        "MASTER_ADDR": place.master_addr, "MASTER_PORT": str(place.master_port),
    }  # fmt: skip


def _start(command: Sequence[str], env: Mapping[str, str], streams: tuple[int, int]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*python_module("duoka.process.rank"), *command],
        stdin=subprocess.DEVNULL,
        stdout=streams[0],
        stderr=streams[1],
        env=env,
        start_new_session=True,  # a Ctrl-C in the terminal goes to the launcher, which forwards it once
    )
