"""How many processes share the cores of a CPU: one with a thread on each, or several with fewer threads.

Threads wait for each other inside of every product, processes once a step for each other's gradients. Which costs more
depends on the model, the batch and the machine, so each number is planned. `--nproc auto` takes the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from duoka.config.schema import RunConfig
from duoka.errors import DuokaError
from duoka.plan.catalog import cluster_of
from duoka.plan.hardware import Machine
from duoka.plan.lengths import Lengths
from duoka.plan.report import make_plan
from duoka.plan.shape import ModelShape

# Each further process starts, holds a model and saves: what it gains must be more than what a plan cannot tell apart.
WORTH = 1.03


@dataclass(frozen=True)
class Division:
    """One way to share the cores, as planned."""

    num_processes: int
    num_threads: int  # of each process
    tokens_per_s: float

    def __str__(self) -> str:
        processes = "1 process" if self.num_processes == 1 else f"{self.num_processes} processes"
        return f"{processes} of {self.num_threads} thread{'s' if self.num_threads > 1 else ''}"


@dataclass(frozen=True)
class Processes:
    """The answer of `--nproc auto`, and why."""

    count: int
    why: str


def choose_processes(
    config: RunConfig,
    shape: ModelShape,
    machine: Machine,
    lengths: Lengths | None = None,
    measured: Mapping[str, Any] | None = None,
) -> Processes:
    """One process per GPU; on a CPU the number that is planned fastest, the smallest of those that are nearly so.

    `measured`: what `duoka bench hardware` found. Without it nothing is known of what threads lose.
    """
    if machine.gpus:
        return Processes(len(machine.gpus), "one per GPU")
    found = divisions(config, shape, machine, lengths, measured)
    if not found:
        return Processes(1, "this run fits no number of processes here, and one will say why")
    best = max(one.tokens_per_s for one in found)
    chosen = next(one for one in found if one.tokens_per_s * WORTH >= best)
    why = f"{chosen}: {chosen.tokens_per_s:,.0f} tokens/s planned"
    if others := [f"{one}: {one.tokens_per_s:,.0f}" for one in found if one is not chosen]:
        why += f" ({', '.join(others)})"
    if not cluster_of(machine, 1, 1, measured).is_measured:
        why += "; threads are planned as if they lost nothing: duoka bench hardware measures it"
    return Processes(chosen.num_processes, why)


def divisions(
    config: RunConfig,
    shape: ModelShape,
    machine: Machine,
    lengths: Lengths | None = None,
    measured: Mapping[str, Any] | None = None,
) -> Sequence[Division]:
    """All that can train this run and fit, from one process on; OMP_NUM_THREADS, where it is set, stays."""
    found = []
    # Other numbers leave cores idle, or give ranks threads that wait for others' cores.
    for count in (one for one in range(1, machine.num_cores + 1) if machine.num_cores % one == 0):
        threads = machine.threads_per_rank or machine.num_cores // count
        cluster = cluster_of(machine, 1, count, measured)
        try:
            plan = make_plan(config, shape, machine, count, lengths=lengths, cluster=cluster)
        except DuokaError:  # axes that need another number, a batch of fewer samples
            plan = None
        if plan is not None and plan.verdict != "does not fit":
            found.append(Division(count, threads, plan.speed.tokens_per_s))
    return found
