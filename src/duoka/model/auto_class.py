"""Which of transformers' classes a config is built by: a language model, or one that reads images beside text.

A model that reads both is trained on text as it is; its towers are frozen (freeze.py) and go into the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from duoka.plan.in_files import TEXT_ALONE


def language_class(config: Any) -> Any:
    """The auto class of a config; AutoModelForCausalLM says itself what it does not know."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    own_code = getattr(config, "auto_map", None) or {}
    reads_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and config.get_text_config() is not config
    if AutoModelForCausalLM.__name__ in own_code or not reads_images or config.model_type in TEXT_ALONE:
        return AutoModelForCausalLM
    return AutoModelForImageTextToText  # where both know a type (Qwen3.5), the language model leaves its towers out


def config_of(facts: Mapping[str, Any]) -> Any:
    """What config.json says, as transformers reads it."""
    from transformers import CONFIG_MAPPING

    settings = {key: _decoded(value) for key, value in facts.items() if key != "model_type"}
    return CONFIG_MAPPING[facts["model_type"]](**settings)


def _decoded(value: Any) -> Any:
    """JSON has no infinity: config.json says {"__float__": "Infinity"}, as do limits of Mamba's steps."""
    if isinstance(value, list):
        return [_decoded(one) for one in value]
    if isinstance(value, dict) and value.keys() == {"__float__"}:
        return float(value["__float__"])
    return {name: _decoded(one) for name, one in value.items()} if isinstance(value, dict) else value
