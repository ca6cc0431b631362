"""Which heads the fused loss can read in place of calling them, and how it reads them.

A head is readable when logits = bend(hidden @ weight.T + bias + adapter); all others answer with their own logits.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from duoka.model.chunks import Bend, LowRank, Places
from duoka.model.logps import More, TokenLogps, place, token_logps
from duoka.model.loss import LIKELIHOOD, Goal, sum_cross_entropy
from duoka.model.vocabulary import VOCABULARY, WHOLE

# What families call a factor on their logits, and whether it multiplies or divides.
_SCALES = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}
# What they call the cap that a tanh holds their logits under.
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def read_bend(config: Any) -> Bend:
    """What a model of this config does to its logits after the head."""
    scale = 1.0
    for name, power in _SCALES.items():
        value = getattr(config, name, None)
        scale *= float(value) ** power if value is not None else 1.0
    softcap = next((value for name in _SOFTCAPS if (value := getattr(config, name, None))), None)
    return Bend(scale, float(softcap) if softcap else None)


def is_readable(head: torch.nn.Module | None) -> bool:
    """True for a linear layer, bare or with one plain low-rank adapter."""
    if head is None:
        return False
    base = getattr(head, "base_layer", None)
    return type(head if base is None else base) is torch.nn.Linear and (base is None or plain_adapter(head) is not None)


def _forwards_of_adapters() -> tuple[Any, ...]:
    """PEFT's, of linear layers: plain ones, and packed ones where somebody has imported the packer."""
    from peft.tuners.lora.layer import Linear

    packed = sys.modules.get("peft.tuners.lora.bnb")
    kinds = (getattr(packed, name, None) for name in ("Linear4bit", "Linear8bitLt"))
    return Linear.forward, *(kind.forward for kind in kinds if kind is not None)


def plain_adapter(module: Any) -> str | None:
    """The name of PEFT's one active adapter of `module` when it is nothing but B(A(dropout(x))) * scale."""
    # By what computes: FSDP gives a head that is a unit of its own another class, with the same forward.
    if type(module).forward not in _forwards_of_adapters():
        return None
    if module.disable_adapters or module.merged or len(module.active_adapters) != 1:
        return None
    (name,) = module.active_adapters
    plain = name in module.lora_A and name not in module.lora_variant and module.lora_B[name].bias is None
    return name if plain else None


def apply_head(
    head: Any, hidden: torch.Tensor, labels: torch.Tensor, places: Places | None, bend: Bend, goal: Goal
) -> tuple[torch.Tensor, torch.Tensor]:
    """Head and loss in one: (summed loss, correct target tokens); the second is counted in eval mode only."""
    base, low = _read_head(head, hidden)
    return sum_cross_entropy(
        hidden, here(base.weight), labels, bias=here(base.bias), low=low, bend=bend,
        goal=goal if head.training else LIKELIHOOD, count=not head.training, places=places,
        vocabulary=getattr(base, VOCABULARY, WHOLE),
    )  # fmt: skip


def apply_head_to_logps(
    head: Any, hidden: torch.Tensor, labels: torch.Tensor, places: Places | None, bend: Bend, more: More
) -> TokenLogps:
    """Head and log-probabilities of its target tokens in one."""
    base, low = _read_head(head, hidden)
    return token_logps(
        hidden, here(base.weight), labels, bias=here(base.bias), low=low, bend=bend, more=more, places=places,
        vocabulary=getattr(base, VOCABULARY, WHOLE),
    )  # fmt: skip


def _read_head(head: Any, hidden: torch.Tensor) -> tuple[Any, LowRank | None]:
    """The linear layer, and what its adapter adds."""
    if not hasattr(head, "base_layer"):
        return head, None
    name = plain_adapter(head)
    rows = F.linear(head.lora_dropout[name](hidden), head.lora_A[name].weight) * head.scaling[name]
    return head.base_layer, LowRank(rows, here(head.lora_B[name].weight))


def here(parameter: Any) -> Any:
    """This rank's part of it, through which gradients flow."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def loss_from_logits(
    logits: torch.Tensor, labels: torch.Tensor, places: Places | None, goal: Goal, training: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from a model's own logits, of target positions only."""
    rows, targets, _ = _take_logits(logits, labels, places)
    goal = goal if training else LIKELIHOOD
    losses = F.cross_entropy(rows, targets, reduction="none", label_smoothing=goal.smoothing)
    if goal.by_probability:
        losses = losses * torch.softmax(rows.detach(), dim=-1).gather(1, targets[:, None]).squeeze(1)
    loss = losses.sum()
    correct = targets.new_zeros(()) if training else (rows.argmax(dim=-1) == targets).sum()
    return loss, correct


def logps_from_logits(logits: torch.Tensor, labels: torch.Tensor, places: Places | None, more: More) -> TokenLogps:
    rows, targets, chosen = _take_logits(logits, labels, places)
    every = rows.log_softmax(dim=-1)
    logps = place(every.gather(1, targets[:, None]).squeeze(1), labels, chosen)
    if not more:
        return TokenLogps(logps, None)
    is_right = rows.argmax(dim=-1) == targets
    others = -(every.exp() * every).sum(dim=-1) if more == "entropy" else is_right.to(every.dtype)
    return TokenLogps(logps, place(others, labels, chosen))


def _take_logits(
    logits: torch.Tensor, labels: torch.Tensor, places: Places | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logits of target positions, their labels, their places among all), at least in fp32."""
    places = places or Places.of(labels)
    chosen = places.index
    rows = logits.flatten(0, -2)[chosen if places.states is None else places.states]
    return rows.float() if rows.dtype in (torch.bfloat16, torch.float16) else rows, labels.flatten()[chosen], chosen
