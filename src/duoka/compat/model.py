"""`load_model` and `save_model`: the config's model with its adapters, and a folder that other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from duoka.compat.config import Config, Part
from duoka.errors import ConfigError

if TYPE_CHECKING:
    from duoka.accelerator import Accelerator


def load_model(model: Part, accelerator: Accelerator | None = None) -> torch.nn.Module:
    """The transformers model, with adapters when the config has `lora`, with all but some layers frozen when it has
    `train_only`; prepared when an accelerator is given.

    Loaded by each rank as a whole: for models that only fit when they are shared, use `duoka train`.
    """
    from duoka.hub.models import model_folder
    from duoka.model.adapters import Earlier
    from duoka.model.build import load_model as load
    from duoka.model.quantize import Quantization
    from duoka.model.request import ModelRequest

    config = model.run
    request = ModelRequest(
        model_folder(config.model, model.loaded.base),
        dtype=torch.float32,
        lora=config.lora,
        train_only=config.train_only,
        seed=config.train.seed,
        attention="sdpa",
        trust_remote_code=config.model.trust_remote_code,
        packing=Quantization.of(config.model),
        earlier=Earlier.of(config.lora, model.loaded.base),
    )
    lm = load(request)
    lm.train()
    if accelerator is None:
        return lm
    prepared: torch.nn.Module = accelerator.prepare_model(lm)
    return prepared


def save_model(model: torch.nn.Module, config: Config, save_path: str | Path) -> None:
    """Weights (of adapters the adapters), config and tokenizer; one process calls it, with the unwrapped model."""
    from duoka.hub.models import model_folder
    from duoka.model.result import write_result

    if any(isinstance(p, DTensor) for p in model.parameters()):
        raise ConfigError(
            "save_model was given a sharded model, of which this process has a part: all processes have to save it",
            fix="write, outside of `if accelerator.is_main_process`:   "
            f"accelerator.save_model(model, {str(save_path)!r})",
        )
    target = Path(save_path)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_result(model, model_folder(config.loaded.config.model, config.loaded.base), target)
