"""A checkpoint of DeepSpeed's, or of torch's sharded weights, as a model folder. For `duoka import-checkpoint`."""

from __future__ import annotations

from pathlib import Path

import torch

from duoka.config.schema import ModelConfig
from duoka.hub.models import model_folder
from duoka.model.auto_class import language_class
from duoka.model.build import quiet_loading
from duoka.model.result import write_result
from duoka.store.dcp_files import find_dcp, read_dcp
from duoka.store.deepspeed_files import Found, named_as, read_deepspeed


def import_model(folder: Path, model: str, target: Path) -> Found:
    """Write `target` in fp32, as the checkpoint has its weights, with config and tokenizer of `model`."""
    sharded = find_dcp(folder)
    found = read_deepspeed(folder) if sharded is None else None
    base = model_folder(ModelConfig(name=model), Path.cwd())
    from transformers import AutoConfig, GenerationConfig

    with quiet_loading(), torch.device("meta"):
        config = AutoConfig.from_pretrained(base, local_files_only=True)
        lm = language_class(config).from_config(config)
        lm.tie_weights()
    if (base / "generation_config.json").is_file():  # what ends an answer stands there, and not in every config
        lm.generation_config = GenerationConfig.from_pretrained(base)
    wanted = lm.state_dict(keep_vars=True)
    found = found or read_dcp(sharded or folder, wanted)
    weights = named_as(found.weights, wanted)
    target = target.resolve()  # a link stays one
    target.parent.mkdir(parents=True, exist_ok=True)
    write_result(lm, base, target, weights, dtype=torch.float32)
    return found
