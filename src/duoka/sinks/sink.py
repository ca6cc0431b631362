"""The one protocol of everything that takes a run's numbers: the event log, the screen, TensorBoard, W&B, ...

A new one is a subclass that overrides what it cares for, in a file of its own here, and a row in config/trackers.py.
Sinks may raise: `Sinks` (fan_out.py) says each trouble once, and training goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunFacts:
    """What a sink is told when it is opened.

    `kept_steps`: steps of an earlier start that count; later ones were thrown away. `goes_on`: another start in the
    same folder goes on with the same run. `options` are a user's own, for the tracker's constructor.
    """

    name: str
    folder: Path
    total_steps: int = 0
    kept_steps: int = 0
    world_size: int = 1
    config: Mapping[str, Any] = field(default_factory=dict)
    project: str = "duoka"
    goes_on: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepNumbers:
    """One optimizer step. `numbers` are global (loss, grad_norm, lr, counts), `own` those of the rank that writes.

    `metrics` are what the stage measures beside its loss, global too.
    The recent ones are over the last steps together, for people: a single step's rate jumps about.
    """

    step: int
    numbers: Mapping[str, Any]
    own: Mapping[str, Any]
    tokens_per_s: float
    step_s: float
    memory_bytes: int
    recent_tokens_per_s: float
    recent_mfu: float | None
    eta_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)


class Sink:
    """Takes what it wants and passes over the rest. Called by one process of a run, in the order of events."""

    name = ""
    trouble = ""  # what is said before the reason when it raises: "X cannot be written"
    is_remote = False  # it may wait for a network: it runs in a thread of its own behind a queue (background.py)

    def open(self, facts: RunFacts, say: Callable[[str], None]) -> None:
        """Before the first number; `say` is for a line that people should see once."""

    def started(self, kind: str, step: int, facts: Mapping[str, Any]) -> None:
        """A start of the run (`kind` run) or another (`kind` resume), from `step` on."""

    def step(self, now: StepNumbers) -> None: ...

    def evaluated(self, step: int, values: Mapping[str, Any]) -> None: ...

    def samples(self, step: int, pairs: Sequence[tuple[str, str]]) -> None:
        """What the model makes of a few beginnings: (beginning, what follows)."""

    def event(self, type: str, step: int, values: Mapping[str, Any]) -> None:
        """Anything else that the event log knows: checkpoint, warning, memory, traffic, ..."""

    def scalars(self, values: Mapping[str, Any], step: int | None, options: Mapping[str, Any]) -> None:
        """Numbers (or texts, or numbers by name) with names of a user's own loop."""

    def say(self, text: str) -> None:
        """A line for people."""

    def ended(self, step: int, reason: str, exit_code: int, cause: str) -> None:
        """The run has come to its end (`reason` done) or was stopped."""

    def close(self) -> None:
        """No number comes after this; also called when the run failed."""

    @property
    def handle(self) -> Any:
        """The tracker's own object, for who wants more of it than this protocol has."""
        return None


class NotTaken(Exception):
    """Of values that a tracker cannot show; the others are there."""


def refuse_rest(values: Mapping[str, Any]) -> None:
    """Raised once the others are written: one value of an odd kind costs no other its place."""
    if values:
        kinds = ", ".join(f"{name!r} ({type(value).__name__})" for name, value in values.items())
        raise NotTaken(f"left out, as no number: {kinds}")


def as_number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


EVAL_NUMBERS = ("loss", "perplexity", "accuracy", "bits_per_byte", "margin", "reward_chosen", "reward_rejected")


def step_scalars(now: StepNumbers) -> dict[str, float]:
    """The curves of training, under the names that all trackers show."""
    numbers = {f"train/{key}": float(now.numbers[key]) for key in ("loss", "grad_norm", "lr")}
    metrics = {f"train/{name}": value for name, value in now.metrics.items()}
    return numbers | metrics | {"train/tokens_per_s": now.tokens_per_s}


def eval_scalars(values: Mapping[str, Any]) -> dict[str, float]:
    return {f"eval/{key}": values[key] for key in EVAL_NUMBERS if values.get(key) is not None}
