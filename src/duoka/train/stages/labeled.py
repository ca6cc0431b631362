"""Stage kto: answers labeled good or bad, by the loss of Kahneman-Tversky Optimization (docs/preferences.md).

Its loss of an answer depends on z0: how much likelier the model of now finds answers to OTHER prompts than it did where
the run began, as the mean over the whole global batch. So each step begins with passes without gradients over these
mismatched pairs (parallel/look_ahead.py), and z0 is one number on all ranks before a loss is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from duoka.comm.world import World
from duoka.config.schema import RunConfig
from duoka.data.feed.answers import CHOSEN, PADDING, REJECTED
from duoka.data.feed.labeled import LabeledRows
from duoka.data.feed.loader import Batch, GlobalBatch
from duoka.data.prepare import PreparedData
from duoka.model.build import LossModel
from duoka.model.dropout import stop_dropout
from duoka.parallel.inputs import model_inputs
from duoka.parallel.measure import Measured, measure_objective
from duoka.parallel.objective import Sums
from duoka.train.stages.documents import count_targets, document_sums, reference_of
from duoka.train.stages.stage import Stage
from duoka.train.stages.start import check_start


@dataclass(frozen=True)
class _Answers:
    """Of a micro-batch, (answers,) float64 each. `moved`: how much likelier since the run began."""

    logp: torch.Tensor
    moved: torch.Tensor
    count: torch.Tensor  # of target tokens
    is_good: torch.Tensor

    @property
    def drift(self) -> torch.Tensor:
        """How far log-probabilities are from the reference, per token."""
        return (self.moved.abs() / self.count).sum()


class Labeled(Stage):
    """Mean loss of the answers of the global batch."""

    num_looked = 2  # of mismatched pairs: how much likelier they are, and their drift
    metrics: Mapping[str, str] = {
        "reward_chosen": "good",
        "reward_rejected": "bad",
        "logp_chosen": "good",
        "logp_rejected": "bad",
        "accuracy": "answers",
        "kl": "answers",
        "drift": "answers",
    }

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        stage = config.stage
        self.beta = 0.1 if stage.beta is None else stage.beta
        self.weights = stage.good_weight, stage.bad_weight
        self.z0, self.mismatched_drift = 0.0, 0.0  # of the step at hand
        self._is_good: np.ndarray | None = None

    def wrap(self, lm: torch.nn.Module, *, own_logits: bool = False) -> LossModel:
        stop_dropout(lm)  # what is dropped at random would count as a difference from the reference
        return LossModel(lm, own_logits=own_logits)

    def describe(self) -> str:
        good, bad = self.weights
        return f"beta {self.beta:g}, a good answer counts {good:g}, a bad one {bad:g}"

    def take_data(self, prepared: PreparedData) -> None:
        assert isinstance(prepared.train, LabeledRows)
        self._is_good = prepared.train.is_good

    def denominators(self, batch: GlobalBatch) -> Mapping[str, float]:
        answers = float(batch.num_samples)
        if self._is_good is None or not len(batch.sample_ids):  # without ids: a rehearsal, thrown away
            return {"answers": answers, "good": answers, "bad": answers}
        good = float(self._is_good[batch.sample_ids].sum())
        return {"answers": answers, "good": good, "bad": answers - good}

    def counts(self, micro: Batch) -> Mapping[str, float]:
        if micro.sides is None:
            return {"answers": 0.0}
        good, bad = (float((micro.sides == side).sum()) for side in (CHOSEN, REJECTED))
        return {"answers": good + bad, "good": good, "bad": bad}

    # --- a step ---

    def look(self, model: torch.nn.Module, micro: Batch, device: torch.device) -> torch.Tensor:
        other, nothing = micro.mismatched, torch.zeros(self.num_looked, dtype=torch.float64, device=device)
        if other is None:  # a rehearsal
            return nothing
        logps, _ = model(**model_inputs(other, device), answer="logps")
        if other.sides is None:  # a rank without answers
            return nothing
        answers = _answers(logps, other)
        return torch.stack([answers.moved.sum(), answers.drift])

    def has_looked(self, totals: Sequence[float], batch: GlobalBatch) -> None:
        moved, drift = (total / batch.num_samples for total in totals)
        self.z0, self.mismatched_drift = max(0.0, moved), drift

    def sums(self, model: torch.nn.Module, micro: Batch, device: torch.device) -> Sums:
        logps, _ = model(**model_inputs(micro, device), answer="logps")
        if micro.sides is None:  # a rank without answers, or a rehearsal
            return Sums({"answers": -logps.sum()})
        answers = _answers(logps, micro)
        with torch.no_grad():
            metrics = self._metrics(answers)
        return Sums({"answers": self._losses(answers, self.z0).sum()}, metrics)

    def _losses(self, answers: _Answers, z0: float) -> torch.Tensor:
        ahead = self.beta * (answers.moved - z0)
        good, bad = self.weights
        return torch.where(answers.is_good, good * torch.sigmoid(-ahead), bad * torch.sigmoid(ahead))

    def _metrics(self, answers: _Answers) -> Mapping[str, torch.Tensor]:
        good, bad = answers.is_good.double(), (~answers.is_good).double()
        reward = self.beta * answers.moved
        is_right = torch.where(answers.is_good, answers.moved > self.z0, answers.moved < self.z0)
        return {
            "reward_chosen": (reward * good).sum(),
            "reward_rejected": (reward * bad).sum(),
            "logp_chosen": (answers.logp * good).sum(),
            "logp_rejected": (answers.logp * bad).sum(),
            "accuracy": is_right.double().sum(),
            "kl": self.z0 * (good + bad).sum(),
            # Of own answers and of mismatched ones alike.
            "drift": (answers.drift + self.mismatched_drift * (good + bad).sum()) / 2,
        }

    def check_first(self, metrics: Mapping[str, float], precision: str) -> None:
        """At its first step nothing has moved: every loss is half its weight."""
        check_start(metrics["drift"], precision, f"z0 is {metrics['kl']:.3g}")

    # --- an evaluation ---

    def measure(
        self,
        model: torch.nn.Module,
        batches: Iterable[Batch],
        world: World,
        precision: str,
        is_stopped: Callable[[], bool],
        token_bytes: torch.Tensor | None,
    ) -> Measured | None:
        """The evaluation data is one batch: its z0 is the mean over all of it, so losses are computed at the end."""
        seen = _Seen(self)
        measured = measure_objective(seen, model, batches, world, precision, is_stopped)
        if measured is None:
            return None
        *totals, count = world.sum([*seen.looked, float(sum(len(one.moved) for one in seen.answers))])
        z0 = max(0.0, totals[0] / count) if count else 0.0
        own = [0.0, 0.0]
        for answers in seen.answers:
            right = torch.where(answers.is_good, answers.moved > z0, answers.moved < z0)
            own = [own[0] + float(self._losses(answers, z0).sum()), own[1] + float(right.sum())]
        loss, num_right = world.sum(own)
        accuracy = num_right / max(1.0, count)
        drift = ((measured.metrics or {})["drift"] + totals[1] / max(1.0, count)) / 2
        metrics = {**(measured.metrics or {}), "kl": z0, "accuracy": accuracy, "drift": drift}
        return replace(measured, loss=loss / max(1.0, count), accuracy=accuracy, metrics=metrics)


class _Seen:
    """What an evaluation measures of each micro-batch, kept as numbers until z0 is known."""

    def __init__(self, stage: Labeled) -> None:
        self.stage = stage
        self.metrics = stage.metrics
        self.answers: list[_Answers] = []
        self.looked = [0.0] * stage.num_looked

    def counts(self, micro: Batch) -> Mapping[str, float]:
        return self.stage.counts(micro)

    def sums(self, model: torch.nn.Module, micro: Batch, device: torch.device) -> Sums:
        found = self.stage.look(model, micro, device).tolist()
        self.looked = [total + own for total, own in zip(self.looked, found, strict=True)]
        logps, _ = model(**model_inputs(micro, device), answer="logps")
        if micro.sides is None:
            return Sums({"answers": -logps.sum()})
        answers = _answers(logps, micro)
        self.answers.append(_Answers(*(value.cpu() for value in vars(answers).values())))
        metrics = {**self.stage._metrics(answers), "drift": answers.drift}
        return Sums({"answers": torch.zeros(())}, metrics)


def _answers(logps: torch.Tensor, micro: Batch) -> _Answers:
    known = reference_of(micro)
    assert micro.sides is not None and known is not None
    at, device = (micro.sides != PADDING).nonzero().squeeze(1), logps.device
    own = document_sums(logps, micro)[at.to(device)]
    reference, count = known[at].to(device), count_targets(micro)[at].to(device)
    return _Answers(own, own - reference, count, (micro.sides[at] == CHOSEN).to(device))
