"""The optimizer of a run: groups by decay, fused where torch has it, its state by parameter name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from duoka.config.schema import OptimConfig
from duoka.optim.host import HostAdamW, host_state

_RATIO = "lr_ratio"  # of a group of parameters: its rate beside the schedule's


def build_optimizer(
    named: Mapping[str, torch.nn.Parameter], optim: OptimConfig, *, on_host: bool = False, b_lr_ratio: float = 1.0
) -> torch.optim.Optimizer:
    """AdamW, `on_host` with its state in host memory; matrices decay, norms and biases do not.

    Adapters' second matrices learn `b_lr_ratio` times as fast as all else.
    """
    fast = {id(p) for name, p in named.items() if b_lr_ratio != 1.0 and ".lora_B." in name}
    decay = optim.weight_decay
    groups: list[dict[str, Any]] = [
        {"params": [p for p in named.values() if p.ndim >= 2 and id(p) not in fast], "weight_decay": decay},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
        {"params": [p for p in named.values() if id(p) in fast], "weight_decay": decay, _RATIO: b_lr_ratio},
    ]
    make = HostAdamW if on_host else partial(torch.optim.AdamW, fused=True)
    return make(
        [group for group in groups if group["params"]],
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(_RATIO, 1.0)


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, named: Mapping[str, torch.nn.Parameter]
) -> dict[str, torch.Tensor]:
    """All state as `kind.parameter-name` -> tensor; what was never stepped is made first, as zeros."""
    _make_state(optimizer)
    return {
        f"{kind}.{name}": value
        for name, parameter in named.items()
        for kind, value in optimizer.state[parameter].items()
        if isinstance(value, torch.Tensor)
    }


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """A fresh AdamW has no state to load into: make it as its first step would."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if optimizer.state[parameter]:
                continue
            if isinstance(optimizer, HostAdamW):
                optimizer.state[parameter] = host_state(parameter)
            else:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }
