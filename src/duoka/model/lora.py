"""Low-rank adapters through PEFT: inserted, counted, never touching the base weights."""

from __future__ import annotations

import torch

from duoka.config.schema import LoraConfig
from duoka.errors import ConfigError


def apply_lora(model: torch.nn.Module, lora: LoraConfig) -> torch.nn.Module:
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
    return peft.get_peft_model(model, settings)


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
