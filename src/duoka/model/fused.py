"""Parts of a transformer with fewer passes over memory, and with less kept for the backward pass, than written plainly.

`apply_fused` looks for norms, MLPs and adapters, tries each kind beside the model's own code on random numbers, and
replaces those that answer the same. What it does not recognize stays as it is. Not for torch.compile, which fuses.
"""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace
from typing import Any

import torch

from duoka.model import compiled_attention, gpu_kernels, mixed_experts
from duoka.model.adapted import forward_adapted, is_frozen_with_adapter
from duoka.model.alike import answers_alike, draw
from duoka.model.experts import is_mixture
from duoka.model.gated import MLPS, Mlp, forward_gated
from duoka.model.gated_norms import forward_gated_norm
from duoka.model.gates import ACTS, Act
from duoka.model.norms import forward_normed, may_be_norm
from duoka.model.remade import can_be_remade
from duoka.model.rewired import rewired
from duoka.model.rotary import own_rotation, repeats_tables

_PART = "fused_part"  # of a class
GATED_BY, JOINED = "MLP by ", "joined "  # and the name of its gate's function; of one product for gate and up


def apply_fused(lm: torch.nn.Module, *, keeps_products: bool = False) -> int:
    """Replace what can be replaced, in place; returns how many modules.

    `keeps_products`: selective recompute keeps what products and attention give, as torch's operators. So adapters and
    rotations may not work in place on products, and attention is torch's.
    """
    find_head = getattr(lm, "get_output_embeddings", None)
    head = find_head() if find_head else None
    in_place = not keeps_products and not gpu_kernels.why_not()["rotation"] and repeats_tables(lm)
    count, gates = 0, set()
    for module in lm.modules():  # whoever has a gate comes before it
        is_left = module is head or module in gates
        part, kind = ("", None) if is_left else _find_kind(module, not keeps_products, in_place)
        if kind is not None:
            gates |= {getattr(module, names.act or "", None) for names in MLPS} if GATED_BY in part else set()
            # A class, not a method of this object: replicas that torch makes of it must not call the original.
            module.__class__ = _with_forward(type(module), kind, part)  # type: ignore[arg-type]
            count += 1
        if not keeps_products and is_mixture(module):
            setattr(module, mixed_experts.ALLOWED, mixed_experts.find_act(module))
        if not keeps_products and _asks_for_attention(type(module)):
            setattr(module, compiled_attention.ALLOWED, True)
    return count


def fused_parts(lm: torch.nn.Module) -> frozenset[str]:
    """The kinds of parts that were replaced: norm, rotation, adapters, "MLP by silu"."""
    return frozenset(filter(None, (getattr(type(module), _PART, "") for module in lm.modules())))


def _find_kind(module: torch.nn.Module, adapters: bool, in_place: bool) -> tuple[str, Any]:
    """(which part it is, the forward that takes its own's place; None: it stays)."""
    gated_norm = forward_gated_norm(module)
    if gated_norm is not None:
        return "gated norm", gated_norm
    if may_be_norm(module):
        return "norm", forward_normed(type(module))  # type: ignore[arg-type]
    for names in MLPS:
        if all(isinstance(getattr(module, name, None), torch.nn.Module) for name in names if name):
            act = _act_of(module, names)
            part = f"{JOINED * (names.up is None)}{GATED_BY}{act.name}" if act else "MLP"
            return part, None if act is None else _forward_by(act, names)
    if _asks_for_attention(type(module)):
        return "rotation", _forward_rotated(type(module).forward, in_place)
    if adapters and hasattr(module, "lora_A"):
        return "adapters", forward_adapted if is_frozen_with_adapter(module) else None
    if type(module).__module__ in _ACTIVATIONS and not getattr(module, "inplace", False):
        act = next((one for one in ACTS if answers_alike(type(module), module, draw(3, 8), one.value)), None)
        return "activation", None if act is None else _forward_activated(act)
    return "", None


@functools.cache
def _with_forward(kind: type, forward: Any, part: str) -> type:
    return type(f"Fused{kind.__name__}", (kind,), {"forward": forward, _PART: part})


# --- rotary embedding: written out in the attention's forward, by a function of its file ---

_ROTATION = "apply_rotary_pos_emb"
_ATTENTIONS = "ALL_ATTENTION_FUNCTIONS"  # transformers' table, where modules find the function that attends


def _asks_for_attention(kind: type) -> bool:
    """Whatever its projections are called, one of each or one for queries, keys and values."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)  # type: ignore[attr-defined]
    return code is not None and _ATTENTIONS in code.co_names


@functools.cache
def _forward_rotated(forward: Any, in_place: bool) -> Any:
    """The same forward with our rotation in place of the one that it calls; None when it calls none that we know.

    `in_place`: it may write over the products that it turns, and read half of the tables.
    """
    return rewired(forward, _ROTATION, lambda theirs: own_rotation(theirs, in_place))


# --- gated MLP: down(act(gate(x)) * up(x)) (gated.py) ---


def _act_of(mlp: torch.nn.Module, names: Mlp) -> Act | None:
    """The function of the gate, where it is computed as we do; None: otherwise."""
    gate, up, down = draw(8, 12 if names.up else 24), draw(8, 12), draw(12, 8)
    parts: dict[str, Any] = {names.gate: lambda x: x @ gate, names.down: lambda x: x @ down}
    parts |= {names.up: lambda x: x @ up} if names.up else {}
    stub = SimpleNamespace(**parts, **({names.act: getattr(mlp, names.act)} if names.act else {}))
    forms = ((one, functools.partial(_forward_by(one, names), stub)) for one in ACTS)
    return next((one for one, form in forms if answers_alike(type(mlp), stub, draw(3, 8), form)), None)


@functools.cache
def _forward_by(act: Act, names: Mlp) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return forward_gated(self, x, act, names)

    return forward


# --- the activation of an MLP without a gate, which adapters behind it need not keep (remade.py) ---

_ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")


@functools.cache
def _forward_activated(act: Act) -> Any:
    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        return can_be_remade(act.value(input), act.value, input)

    return forward
