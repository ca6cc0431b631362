"""LARS and LAMB: each matrix moves by a share of its own length, which large batches bear better.

Norms are those of whole tensors, also where ranks hold parts; norms' and biases' vectors are not scaled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch

from duoka.optim.host import local_part
from duoka.optim.spread import norms_of

# LARS: a step is this share of the weight's length per unit of lr (You et al. 2017).
LARS_TRUST = 0.001


class _Layerwise(torch.optim.Optimizer, ABC):
    """What both share: settings by group, and a step over groups without gradients of its own."""

    def __init__(self, groups: Iterable[dict[str, Any]], **defaults: Any) -> None:
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            learning = [p for p in group["params"] if p.grad is not None]
            for parameter in learning:
                if not self.state[parameter]:
                    self.state[parameter] = self.fresh_state(parameter)
            if learning:
                self.step_group(group, learning)

    @abstractmethod
    def fresh_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """State before the first step."""

    @abstractmethod
    def step_group(self, group: dict[str, Any], learning: list[torch.Tensor]) -> None:
        """Move the parameters of one group that have gradients."""


class Lamb(_Layerwise):
    """Adam's direction, as long as the weight itself (You et al. 2020)."""

    def fresh_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "step": torch.zeros((), dtype=torch.float32),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }

    def step_group(self, group: dict[str, Any], learning: list[torch.Tensor]) -> None:
        beta1, beta2 = group["betas"]
        moves = []
        for parameter in learning:
            state, gradient = self.state[parameter], local_part(parameter.grad)
            state["step"] += 1
            step = float(state["step"])
            mean, square = local_part(state["exp_avg"]), local_part(state["exp_avg_sq"])
            mean.lerp_(gradient, 1 - beta1)
            square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            move = torch.zeros_like(parameter)
            own = (mean / (1 - beta1**step)) / ((square / (1 - beta2**step)).sqrt() + group["eps"])
            local_part(move).copy_(own.add_(local_part(parameter), alpha=group["weight_decay"]))
            moves.append(move)
        ratios = _ratios(learning, norms_of(learning), norms_of(moves))
        for parameter, move, ratio in zip(learning, moves, ratios, strict=True):
            local_part(parameter).add_(local_part(move), alpha=-group["lr"] * ratio)


class Lars(_Layerwise):
    """Momentum whose every addition is a small share of the weight's length (You et al. 2017)."""

    def fresh_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"momentum": torch.zeros_like(parameter)}

    def step_group(self, group: dict[str, Any], learning: list[torch.Tensor]) -> None:
        decay = group["weight_decay"]
        gradients = [p.grad for p in learning if p.grad is not None]
        lengths = norms_of(learning)
        ratios = _ratios(learning, LARS_TRUST * lengths, norms_of(gradients) + decay * lengths)
        for parameter, gradient, ratio in zip(learning, gradients, ratios, strict=True):
            own = local_part(parameter)
            move = local_part(gradient).add(own, alpha=decay)
            mean = local_part(self.state[parameter]["momentum"])
            mean.mul_(group["momentum"]).add_(move, alpha=group["lr"] * ratio)
            own.sub_(mean)


def _ratios(parameters: list[torch.Tensor], above: torch.Tensor, below: torch.Tensor) -> list[float]:
    """above / below for matrices; 1 for vectors, and where either is nothing."""
    pairs = zip(parameters, above.tolist(), below.tolist(), strict=True)
    return [a / b if p.ndim >= 2 and a > 0 and b > 0 else 1.0 for p, a, b in pairs]
