"""Adapters beside a mixture's experts: x W + scale (x A) B, of the rows that come to each expert.

PEFT adds scale A B to the weights of all experts, in the type that these have and anew in every pass, and finds
gradients of as many numbers as if all of them learned. Its modules stay: they hold the adapters, merge and save them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from duoka.model.expert_products import Adapter
from duoka.model.experts import ADAPTERS, computes_here
from duoka.model.head import here


def adapt_rows(adapted: torch.nn.Module) -> None:
    """Let adapters of experts work on rows, in place; those of other models' tensors stay as they are."""
    for module in adapted.modules():
        if getattr(module, "parameter_name", None) is not None and hasattr(module, "lora_A"):
            module.__class__ = _on_rows(type(module))  # type: ignore[arg-type]


@functools.cache
def _on_rows(kind: type) -> type:
    original = kind.forward  # type: ignore[attr-defined]

    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        experts, name = self.get_base_layer(), _only_adapter(self)
        if name is None or kwargs.get("adapter_names") is not None or not computes_here(experts):
            return original(self, x, *args, **kwargs)  # type: ignore[no-any-return]
        others = getattr(experts, ADAPTERS, {})
        setattr(experts, ADAPTERS, {**others, self.parameter_name: _read(self, name)})
        try:
            return self.base_layer(x, *args, **kwargs)  # type: ignore[no-any-return]
        finally:
            setattr(experts, ADAPTERS, others)

    return type(kind.__name__, (kind,), {"forward": forward})


def _only_adapter(wrapper: Any) -> str | None:
    """The name of the one adapter that is to be added; None: none, or several."""
    if wrapper.disable_adapters or wrapper.merged or wrapper.num_experts == 1:
        return None
    active = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
    return active[0] if len(active) == 1 else None


def _read(wrapper: Any, name: str) -> Adapter:
    a, b, count = here(wrapper.lora_A[name].weight), here(wrapper.lora_B[name].weight), wrapper.num_experts
    by_expert = b.view(b.shape[0], -1, count).permute(2, 1, 0)
    return Adapter(a.view(count, -1, a.shape[1]), by_expert, wrapper.scaling[name])
