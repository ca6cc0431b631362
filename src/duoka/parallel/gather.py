"""From shards to whole tensors, for whoever writes a model that other programs read."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def gather_state(lm: torch.nn.Module, *, keep: bool) -> dict[str, torch.Tensor]:
    """The model's tensors in host memory by name; of adapters, only what was trained.

    All ranks call it; those with `keep` get the tensors. One is gathered at a time: no rank ever holds them all but
    the one that asked to.
    """
    adapters_only = hasattr(lm, "peft_config")
    state: dict[str, torch.Tensor] = {}
    made: dict[int, torch.Tensor] = {}
    for name, tensor in lm.state_dict(keep_vars=True).items():
        if adapters_only and not tensor.requires_grad:
            continue
        if id(tensor) not in made:
            whole = tensor.detach()
            whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
            made[id(tensor)] = whole.cpu() if keep else torch.empty(0)
        # Shared tensors stay shared, so that transformers finds tied heads and writes them once.
        state[name] = made[id(tensor)]
    return state if keep else {}
