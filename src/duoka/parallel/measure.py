"""The loss over a whole data set: sum over target tokens / target tokens, every sample once, on any number of ranks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from duoka.comm.world import World
from duoka.data.feed.ahead import prefetched
from duoka.data.feed.loader import IGNORED, Batch
from duoka.parallel.inputs import model_inputs
from duoka.parallel.objective import Sums
from duoka.parallel.precision import compute_in

_BATCHES_AHEAD = 2


@dataclass(frozen=True)
class Measured:
    """Global numbers; `accuracy` is the share of target tokens that are the likeliest token."""

    loss: float
    accuracy: float
    num_samples: int
    num_targets: int
    num_bytes: int | None = None  # of the text that the targets stand for; None: not counted
    metrics: Mapping[str, float] | None = None  # of a stage whose loss is not of single tokens; `accuracy` is its own

    @property
    def bits_per_byte(self) -> float | None:
        """The loss per byte of text, which no tokenizer changes; marks of documents cost bits and are no bytes."""
        return self.loss * self.num_targets / self.num_bytes / math.log(2) if self.num_bytes else None

    @property
    def perplexity(self) -> float | None:
        """None where the loss is not of single tokens."""
        if self.metrics is not None:
            return None
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def numbers(self) -> dict[str, Any]:
        """Everything, under the names of the event log."""
        known = asdict(self)
        metrics = known.pop("metrics") or {}
        return {**known, "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte, **metrics}


@torch.no_grad()
def measure_loss(
    model: torch.nn.Module,
    batches: Iterable[Batch],
    world: World,
    precision: str,
    is_stopped: Callable[[], bool] = lambda: False,
    token_bytes: torch.Tensor | None = None,
) -> Measured | None:
    """Measure `model` (the bare one: no gradient is exchanged) over this rank's batches; sums are global.

    `token_bytes` says how many bytes of text each token stands for. None when any rank was asked to stop on the way.
    """
    was_training = model.training
    model.eval()
    sums = [0.0, 0.0, 0.0, 0.0, 0.0]
    if world.device.type == "cuda":
        batches = map(Batch.pinned, batches)
    try:
        with contextlib.closing(prefetched(batches, _BATCHES_AHEAD)) as ahead:
            for micro in ahead:
                if is_stopped():
                    break
                world.heart.tell("evaluate")
                with compute_in(precision, world.device):
                    loss, correct = model(**model_inputs(micro, world.device))
                sums = [
                    sums[0] + float(loss),
                    sums[1] + float(correct),
                    sums[2] + micro.num_samples,
                    sums[3] + micro.num_targets,
                    sums[4] + _count_bytes(micro, token_bytes),
                ]
    finally:
        model.train(was_training)
    loss_sum, correct_sum, num_samples, num_targets, num_bytes, stopped = world.sum([*sums, float(is_stopped())])
    if stopped:
        return None
    if not num_targets:
        return Measured(math.nan, math.nan, int(num_samples), 0)
    counted = None if token_bytes is None else int(num_bytes)
    return Measured(loss_sum / num_targets, correct_sum / num_targets, int(num_samples), int(num_targets), counted)


class Measurable(Protocol):
    """An objective that also counts, of one micro-batch, what its sums are divided by."""

    @property
    def metrics(self) -> Mapping[str, str]: ...

    def counts(self, micro: Batch) -> Mapping[str, float]: ...

    def sums(self, model: torch.nn.Module, micro: Batch, device: torch.device) -> Sums: ...


@torch.no_grad()
def measure_objective(
    objective: Measurable,
    model: torch.nn.Module,
    batches: Iterable[Batch],
    world: World,
    precision: str,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Measured | None:
    """As `measure_loss`, of an objective's own loss and metrics, each a mean over all that there is to measure."""
    was_training = model.training
    model.eval()
    totals = dict.fromkeys(("samples", "targets", "stopped"), 0.0)
    try:
        with contextlib.closing(prefetched(batches, _BATCHES_AHEAD)) as ahead:
            for micro in ahead:
                if is_stopped():
                    break
                world.heart.tell("evaluate")
                with compute_in(precision, world.device):
                    sums = objective.sums(model, micro, world.device)
                found = {f"count {name}": count for name, count in objective.counts(micro).items()}
                found |= {f"loss {name}": float(value) for name, value in sums.losses.items()}
                found |= {f"metric {name}": float(value) for name, value in sums.metrics.items()}
                found |= {"samples": float(micro.num_samples), "targets": float(micro.num_targets)}
                for name, value in found.items():
                    totals[name] = totals.get(name, 0.0) + value
    finally:
        model.train(was_training)
    totals["stopped"] = float(is_stopped())
    whole: dict[str, float] = {}
    # A rank that measured nothing has no names of its own.
    for own in world.gather(totals):
        for name, value in own.items():
            whole[name] = whole.get(name, 0.0) + value
    if whole["stopped"]:
        return None

    def mean(kind: str, name: str, of: str) -> float:
        count = whole.get(f"count {of}", 0.0)
        return whole.get(f"{kind} {name}", 0.0) / count if count else math.nan

    losses = [name.removeprefix("loss ") for name in whole if name.startswith("loss ")]
    metrics = {name: mean("metric", name, of) for name, of in objective.metrics.items()}
    return Measured(
        loss=sum(mean("loss", name, name) for name in losses),
        accuracy=metrics.get("accuracy", math.nan),
        num_samples=int(whole["samples"]),
        num_targets=int(whole["targets"]),
        metrics=metrics,
    )


def _count_bytes(micro: Batch, token_bytes: torch.Tensor | None) -> int:
    return 0 if token_bytes is None else int(token_bytes[micro.labels[micro.labels != IGNORED]].sum())
