"""The protocol of launchers: from a command to a supervised world of processes, on this machine or several.

choose.py knows them all; `duoka train` and `duoka launch` start one and print its verdict. Here: LocalLauncher
(restart.py), FixedNodes (nodes.py), ComingAndGoing (elastic.py). Another one is a file beside them with a class of this
shape, and a line in choose.py. Over ssh (fleet.py) and under Slurm (slurm.py) each node starts one of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from duoka.cluster.forks import ForkServer
from duoka.cluster.verdict import Verdict
from duoka.runs.folder import RunFolder

Say = Callable[[str], None]


@dataclass(frozen=True)
class Spec:
    """What is to run: `num_processes` times `command` on each machine, working in `run`."""

    command: tuple[str, ...]
    num_processes: int
    run: RunFolder
    env: Mapping[str, str] = field(default_factory=dict)  # beside what the launcher itself was started with
    restarts: int = 0  # how often ranks may fail
    resumes: bool = True  # the same command goes on where this one was stopped
    stop_within_s: float | None = None  # from a stop request until ranks are killed; None: auto, inf: never
    hang_after_s: float | None = None  # the silence that counts as a hang; None: auto, inf: never
    identity: Mapping[str, str] = field(default_factory=dict)  # what must be the same on all machines
    counts: tuple[int, ...] = ()  # numbers of machines that the config has a layout for; empty: any
    forks: ForkServer | None = None  # who starts ranks without importing all again; None: each is started by itself


class Launcher(Protocol):
    """Chosen from what was typed and from the environment, before the config is read."""

    @property
    def num_processes(self) -> int | None:
        """On this machine, as asked for; None: one per GPU."""

    @property
    def num_machines(self) -> int:
        """The most that take part."""

    @property
    def prepares(self) -> bool:
        """Whether this process prepares the run folder for all ranks; else rank 0 does, wherever it is."""

    @property
    def notes(self) -> tuple[str, ...]:
        """For the user."""

    def check(self) -> None:
        """Raise what is wrong with the start, before anything is prepared."""

    def start(self, spec: Spec, say: Say) -> Verdict:
        """Start the processes, wait for all of them, leave none behind, and return how they ended."""
