"""The optimizer of a run: groups by role and decay, fused where torch has it, its state by parameter name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from duoka.config.schema import OptimConfig
from duoka.optim.disk import DiskAdamW
from duoka.optim.eight_bit import build_eight_bit
from duoka.optim.host import HostAdamW
from duoka.optim.layerwise import Lamb, Lars
from duoka.optim.muon import MuonAdamW, Sharing, WholeMatrices
from duoka.optim.narrow import NarrowAdamW
from duoka.optim.roles import Role, decays


def build_optimizer(
    named: Mapping[str, torch.nn.Parameter],
    optim: OptimConfig,
    *,
    on_host: bool = False,
    on_disk: Path | None = None,
    share: float = 1.0,
    b_lr_ratio: float = 1.0,
    roles: Mapping[str, Role] | None = None,
    sharing: Callable[[list[torch.nn.Parameter]], Sharing] = WholeMatrices,
) -> torch.optim.Optimizer:
    """The optimizer that `optim.name` names; matrices decay, norms and biases do not.

    `on_host` keeps AdamW's state in host memory, `on_disk` in a file under that folder, or a `share` of it there.
    Adapters' B matrices have `b_lr_ratio` times the learning rate of all else (LoRA+). `roles` are asked for rates of
    their own and for Muon's matrices; `sharing` says how those lie over ranks.
    """
    groups = _build_groups(named, optim, roles or {}, b_lr_ratio)
    adamw: dict[str, Any] = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps}
    if optim.name == "muon":
        matrices = [p for group in groups if group["kind"] == "muon" for p in group["params"]]
        own: dict[str, Any] = {"momentum": optim.momentum, "scale": optim.muon_scale}
        return MuonAdamW(groups, sharing(matrices), fused=True, **own, **adamw)
    if optim.name == "lars":
        return Lars(groups, lr=optim.lr, momentum=optim.momentum)
    if optim.name == "lamb":
        return Lamb(groups, **adamw)
    if optim.name == "adamw8bit":
        return build_eight_bit(groups, **adamw)
    if optim.name == "adafactor":
        return torch.optim.Adafactor(groups, lr=optim.lr)
    if on_disk is not None:
        return DiskAdamW(groups, folder=on_disk, share=share, **adamw)
    if any(parameter.dtype is torch.bfloat16 for parameter in named.values()):
        return NarrowAdamW(groups, names={parameter: name for name, parameter in named.items()}, **adamw)
    make = partial(HostAdamW, share=share) if on_host else partial(torch.optim.AdamW, fused=True)
    return make(groups, **adamw)


def _build_groups(
    named: Mapping[str, torch.nn.Parameter], optim: OptimConfig, roles: Mapping[str, Role], b_lr_ratio: float
) -> list[dict[str, Any]]:
    """Parameter groups, in the order of their first member; `scale` is a group's rate as a share of optim.lr."""
    groups: dict[tuple[float, float, str, Any], list[torch.nn.Parameter]] = {}
    for name, parameter in named.items():
        role = roles.get(name, "matrix" if parameter.ndim == 2 and decays(name, parameter) else "vector")
        kind = "muon" if optim.name == "muon" and role == "matrix" else "adamw"
        rate = {"embedding": optim.embedding_lr, "head": optim.head_lr}.get(role)
        if rate is None:
            rate = optim.adamw_lr if kind == "adamw" and optim.name == "muon" else None
        decay = optim.weight_decay if decays(name, parameter) else 0.0
        scale = 1.0 if rate is None else rate / optim.lr
        scale *= b_lr_ratio if ".lora_B." in name else 1.0
        # One call of a fused kernel takes whole tensors, or parts of them over the same ranks: axes make several kinds.
        lies = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
        groups.setdefault((scale, decay, kind, lies), []).append(parameter)
    # A stage of a pipeline may train nothing, and torch wants a group.
    return [
        {"params": members, "count": len(members), "weight_decay": decay, "scale": scale, "kind": kind,
         "lr": optim.lr * scale}
        for (scale, decay, kind, _), members in (groups or {(1.0, 0.0, "adamw", None): []}).items()
    ]  # fmt: skip


def describe_optimizer(optimizer: torch.optim.Optimizer, optim: OptimConfig, factor: float) -> str:
    """As in "muon lr 0.02 for 84 matrices, adamw lr 0.0003 for 63 others"; `factor` is the batch's on all rates."""
    counts: dict[tuple[str, float], int] = {}
    for group in optimizer.param_groups:
        key = (group["kind"], optim.lr * group["scale"] * factor)
        counts[key] = counts.get(key, 0) + group["count"]  # DeepSpeed puts lines of its own in their place
    written = f" ({optim.lr:g} by lr_scaling)" if factor != 1 else ""
    written += " (AdamW fused)" if optimizer.defaults.get("fused") else ""
    if len(counts) == 1:
        return f"{optim.name} lr {next(iter(counts))[1]:g}{written}"
    parts: list[str] = []
    for (kind, rate), count in sorted(counts.items(), key=lambda item: item[0][0] != "muon"):
        name = "adamw" if optim.name == "muon" and kind != "muon" else optim.name
        what = "matrices" if kind == "muon" else ("other" if count == 1 else "others") if parts else "tensors"
        parts.append(f"{name} lr {rate:g} for {count:,} {what}")
    return ", ".join(parts) + written


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("scale", 1.0)


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, named: Mapping[str, torch.nn.Parameter]
) -> dict[str, torch.Tensor]:
    """All state as `kind.parameter-name` -> tensor; state of parameters never stepped is made first, as zeros.

    Whole tensors, shards of them, or nothing of a matrix that another rank keeps: checkpoints put them together.
    """
    make_state(optimizer)
    saved: Callable[[torch.Tensor], Mapping[str, torch.Tensor]]
    saved = getattr(optimizer, "saved_state", lambda parameter: optimizer.state[parameter])
    return {f"{kind}.{name}": value for name, parameter in named.items() for kind, value in saved(parameter).items()}


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """A fresh optimizer has no state to load into: make it as its first step would."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = _fresh_state(optimizer, group, parameter)


def _fresh_state(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.nn.Parameter
) -> dict[str, torch.Tensor]:
    makes_own = not isinstance(optimizer, MuonAdamW) or group["kind"] == "muon"
    if makes_own and (fresh := getattr(optimizer, "fresh_state", None)):
        made: dict[str, torch.Tensor] = fresh(parameter)
        return made
    if isinstance(optimizer, torch.optim.Adafactor):
        return _fresh_adafactor(parameter)
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
    }


def _fresh_adafactor(parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """Second moments of rows and columns; of vectors, whole."""
    assert not isinstance(parameter, DTensor), "rules.py refuses Adafactor where weights are sharded"
    state = {"step": torch.zeros((), dtype=torch.float32)}
    if parameter.ndim < 2:
        return state | {"variance": torch.zeros_like(parameter)}
    rows, columns = list(parameter.shape), list(parameter.shape)
    rows[-1], columns[-2] = 1, 1
    return state | {"row_var": parameter.new_zeros(rows), "col_var": parameter.new_zeros(columns)}
