"""Losses of preference pairs, as formulas: one function each, of what both answers of a pair got; none is a mean.

docs/preferences.md has them in mathematical form with their sources. Everything is float64, (pairs,).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from duoka.config.stages import PAIR_LOSSES, PairLossName, StageConfig


@dataclass(frozen=True)
class Answers:
    """One side of each pair. `logp` is what the loss sees, with LD-DPO's weights; `whole` counts all tokens alike."""

    logp: torch.Tensor
    whole: torch.Tensor
    count: torch.Tensor  # of target tokens
    reference: torch.Tensor  # `logp` at the run's start, with the same weights

    @property
    def mean(self) -> torch.Tensor:
        return self.logp / self.count

    @property
    def moved(self) -> torch.Tensor:
        """How much likelier the answer has become since the run began."""
        return self.logp - self.reference


@dataclass(frozen=True)
class PairSettings:
    """The block `stage:` with its defaults filled in."""

    loss: PairLossName
    beta: float
    smoothing: float
    gamma: float
    sft_weight: float
    sft_over_tokens: bool
    ld_alpha: float

    @classmethod
    def of(cls, stage: StageConfig) -> PairSettings:
        weight = PAIR_LOSSES[stage.pair_loss].sft_weight if stage.sft_weight is None else stage.sft_weight
        return cls(
            loss=stage.pair_loss,
            beta=0.1 if stage.beta is None else stage.beta,
            smoothing=stage.label_smoothing or 0.0,
            gamma=0.5 if stage.gamma is None else stage.gamma,
            sft_weight=weight,
            sft_over_tokens=stage.sft_mean == "tokens",
            ld_alpha=1.0 if stage.ld_alpha is None else stage.ld_alpha,
        )

    def sentence(self) -> str:
        """For a banner: the loss with every number that it reads."""
        parts = [f"{self.loss}, beta {self.beta:g}"]
        parts += [f"label smoothing {self.smoothing:g}"] if self.smoothing else []
        parts += [f"gamma {self.gamma:g}"] if self.loss == "simpo" else []
        parts += [f"tokens beyond the shorter answer count {self.ld_alpha:g}"] if self.ld_alpha != 1 else []
        over = "tokens" if self.sft_over_tokens else "answers"
        parts += [f"{self.sft_weight:g} x -log p of the better answer (mean over {over})"] if self.sft_weight else []
        return ", ".join(parts)


Loss = Callable[[Answers, Answers, PairSettings], torch.Tensor]


def pair_loss(chosen: Answers, rejected: Answers, settings: PairSettings) -> torch.Tensor:
    return _LOSSES[settings.loss](chosen, rejected, settings)


def reward(answers: Answers, settings: PairSettings) -> torch.Tensor:
    """What the loss takes an answer to be worth."""
    if not PAIR_LOSSES[settings.loss].has_reference:
        return settings.beta * (answers.logp if settings.loss == "cpo" else answers.mean)
    return settings.beta * (answers.moved / answers.count if settings.loss == "ipo" else answers.moved)


def _margin(chosen: Answers, rejected: Answers, settings: PairSettings) -> torch.Tensor:
    return settings.beta * (chosen.moved - rejected.moved)


def _sigmoid(chosen: Answers, rejected: Answers, settings: PairSettings) -> torch.Tensor:
    margin, share = _margin(chosen, rejected, settings), settings.smoothing
    return -(1 - share) * F.logsigmoid(margin) - share * F.logsigmoid(-margin)


def _robust(chosen: Answers, rejected: Answers, settings: PairSettings) -> torch.Tensor:
    margin, share = _margin(chosen, rejected, settings), settings.smoothing
    return (share * F.logsigmoid(-margin) - (1 - share) * F.logsigmoid(margin)) / (1 - 2 * share)


def _hinge(chosen: Answers, rejected: Answers, settings: PairSettings) -> torch.Tensor:
    return torch.relu(1 - _margin(chosen, rejected, settings))


def _ipo(chosen: Answers, rejected: Answers, settings: PairSettings) -> torch.Tensor:
    """Of means over tokens, as all trainers have it; the paper's sums grow with the answers' lengths."""
    return (chosen.moved / chosen.count - rejected.moved / rejected.count - 1 / (2 * settings.beta)) ** 2


def _apo_zero(chosen: Answers, rejected: Answers, settings: PairSettings) -> torch.Tensor:
    beta = settings.beta
    return 1 - torch.sigmoid(beta * chosen.moved) + torch.sigmoid(beta * rejected.moved)


def _apo_down(chosen: Answers, rejected: Answers, settings: PairSettings) -> torch.Tensor:
    return torch.sigmoid(settings.beta * chosen.moved) + 1 - torch.sigmoid(_margin(chosen, rejected, settings))


def _simpo(chosen: Answers, rejected: Answers, settings: PairSettings) -> torch.Tensor:
    return -F.logsigmoid(settings.beta * (chosen.mean - rejected.mean) - settings.gamma)


def _cpo(chosen: Answers, rejected: Answers, settings: PairSettings) -> torch.Tensor:
    return -F.logsigmoid(settings.beta * (chosen.logp - rejected.logp))


def _orpo(chosen: Answers, rejected: Answers, settings: PairSettings) -> torch.Tensor:
    """The odds ratio alone: -log p of the better answer is the term beside it."""
    odds = chosen.mean - rejected.mean - (_log_other(chosen.mean) - _log_other(rejected.mean))
    return -settings.beta * F.logsigmoid(odds)


_SUREST = -1e-12  # a mean log-probability of 0 would leave nothing to the other words, and log 0 is no number


def _log_other(logp: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(logp))."""
    return torch.log(-torch.expm1(logp.clamp(max=_SUREST)))


_LOSSES: dict[PairLossName, Loss] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "robust": _robust,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "simpo": _simpo,
    "cpo": _cpo,
    "orpo": _orpo,
}
