"""Which model is wanted: where it lies, the type of its weights, and what is laid on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from duoka.config.schema import LoraConfig, TrainOnlyConfig
from duoka.model.adapters import Earlier
from duoka.model.quantize import Quantization


@dataclass(frozen=True)
class ModelRequest:
    """What `load_model` and `build_without_memory` are asked for."""

    folder: Path
    dtype: torch.dtype
    lora: LoraConfig | None = None  # adapters, which begin from `seed`
    train_only: TrainOnlyConfig | None = None  # all but the weights that it names are frozen
    seed: int = 0
    attention: str = "duoka"
    trains: bool = False  # mixtures by our function of experts, beside whatever attention
    trust_remote_code: bool = False
    packing: Quantization | None = None  # of the layers' matrices
    earlier: Earlier | None = None  # adapters that are merged into them, or are where the adapters begin
    scores: bool = False  # one number a sequence: transformers' sequence classification with one label

    @property
    def has_own_experts(self) -> bool:
        return self.trains or self.attention == "duoka"

    @property
    def named_attention(self) -> str | None:
        """For transformers: sdpa is its default, and where a model caps its scores or has sinks it takes another."""
        return None if self.attention == "sdpa" else self.attention
