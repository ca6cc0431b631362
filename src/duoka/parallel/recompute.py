"""Activations computed again in the backward pass instead of kept: of whole layers, or of what is cheap to redo."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from duoka.model.attention import kernel_packets

# Matrix products and attention make up nearly all of a layer's work; norms, rotations and activations nearly all of
# its memory.
_KEPT_NAMES = (
    "mm", "addmm", "bmm", "linear",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math",
)  # fmt: skip


@functools.cache
def _kept_operators() -> frozenset[Any]:
    """Every overload of them, and of the kernel that takes packed rows: it is no operator of aten."""
    packets = [packet for name in _KEPT_NAMES if (packet := getattr(torch.ops.aten, name, None)) is not None]
    return frozenset(getattr(packet, kind) for packet in (*packets, *kernel_packets()) for kind in packet.overloads())


def apply_recompute(lm: torch.nn.Module, how: str) -> None:
    """full: keep only each layer's input. selective: keep also what its products and its attention give."""
    options: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        options["context_fn"] = _selective_contexts
    lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)  # type: ignore[operator]


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_keep_products)


def _keep_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _kept_operators() else CheckpointPolicy.PREFER_RECOMPUTE
