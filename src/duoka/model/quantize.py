"""A frozen base whose layers' matrices are packed into 4 bits (QLoRA), by bitsandbytes: how it is asked for and undone.

build.py calls this while it loads a model. Packing is deterministic: a resumed run has the same weights.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from duoka.config.rules_model import GET_PACKER, NO_PACKER
from duoka.config.schema import ModelConfig
from duoka.errors import ConfigError


@dataclass(frozen=True)
class Packing:
    """`unpacked`: with the values that packing leaves, but in plain matrices that adapters can be merged into."""

    kind: str  # nf4 or fp4
    double: bool
    unpacked: bool = False

    @classmethod
    def of(cls, model: ModelConfig | None, *, unpacked: bool = False) -> Packing | None:
        """What a config asks for; None: weights as they came."""
        if model is None or model.quantization == "none":
            return None
        return cls(model.quantization, model.double_quantization, unpacked)

    def settings(self, dtype: torch.dtype) -> Any:
        """What transformers needs to pack while it loads; products are computed in `dtype`."""
        if importlib.util.find_spec("bitsandbytes") is None:
            raise ConfigError(NO_PACKER, fix=GET_PACKER)
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=self.kind,
            bnb_4bit_use_double_quant=self.double,
            bnb_4bit_compute_dtype=dtype,
        )


@torch.no_grad()
def unpack(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Plain linear layers in place of packed ones, with the weights that these compute with."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    for name, module in list(model.named_modules()):
        if not isinstance(module, Linear4bit):
            continue
        weight = dequantize_4bit(module.weight.data, module.weight.quant_state).to(dtype)
        with torch.device("meta"):
            plain = torch.nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
        plain.weight = torch.nn.Parameter(weight, requires_grad=False)
        plain.bias = module.bias
        above, _, last = name.rpartition(".")
        setattr(model.get_submodule(above), last, plain)
    for attribute in ("hf_quantizer", "quantization_method", "is_loaded_in_4bit", "is_quantized"):
        if hasattr(model, attribute):
            delattr(model, attribute)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
