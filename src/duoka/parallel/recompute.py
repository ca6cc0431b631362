"""Activations computed again in the backward pass instead of kept: of all layers, of some, or what is cheap to redo."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts, noop_context_fn

from duoka.errors import ConfigError
from duoka.model.attention import kernel_packets
from duoka.model.documents import reading_again
from duoka.model.dropout import Drops
from duoka.model.layers import find_layers
from duoka.model.own_states import asks_what_is_read
from duoka.plan.recompute import is_share, whole_layers

# Matrix products and attention make up nearly all of a layer's work; norms, rotations and activations nearly all of
# its memory.
_KEPT_NAMES = (
    "mm", "addmm", "bmm", "linear", "_scaled_mm",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math",
)  # fmt: skip


@functools.cache
def _kept_operators() -> frozenset[Any]:
    """Every overload of them, and of the kernel that takes packed rows: it is no operator of aten."""
    packets = [packet for name in _KEPT_NAMES if (packet := getattr(torch.ops.aten, name, None)) is not None]
    return frozenset(getattr(packet, kind) for packet in (*packets, *kernel_packets()) for kind in packet.overloads())


def apply_recompute(lm: torch.nn.Module, how: str, drops: Drops | None = None, *, compiled: bool = False) -> None:
    """full: keep only each layer's input; 1/2: of every second layer only. selective: keep also what a layer's products
    and its attention give.

    With `drops`, what is computed again drops what it dropped before. Layers that are `compiled` take their checkpoint
    in, and torch compiles no contexts but its own: what autocast casts there is the graph's.
    """
    find_contexts = _selective_contexts if how == "selective" else noop_context_fn
    options: dict[str, Any] = {"use_reentrant": False}
    if drops is not None or not compiled or asks_what_is_read(lm):
        again = None if drops is None else drops.again
        options["context_fn"] = functools.partial(_contexts, again, find_contexts)
    elif how == "selective":
        options["context_fn"] = find_contexts
    # Named so since transformers 5.23; the older name warns, and goes with version 6.
    enable: Any = getattr(lm, "activation_checkpointing_enable", None) or lm.gradient_checkpointing_enable
    enable(options)
    # With it, transformers has gradients go down to the embeddings: through frozen layers too, for nobody.
    stop_at_frozen: Any = getattr(lm, "disable_input_require_grads", None)
    if stop_at_frozen is not None:
        stop_at_frozen()
    if is_share(how):
        _spare_layers(lm, how)


def _spare_layers(lm: torch.nn.Module, how: str) -> None:
    """Layers outside the share keep their activations. Counted over what this rank has, as the plan counts."""
    layers: list[Any] = find_layers(lm)
    for layer, again in zip(layers, whole_layers(how, len(layers)), strict=True):
        if not hasattr(layer, "gradient_checkpointing"):
            raise ConfigError(
                f"train.recompute is {how}, and {type(lm).__name__} cannot compute some of its layers again: "
                f"{type(layer).__name__} has no switch of its own",
                fix="write:   recompute: full   or   none",
            )
        layer.gradient_checkpointing = again


def _contexts(
    keys: Callable[[], Callable[[], AbstractContextManager[None]]] | None, find_contexts: Callable[[], Any]
) -> tuple[_Contexts, _Contexts]:
    """Around a layer's forward pass, and around the same again; `keys` gives what then repeats its dropout."""
    first, again = find_contexts()
    repeats = [reading_again(), *([] if keys is None else [keys()])]
    return _Contexts([_no_cache, lambda: first]), _Contexts([*repeats, _no_cache, lambda: again])


class _Contexts:
    """One within the other, as often as a graph is walked through."""

    def __init__(self, parts: list[Callable[[], AbstractContextManager[Any]]]) -> None:
        self.parts = parts
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        for part in self.parts:
            self.stack.enter_context(part())

    def __exit__(self, *error: Any) -> bool | None:
        return self.stack.__exit__(*error)


@contextlib.contextmanager
def _no_cache() -> Iterator[None]:
    """Autocast would keep its casts of all weights until the end of the forward pass, and cast them again after it."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_keep_products)


def _keep_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _kept_operators() else CheckpointPolicy.PREFER_RECOMPUTE
