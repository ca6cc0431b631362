"""A run's event log, parsed for display: nulls stay nulls; truncated lines and discarded steps are dropped.

Reads files only; a run may be writing them at the same time.
"""

from __future__ import annotations

import bisect
import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from duoka.runs.events import global_log, read_events
from duoka.runs.folder import RunFolder, read_json
from duoka.runs.status import Status, read_status

PARTS = ("data", "forward", "backward", "wait", "optimizer", "checkpoint")
METRICS = ("accuracy", "margin", "reward_chosen", "reward_rejected")
_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True)
class LoggedStep:
    """One optimizer step, global numbers; None where the log has no number."""

    step: int
    epoch: float | None
    loss: float | None
    grad_norm: float | None
    lr: float | None
    num_tokens: float | None
    num_samples: float | None
    step_s: float | None
    memory_bytes: float | None
    times: Mapping[str, float]
    sent_bytes: float | None = None  # by rank 0, to the others
    metrics: Mapping[str, float | None] = field(default_factory=dict)  # of a stage that compares answers


@dataclass(frozen=True)
class RankTail:
    """A rank's last steps: where its time went, and the most memory it held."""

    rank: int
    memory_bytes: float | None
    times: Mapping[str, float]
    step_s: float


@dataclass
class History:
    """A run from its event log, after every resume. For a running run, apply events as they come."""

    run: RunFolder
    steps: list[LoggedStep] = field(default_factory=list)
    evals: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    resumes: list[int] = field(default_factory=list)
    traffic: dict[str, Any] = field(default_factory=dict)  # one step's collectives by kind
    held: list[dict[str, int]] = field(default_factory=list)  # by rank: bytes by part
    imbalance: str = ""
    facts: dict[str, Any] = field(default_factory=dict)  # of the run event
    end_reason: str = ""
    ranks: list[RankTail] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)
    env: dict[str, Any] = field(default_factory=dict)
    status: Status | None = None

    def apply(self, event: Mapping[str, Any]) -> None:
        """Take in the log's next event, as it was read or as it comes."""
        kind, step = event.get("type"), whole(event.get("step"))
        if kind == "step" and step is not None:
            self._put(_step(step, event))
        elif kind in ("run", "resume"):
            self.facts.update({key: value for key, value in event.items() if key not in ("v", "type", "t")})
            self.end_reason = ""
            if kind == "resume":
                self._drop_after(step or 0)
        elif kind == "eval":
            self.evals.append(dict(event))
        elif kind == "checkpoint":
            self.checkpoints.append(dict(event))
        elif kind == "traffic":
            self.traffic = dict(event)
        elif kind == "memory":
            self.held, self.imbalance = _held(event), str(event.get("imbalance") or "")
        elif kind == "warning":
            self.warnings.append(_warning(event))
        elif kind == "end":
            self.end_reason = str(event.get("reason") or "")

    def _put(self, step: LoggedStep) -> None:
        """Steps rise, each once: one that comes again, without a resume in between, counts as the later."""
        place = bisect.bisect_left(self.steps, step.step, key=lambda one: one.step)
        is_known = place < len(self.steps) and self.steps[place].step == step.step
        self.steps[place : place + is_known] = [step]

    def _drop_after(self, step: int) -> None:
        """A resume continues from `step`: later steps, lost in a crash, are dropped."""
        self.resumes.append(step)
        self.steps[:] = [one for one in self.steps if one.step <= step]
        for events in (self.evals, self.checkpoints):
            events[:] = [event for event in events if (whole(event.get("step")) or 0) <= step]

    @property
    def nonfinite(self) -> list[int]:
        """Steps whose loss was no finite number."""
        return [step.step for step in self.steps if step.loss is None]

    def values(self, name: str) -> tuple[list[float], list[float | None]]:
        """(steps, values) of one number, for a curve."""
        return [float(step.step) for step in self.steps], [getattr(step, name) for step in self.steps]

    def metric(self, name: str) -> tuple[list[float], list[float | None]]:
        """(steps, values) of one of METRICS."""
        return [float(step.step) for step in self.steps], [step.metrics.get(name) for step in self.steps]

    def total_s(self) -> float:
        return sum(step.step_s or 0.0 for step in self.steps)

    def tokens_per_s(self) -> float | None:
        """Tokens over seconds of all steps that know both: a mean of rates would favor the short steps."""
        known = [(step.num_tokens, step.step_s) for step in self.steps if step.num_tokens and step.step_s]
        seconds = sum(step_s for _, step_s in known)
        return sum(tokens for tokens, _ in known) / seconds if seconds > 0 else None

    def time_split(self) -> dict[str, float]:
        """Seconds by part, `other` included; empty when the log has no times."""
        parts = {name: sum(step.times.get(name, 0.0) for step in self.steps) for name in PARTS}
        blocked = sum(number(event.get("blocked_s")) or 0.0 for event in self.checkpoints)
        # A save happens between two steps, so its time is in its own event, not in a step's line.
        outside = blocked if not parts["checkpoint"] else 0.0
        other = self.total_s() - sum(parts.values())
        parts["checkpoint"] += outside
        if other > 0:
            parts["other"] = other
        return {name: seconds for name, seconds in parts.items() if seconds > 0}

    def sent_per_step(self) -> float | None:
        """The mean of what rank 0 sends in a step; None for a process alone."""
        known = [step.sent_bytes for step in self.steps if step.sent_bytes is not None]
        return sum(known) / len(known) if known else None

    def memory_measured(self) -> float | None:
        """The most that any rank held."""
        seen = [rank.memory_bytes for rank in self.ranks] + [step.memory_bytes for step in self.steps[-1:]]
        return max((size for size in seen if size), default=None)

    def speed_predicted(self) -> dict[str, float] | None:
        """Tokens per second of the plan: likely, and the range; None for a plan that knew no speed."""
        speed = self.plan.get("speed")
        if not isinstance(speed, dict):
            return None
        tokens = number(speed.get("tokens_per_step"))
        seconds = {name: number(speed.get(f"{name}_s")) for name in ("step", "low", "high")}
        if not tokens or not all(seconds.values()):
            return None
        return {name: tokens / (value or 1.0) for name, value in seconds.items()}

    def mfu(self) -> float | None:
        """MFU: the model's FLOPs per second as a share of the devices' peak; None where the peak is unknown."""
        compute, speed = self.plan.get("compute"), self.tokens_per_s()
        if not isinstance(compute, dict) or not speed:
            return None
        flops, peak = number(compute.get("flops_per_token")), number(compute.get("peak_flops"))
        return speed * flops / peak if flops and peak else None

    def memory_predicted(self) -> dict[str, float] | None:
        """peak, low and high of the plan, comparable with what was measured."""
        memory = self.plan.get("memory")
        if not isinstance(memory, dict):
            return None
        found = {name: number(memory.get(f"{name}_bytes")) for name in ("peak", "low", "high")}
        if any(value is None for value in found.values()):
            return None
        # On a GPU the allocator is measured, which does not count CUDA's own context.
        machine, parts = self.plan.get("machine"), memory.get("parts")
        unseen = 0.0
        if isinstance(machine, dict) and machine.get("device") == "cuda" and isinstance(parts, dict):
            unseen = number(parts.get("framework")) or 0.0
        return {name: max(0.0, (value or 0.0) - unseen) for name, value in found.items()}


def number(value: Any) -> float | None:
    """A finite number, or None for anything else that a log may hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def whole(value: Any) -> int | None:
    found = number(value)
    return None if found is None else int(found)


def read_history(run: RunFolder) -> History:
    """The whole history of a run; of an empty or unfinished one, as far as it goes."""
    history = History(run, plan=read_json(run.plan) or {}, env=read_json(run.env) or {}, status=read_status(run))
    for event in read_events(global_log(run)):
        history.apply(event)
    history.ranks = _read_ranks(run)
    return history


def _step(step: int, event: Mapping[str, Any]) -> LoggedStep:
    return LoggedStep(
        step=step,
        epoch=number(event.get("epoch")),
        loss=number(event.get("loss")),
        grad_norm=number(event.get("grad_norm")),
        lr=number(event.get("lr")),
        num_tokens=number(event.get("num_tokens")),
        num_samples=number(event.get("num_samples")),
        step_s=number(event.get("step_s")),
        memory_bytes=number(event.get("memory_bytes")),
        times=_times(event),
        sent_bytes=number(event.get("sent_bytes")),
        metrics={name: number(event[name]) for name in METRICS if name in event},
    )


def _times(event: Mapping[str, Any]) -> dict[str, float]:
    found = {name: number(event.get(f"{name}_s")) for name in PARTS}
    return {name: value for name, value in found.items() if value is not None and value > 0}


def _held(event: Mapping[str, Any]) -> list[dict[str, int]]:
    ranks = event.get("ranks")
    parts = ("weights", "gradients", "optimizer", "activations", "buffers", "host")
    rows = [one for one in ranks if isinstance(one, dict)] if isinstance(ranks, list) else []
    return [{part: whole(one.get(f"{part}_bytes")) or 0 for part in parts} for one in rows]


def _warning(event: Mapping[str, Any]) -> str:
    text = next((str(event[key]) for key in ("text", "what", "message") if event.get(key)), "")
    step = whole(event.get("step"))
    return f"step {step}: {text}" if step else text


def _read_ranks(run: RunFolder) -> list[RankTail]:
    paths = sorted(run.events.glob("rank*.jsonl")) if run.events.is_dir() else []
    tails = [_rank_tail(path) for path in paths]
    return sorted((tail for tail in tails if tail is not None), key=lambda tail: tail.rank)


def _rank_tail(path: Path) -> RankTail | None:
    """From the end of a rank's log: a whole world's logs would take too long to read."""
    events = [event for event in _tail_events(path) if event.get("type") == "rank"]
    rank = whole(events[-1].get("rank")) if events else None
    if rank is None:
        return None
    times = {name: sum(_times(event).get(name, 0.0) for event in events) for name in PARTS}
    memory = max((number(event.get("memory_bytes")) or 0.0 for event in events), default=0.0)
    return RankTail(rank, memory or None, times, sum(number(event.get("step_s")) or 0.0 for event in events))


def _tail_events(path: Path) -> Sequence[dict[str, Any]]:
    out: deque[dict[str, Any]] = deque()
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            size = file.tell()
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return []
    for line in lines[1:] if size > _TAIL_BYTES else lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            out.append(event)
    return list(out)
