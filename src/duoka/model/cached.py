"""A model's keys and values from call to call, in whatever words its version of transformers has for them."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from duoka.model.layers import unrecorded


def look_further(lm: torch.nn.Module, input_ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
    """(logits of the next token (rows, vocab), cache) after these tokens and those in the cache, None at first."""
    bare = lm.get_base_model() if hasattr(lm, "get_base_model") else lm  # type: ignore[operator]
    name = _name_of_cache(type(bare))  # type: ignore[arg-type]
    output = lm(input_ids=input_ids, use_cache=True, logits_to_keep=1, **{name: cache}, **unrecorded(lm))
    return output.logits[:, -1], getattr(output, name)


@functools.cache
def _name_of_cache(kind: type[torch.nn.Module]) -> str:
    """transformers says `cache` since 5.24; a model's own code may say what it said before."""
    return "cache" if "cache" in inspect.signature(kind.forward).parameters else "past_key_values"
