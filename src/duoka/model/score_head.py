"""A model with one number for an answer: transformers' sequence classification with one label, as reward models are.

The score is that of the last token which is not the padding token: where transformers reads it too, whatever the
tokenizer pads with, so that a saved model gives others the same scores.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from duoka.errors import ConfigError

HEAD = "score"
_OTHERS = "take a decoder such as Llama, Qwen, Mistral or GPT-2"


def read_scorer(folder: Path, **options: Any) -> Any:
    """The model in a folder with its head; of a model without one, a head of zeros: at its start all answers are
    worth the same, on any rank, and the first loss is ln 2."""
    from transformers import AutoModelForSequenceClassification
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = config.get("model_type")
    if kind not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES and "auto_map" not in config:
        raise ConfigError(
            f"transformers has no model of type {kind} with a head for scores, which a reward model is",
            where=str(folder),
            fix=_OTHERS,
        )
    model, found = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, output_loading_info=True, **options
    )
    head = getattr(model, HEAD, None)
    if not isinstance(head, torch.nn.Linear) or head.bias is not None:
        raise ConfigError(
            f"{type(model).__name__} has no plain head {HEAD!r} for one number", where=str(folder),
            fix=_OTHERS,
        )  # fmt: skip
    missing = [name for name in found["missing_keys"] if not name.startswith(f"{HEAD}.")]
    if missing:
        raise ConfigError(f"{folder} lacks {len(missing)} weights of the model, such as {missing[0]}")
    if found["missing_keys"]:
        torch.nn.init.zeros_(head.weight)
    return model
