"""This machine's ranks of a world that several machines make up, each rank with its fixed place.

Used by nodes.py (one world, by hand) and elastic.py (world after world). It starts ranks, sees them end, passes a
request to stop on, and leaves nobody behind. It judges nothing: who asks reads `watch.exits`.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from duoka.cluster.launch import python_module, threads_per_process
from duoka.cluster.probe import count_usable_cores
from duoka.parallel.agent import must_end
from duoka.parallel.exits import DRAIN_S, DRAIN_SAVED_S, RESUME_ME, SIGTERM_S, ExitWatch
from duoka.parallel.lifeline import JOINS, PARENT_PID

# Variables that describe a start, not a rank: what a rank starts itself must not take itself for a node.
START_NAMES = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE", "MIN_NNODES", "MAX_NNODES",
               "MAX_RESTARTS", "RDZV_ID", "FORCE_TORCHRUN")  # fmt: skip


@dataclass(frozen=True)
class Place:
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
        self, place: Place, command: Sequence[str], env: Mapping[str, str] | None = None, grace_s: float = math.inf
    ) -> None:
        self.place = place
        self.grace_s = grace_s  # from a request to stop until what is left is killed
        self._failed_at = self._asked_at = self._ended_at = 0.0
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for local in range(place.num_processes):
                self._processes[place.first + local] = _start(place, local, command, env or {})
        except BaseException:
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
        if failed is not None and not self._failed_at and must_end(self.watch, bool(self._asked_at)):
            self._failed_at = now
        if failed is not None and self._failed_at:
            # They notice the loss by themselves, and can say so.
            over_s = now - self._failed_at - (DRAIN_SAVED_S if failed.code == RESUME_ME else DRAIN_S)
            if over_s > SIGTERM_S:
                self.watch.send(signal.SIGKILL)
            elif over_s > 0:
                self.ask()
        if (self._ended_at and now - self._ended_at > DRAIN_S) or (
            self._asked_at and now - self._asked_at > self.grace_s
        ):
            self.watch.send(signal.SIGKILL)
        return True

    def ask(self) -> None:
        """SIGTERM, once: they save if they can, and leave."""
        if not self._asked_at:
            self._asked_at = time.monotonic()
            self.watch.send(signal.SIGTERM)

    def end(self) -> None:
        """A rank elsewhere is gone: there is nothing left to save, only to say."""
        self._ended_at = self._ended_at or time.monotonic()

    def close(self) -> None:
        """Nobody stays."""
        self.watch.look()
        self.watch.send(signal.SIGKILL)
        for process in self._processes.values():
            process.wait()


def _start(place: Place, local: int, command: Sequence[str], more: Mapping[str, str]) -> subprocess.Popen[bytes]:
    env = {name: value for name, value in os.environ.items() if name not in START_NAMES}
    env.setdefault("OMP_NUM_THREADS", str(threads_per_process(count_usable_cores(), place.num_processes)))
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    env |= {
        "RANK": str(place.first + local), "LOCAL_RANK": str(local), "GROUP_RANK": str(place.node),
        "WORLD_SIZE": str(place.size), "LOCAL_WORLD_SIZE": str(place.num_processes),
        "MASTER_ADDR": place.master_addr, "MASTER_PORT": str(place.master_port), "PYTHONUNBUFFERED": "1",
        PARENT_PID: str(os.getpid()), JOINS: "1", **more,
    }  # fmt: skip
    words = [*python_module("duoka.parallel.rank"), *command]
    # A session of its own: a Ctrl-C in the terminal is the launcher's to pass on, once.
    return subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
