"""Low-rank adapters through PEFT: inserted, counted, never touching the base weights."""

from __future__ import annotations

import hashlib

import torch

from duoka.config.schema import LoraConfig
from duoka.errors import ConfigError


def apply_lora(model: torch.nn.Module, lora: LoraConfig, seed: int = 0) -> torch.nn.Module:
    """Freeze the model and put trainable adapters beside its linear layers; returns the PeftModel."""
    import peft

    if lora.targets != "all":
        _check_targets(model, lora.targets)
    settings = peft.LoraConfig(
        task_type=peft.TaskType.CAUSAL_LM,
        r=lora.rank,
        lora_alpha=lora.alpha if lora.alpha != int(lora.alpha) else int(lora.alpha),
        lora_dropout=lora.dropout,
        target_modules="all-linear" if lora.targets == "all" else list(lora.targets),
        bias="none",
    )
    adapted = peft.get_peft_model(model, settings)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if is_adapter(name) and not parameter.is_meta:
                parameter.copy_(draw_adapter(name, parameter.shape, seed))
    return adapted


def is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def draw_adapter(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """Where an adapter begins: A as PEFT draws it (uniform within 1/sqrt(width)), B zero.

    From seed and name alone: a rank that holds a part of the adapters begins with the values that one process would.
    """
    if ".lora_B." in name:
        return torch.zeros(shape)
    number = int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest(), "little")
    generator = torch.Generator().manual_seed(number)
    bound = shape[1] ** -0.5
    return torch.rand(shape, generator=generator) * (2 * bound) - bound


def _check_targets(model: torch.nn.Module, targets: tuple[str, ...]) -> None:
    linear = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    missing = [name for name in targets if name.rsplit(".", 1)[-1] not in linear]
    if missing:
        raise ConfigError(
            f"lora.targets names {', '.join(missing)}, and the model has no linear layer of that name",
            fix=f"choose from {', '.join(sorted(linear))}, or write targets: all",
        )


def count_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """(all, trainable) parameters; shared ones count once."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
