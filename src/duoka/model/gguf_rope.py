"""Stretched positions as GGUF says them: `{arch}.rope.scaling.*`, by which llama.cpp and its kin turn pairs of a head.

It knows a factor for all pairs (linear), and YaRN as its paper has it; what a model does otherwise is refused in words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# YaRN's own numbers, which readers take; those that a file may name are known to the newest of them alone.
_YARN = {"beta_fast": 32, "beta_slow": 1, "truncate": True}


def rope_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return found


def stretch_of(config: Mapping[str, Any]) -> str:
    rope = rope_of(config)
    return str(rope.get("rope_type", rope.get("type", "default")))


def why_no_stretch(config: Mapping[str, Any]) -> str:
    """Why a file cannot say how this model's positions are stretched; "": it can, or they are not."""
    kind, rope, model = stretch_of(config), rope_of(config), config.get("model_type")
    if kind in ("default", "linear") or (kind, model) == ("llama3", "llama"):
        return ""
    if kind == "dynamic":
        return "they depend on how long a text is (dynamic), and such files have no words for it"
    if kind != "yarn":
        return f"readers know no {kind} of {model}"
    for name, usual in _YARN.items():
        if (value := rope.get(name)) is not None and value != usual:
            return f"its YaRN has {name} {value}, and readers take {usual}"
    if not math.isclose(_attention_factor(config), _usual_attention_factor(_factor(config)), rel_tol=1e-4):
        return f"its YaRN scales attention by {_attention_factor(config):g}, and readers by 0.1 ln(factor) + 1"
    return ""


def add_stretch(writer: Any, gguf: Any, config: Mapping[str, Any]) -> None:
    """Llama 3.1's is no matter of these keys: its divisors are a tensor."""
    kind = stretch_of(config)
    if kind not in ("linear", "yarn"):
        return
    writer.add_rope_scaling_type(getattr(gguf.RopeScalingType, kind.upper()))
    writer.add_rope_scaling_factor(_factor(config))
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(_first_length(config))


def _first_length(config: Mapping[str, Any]) -> int:
    """Of texts in the training before positions were stretched."""
    return int(rope_of(config).get("original_max_position_embeddings") or config["max_position_embeddings"])


def _factor(config: Mapping[str, Any]) -> float:
    return float(rope_of(config).get("factor") or config["max_position_embeddings"] / _first_length(config))


def _attention_factor(config: Mapping[str, Any]) -> float:
    """As transformers computes it."""
    rope, factor = rope_of(config), _factor(config)
    if (told := rope.get("attention_factor")) is not None:
        return float(told)
    above, below = rope.get("mscale"), rope.get("mscale_all_dim")
    if above and below:
        return _usual_attention_factor(factor, above) / _usual_attention_factor(factor, below)
    return _usual_attention_factor(factor)


def _usual_attention_factor(factor: float, scale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
