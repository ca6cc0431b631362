"""How a run stands at this moment, in one object: what `duoka top` draws, `duoka board` shows and alerts go by."""

from __future__ import annotations

import math
import socket
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from duoka.runs.status import is_alive
from duoka.watch.columns import number, whole
from duoka.watch.follow import FollowedRun
from duoka.watch.hints import Facts, Hint, find_hints
from duoka.watch.history import History, Note
from duoka.watch.ranks import RankTail, Slowest, find_slowest
from duoka.watch.spike import find_spike
from duoka.watch.stop_cause import cause_lines, has_died

RECENT = 50  # steps that speed, times and the shown loss are of
_STALL_FACTOR, _STALL_S = 5.0, 120.0
_CLOCKS_DIFFER_S = 60.0
_ENDED = ("done", "failed", "stopped", "dead")


@dataclass(frozen=True)
class Standing:
    """None where nothing is known."""

    name: str
    path: str
    state: str  # starting, running, stalled, silent, done, failed, stopped, dead, empty
    host: str
    cause: list[str]
    age_s: float  # since the last sign of life
    step: int
    total_steps: int
    eta_s: float | None
    loss: float | None
    loss_recent: float | None
    first_loss: float | None
    eval_loss: float | None
    grad_norm: float | None
    lr: float | None
    tokens_per_s: float | None
    predicted_tokens_per_s: float | None
    mfu: float | None
    num_tokens: float
    seconds: float  # of training, in steps that count
    cost: float | None
    num_restarts: int
    num_rollbacks: int
    num_lost: int
    world_size: int
    times: dict[str, float]  # seconds by part, of the recent steps
    memory: dict[str, float] = field(default_factory=dict)  # min, median, max of ranks, peak, low, high of the plan
    ranks: tuple[RankTail, ...] = ()
    ranks_per_node: int = 1
    slowest: Slowest | None = None
    notes: tuple[Note, ...] = ()
    hints: tuple[Hint, ...] = ()

    @property
    def is_over(self) -> bool:
        return self.state in _ENDED

    def to_json(self) -> dict[str, Any]:
        said = self.slowest.sentence() if self.slowest else None
        return {**asdict(self), "ranks": [tail.to_json() for tail in self.ranks], "slowest_says": said}


def read_standing(followed: FollowedRun, *, price_per_hour: float | None = None, num_notes: int = 50) -> Standing:
    """Of a run that has been caught up with. `price_per_hour`: of one device."""
    history = followed.history
    status, steps = history.status, history.steps
    last = steps[-1] if steps else None
    ranks = [] if followed.is_behind else followed.ranks()  # of a long log, the first look is at the log
    slowest = find_slowest(ranks)
    age_s = followed.age_s()
    state = find_state(history, age_s)
    total = whole(history.facts.get("total_steps")) or (status.total_steps if status else 0)
    step = last.step if last else status.step if status else 0
    memory = _memory(history, ranks)
    times = history.time_split(RECENT)
    ahead = followed.clock_ahead_s()
    may_tell = ahead > 0 or state == "running"  # a copied folder's files are younger than what is in them
    facts = Facts(
        state, age_s, times, memory, slowest, find_spike(steps), history.status,
        clock_ahead_s=ahead if abs(ahead) > _CLOCKS_DIFFER_S and may_tell else 0.0,
        num_nonfinite=history.num_nonfinite, num_ranks=len(ranks),
    )  # fmt: skip
    return Standing(
        name=history.run.name or history.run.path.resolve().name,
        path=str(history.run.path),
        state=state,
        host=status.host if status else "",
        cause=cause_lines(status),
        age_s=age_s,
        step=step,
        total_steps=total,
        eta_s=_eta_s(history, total - step) if state in ("running", "stalled", "silent") else None,
        loss=last.loss if last else None,
        loss_recent=_mean(steps.column("loss", RECENT)),
        first_loss=steps[0].loss if last else None,
        eval_loss=number(history.evals[-1].get("loss")) if history.evals else None,
        grad_norm=last.grad_norm if last else None,
        lr=last.lr if last else None,
        tokens_per_s=history.tokens_per_s(RECENT),
        predicted_tokens_per_s=(history.speed_predicted() or {}).get("step"),
        mfu=history.mfu(RECENT),
        num_tokens=steps.total("num_tokens"),
        seconds=history.total_s(),
        cost=_cost(history, price_per_hour),
        num_restarts=history.num_restarts,
        num_rollbacks=history.num_rollbacks,
        num_lost=history.num_lost,
        world_size=whole(history.facts.get("world_size")) or (status.world_size if status else 1),
        times=times,
        memory=memory,
        ranks=tuple(ranks),
        ranks_per_node=_ranks_per_node(history),
        slowest=slowest,
        notes=tuple(history.notes[-num_notes:]),
        hints=tuple(find_hints(facts)),
    )


def find_state(history: History, age_s: float) -> str:
    """The state that a run's files say, or that their silence does."""
    status = history.status
    if status is None:
        state = history.end_reason or ("running" if history.steps else "empty")
        return state if state in ("done", "running", "empty") else "stopped"
    if has_died(status):
        return "dead"
    if status.state == "running" and age_s > stall_s(history):
        elsewhere = status.host != socket.gethostname() or not status.pid
        return "stalled" if is_alive(status) or not elsewhere else "silent"
    return status.state


def stall_s(history: History) -> float:
    """The silence that is too long for this run."""
    seconds = [value for value in history.steps.column("step_s", RECENT) if value > 0]
    longest = max((number(event.get("write_s")) or 0.0 for event in history.checkpoints[-5:]), default=0.0)
    return max(_STALL_FACTOR * (statistics.median(seconds) if seconds else 0.0), _STALL_S, 2 * longest)


def _eta_s(history: History, num_left: int) -> float | None:
    seconds = [value for value in history.steps.column("step_s", RECENT) if value > 0]
    return num_left * sum(seconds) / len(seconds) if seconds and num_left >= 0 else None


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else None


def _cost(history: History, price_per_hour: float | None) -> float | None:
    costs = history.plan.get("costs")
    price = price_per_hour
    if price is None and isinstance(costs, dict):
        price = number(costs.get("price_per_hour"))
    if price is None:
        return None
    devices = whole(history.facts.get("world_size")) or 1
    machine = history.plan.get("machine")
    if isinstance(machine, dict) and machine.get("device") == "cpu":
        # Ranks share it: plans count one device a machine.
        devices = max(1, devices // _ranks_per_node(history))
    return price * devices * history.total_s() / 3600


def _memory(history: History, ranks: Sequence[RankTail]) -> dict[str, float]:
    sizes = [tail.memory_bytes for tail in ranks if tail.memory_bytes]
    found = dict(history.memory_predicted() or {})
    memory = history.plan.get("memory")
    available = number(memory.get("available_bytes")) if isinstance(memory, dict) else None
    if available:
        found["available"] = available
    if sizes:
        found |= {"min": min(sizes), "median": statistics.median(sizes), "max": max(sizes)}
    elif (measured := history.memory_measured()) is not None:
        found["max"] = measured
    return found


def _ranks_per_node(history: History) -> int:
    """By the cards of the machine that was planned for; without cards all ranks are of one."""
    machine = history.plan.get("machine")
    gpus = machine.get("gpus") if isinstance(machine, dict) else None
    size = whole(history.facts.get("world_size")) or 1
    return min(size, len(gpus)) if isinstance(gpus, list) and gpus else size
