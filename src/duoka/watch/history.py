"""A run's event log, parsed for display: nulls stay nulls; truncated lines and discarded steps are dropped.

Reads files only; a run may be writing them at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from duoka.runs.events import global_log, read_events
from duoka.runs.folder import RunFolder, read_json
from duoka.runs.status import Status, read_status
from duoka.units import format_bytes, format_seconds
from duoka.watch.columns import PARTS, StepColumns, number, whole
from duoka.watch.ranks import RankTail, read_ranks

MOST_KEPT = 1000  # of each kind of event beside the steps, the newest: a log may warn at every step


@dataclass(frozen=True)
class Note:
    """Something that happened, beside steps. `t` is the training machine's clock."""

    kind: str
    step: int
    t: float | None
    text: str


@dataclass
class History:
    """A run from its event log, after every resume. For a running run, apply events as they come."""

    run: RunFolder
    steps: StepColumns = field(default_factory=StepColumns)
    evals: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)  # what happened, for a time line
    samples: list[dict[str, Any]] = field(default_factory=list)
    resumes: list[int] = field(default_factory=list)  # where it went on from, at another start or a rollback
    num_restarts: int = 0
    num_rollbacks: int = 0  # a start that went back by itself (faults.nonfinite)
    left_out: list[int] = field(default_factory=list)  # steps whose batch was not learned: loss or gradient no number
    num_lost: int = 0  # steps that a crash threw away
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
            self.steps.put(step, event)
            return
        self._note(str(kind), step, event)
        if kind in ("run", "resume"):
            self.facts.update({key: value for key, value in event.items() if key not in ("v", "type", "t")})
            self.end_reason = ""
            if kind == "resume" or self.steps:  # also once more from the beginning: nothing had been saved
                self._drop_after(step or 0)
                if kind == "resume" and event.get("reason"):  # only a rollback says one
                    self.num_rollbacks += 1
                else:
                    self.num_restarts += 1
        elif kind == "eval":
            self.evals.append(dict(event))
        elif kind == "checkpoint":
            self.checkpoints.append(dict(event))
        elif kind == "traffic":
            self.traffic = dict(event)
        elif kind == "memory":
            self.held, self.imbalance = _held(event), str(event.get("imbalance") or "")
        elif kind == "samples":
            self.samples.append(dict(event))
        elif kind == "warning":
            self.warnings.append(_warning(event))
            if event.get("nonfinite") and (step or 0) not in self.left_out[-1:]:  # it may be tried once more
                self.left_out.append(step or 0)
        elif kind == "end":
            self.end_reason = str(event.get("reason") or "")

        for kept in (self.evals, self.checkpoints, self.warnings, self.notes, self.samples, self.resumes):
            del kept[:-MOST_KEPT]

    def _note(self, kind: str, step: int | None, event: Mapping[str, Any]) -> None:
        if kind in _NOTED:
            last = self.steps[-1].step if self.steps else 0
            self.notes.append(Note(kind, last if step is None else step, number(event.get("t")), _words(kind, event)))

    def _drop_after(self, step: int) -> None:
        """A resume continues from `step`: later steps, lost in a crash, are dropped."""
        self.resumes.append(step)
        self.num_lost += self.steps.drop_after(step)
        for events in (self.evals, self.checkpoints, self.samples):
            events[:] = [event for event in events if (whole(event.get("step")) or 0) <= step]
        self.left_out = [one for one in self.left_out if one <= step]

    @property
    def nonfinite(self) -> list[int]:
        """Steps whose loss or gradient was no finite number: a run leaves these out, a loop of one's own logs them."""
        losses = self.steps.column("loss")
        logged = [step for step, loss in zip(self.steps.numbers(), losses, strict=True) if math.isnan(loss)]
        return sorted([*logged, *self.left_out])

    @property
    def num_nonfinite(self) -> int:
        return self.steps.num_missing("loss") + len(self.left_out)

    def values(self, name: str) -> tuple[list[float], list[float | None]]:
        """(steps, values) of one number, for a curve."""
        values = self.steps.column(name)
        return [float(step) for step in self.steps.numbers()], [None if math.isnan(v) else v for v in values]

    def total_s(self) -> float:
        return self.steps.total("step_s")

    def tokens_per_s(self, last: int | None = None) -> float | None:
        """Tokens over seconds of all steps that know both: a mean of rates would favor the short steps."""
        rows = zip(self.steps.column("num_tokens", last), self.steps.column("step_s", last), strict=True)
        known = [(tokens, step_s) for tokens, step_s in rows if tokens > 0 and step_s > 0]
        seconds = sum(step_s for _, step_s in known)
        return sum(tokens for tokens, _ in known) / seconds if seconds > 0 else None

    def time_split(self, last: int | None = None) -> dict[str, float]:
        """Seconds by part, `other` included; empty when the log has no times. `last`: of so many steps."""
        parts = {name: self.steps.total(f"{name}_s", last) for name in PARTS}
        first = self.steps[-min(last, len(self.steps))].step if last and self.steps else 0
        saves = [event for event in self.checkpoints if (whole(event.get("step")) or 0) >= first]
        blocked = sum(number(event.get("blocked_s")) or 0.0 for event in saves)
        # A save happens between two steps, so its time is in its own event, not in a step's line.
        outside = blocked if not parts["checkpoint"] else 0.0
        other = self.steps.total("step_s", last) - sum(parts.values())
        parts["checkpoint"] += outside
        if other > 0:
            parts["other"] = other
        return {name: seconds for name, seconds in parts.items() if seconds > 0}

    def sent_per_step(self) -> float | None:
        """The mean of what rank 0 sends in a step; None for a process alone."""
        sent = self.steps.column("sent_bytes")
        known = [size for size in sent if not math.isnan(size)]
        return sum(known) / len(known) if known else None

    def exchange_hidden(self) -> tuple[float, float] | None:
        """(seconds a step in which rank 0 exchanged, the share of them that its own work hid); None if not seen."""
        steps = zip(self.steps.column("exchanged_s"), self.steps.column("wait_s"), strict=True)
        seen = [(spent, waited) for spent, waited in steps if spent > 0 and not math.isnan(waited)][1:]  # the first:
        # connections are made and buckets laid out
        spent = sum(one for one, _ in seen)
        return (spent / len(seen), max(0.0, 1 - sum(one for _, one in seen) / spent)) if seen else None

    def memory_measured(self) -> float | None:
        """The most that any rank held."""
        seen = [rank.memory_bytes for rank in self.ranks] + [step.memory_bytes for step in self.steps[-1:]]
        return max((size for size in seen if size), default=None)

    def speed_predicted(self) -> dict[str, float] | None:
        """Tokens per second of the plan: likely, and the range; None for a plan that knew no speed, and where answers
        are drawn, whose time no plan counts."""
        speed = self.plan.get("speed")
        if not isinstance(speed, dict) or self.steps.total("rollouts_s"):
            return None
        tokens = number(speed.get("tokens_per_step"))
        seconds = {name: number(speed.get(f"{name}_s")) for name in ("step", "low", "high")}
        if not tokens or not all(seconds.values()):
            return None
        return {name: tokens / (value or 1.0) for name, value in seconds.items()}

    def mfu(self, last: int | None = None) -> float | None:
        """MFU: the model's FLOPs per second as a share of the devices' peak; None where the peak is unknown."""
        compute, speed = self.plan.get("compute"), self.tokens_per_s(last)
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


def read_history(run: RunFolder) -> History:
    """The whole history of a run; of an empty or unfinished one, as far as it goes."""
    history = History(run, plan=read_json(run.plan) or {}, env=read_json(run.env) or {}, status=read_status(run))
    for event in read_events(global_log(run)):
        history.apply(event)
    history.ranks = read_ranks(run, whole(history.facts.get("world_size")))
    return history


def _held(event: Mapping[str, Any]) -> list[dict[str, int]]:
    ranks = event.get("ranks")
    parts = ("weights", "gradients", "optimizer", "activations", "buffers", "host")
    rows = [one for one in ranks if isinstance(one, dict)] if isinstance(ranks, list) else []
    return [{part: whole(one.get(f"{part}_bytes")) or 0 for part in parts} for one in rows]


def _warning(event: Mapping[str, Any]) -> str:
    text = _words("warning", event)
    step = whole(event.get("step"))
    return f"step {step}: {text}" if step else text


_NOTED = ("run", "resume", "eval", "checkpoint", "warning", "end")


def _words(kind: str, event: Mapping[str, Any]) -> str:
    """What is worth reading of an event, beside its kind and step."""
    if kind == "eval":
        loss = number(event.get("loss"))
        return "loss not finite" if loss is None else f"loss {loss:.4f}"
    if kind == "checkpoint":
        size, blocked = number(event.get("size_bytes")), number(event.get("blocked_s"))
        parts = [str(event.get("path") or "")]
        parts += [format_bytes(size)] if size is not None else []
        parts += [f"held up {format_seconds(blocked)}"] if blocked is not None else []
        return ", ".join(part for part in parts if part)
    if kind == "warning":
        return next((str(event[key]) for key in ("text", "what", "message") if event.get(key)), "")
    if kind == "run":
        size = whole(event.get("world_size"))
        return f"{size} {'process' if size == 1 else 'processes'}" if size else ""
    return str(event.get("reason") or "")
