"""A file of Axolotl is named for what it is, and each of its keys with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from duoka.config.catalog import known_keys
from duoka.config.dialects.axolotl import OURS
from duoka.config.load import load_config
from duoka.errors import Faults

LORA: dict[str, Any] = {
    "base_model": "some/model", "model_type": "LlamaForCausalLM", "load_in_8bit": True, "load_in_4bit": False,
    "datasets": [{"path": "owner/alpaca", "type": "alpaca"}], "val_set_size": 0.05, "output_dir": "./out",
    "sequence_len": 4096, "sample_packing": True, "adapter": "lora", "lora_r": 32, "lora_target_linear": True,
    "lora_modules_to_save": ["lm_head"], "wandb_project": None, "gradient_accumulation_steps": 4, "num_epochs": 4,
    "micro_batch_size": 2, "optimizer": "adamw_bnb_8bit", "learning_rate": 2e-4, "bf16": "auto", "tf32": False,
    "warmup_ratio": 0.1, "special_tokens": {"pad_token": "x"}, "liger_rope": True, "bogus_key": 1,
}  # fmt: skip


def refusal(keys: dict[str, Any], folder: Path) -> tuple[str, str]:
    (folder / "x.yaml").write_text(yaml.safe_dump(keys, sort_keys=False), "utf-8")
    with pytest.raises(Faults) as caught:
        load_config(str(folder / "x.yaml"))
    (fault,) = caught.value.faults
    return fault.what, fault.fix


def test_every_key_of_an_axolotl_file_is_told(tmp_path: Path) -> None:
    what, fix = refusal(LORA, tmp_path)
    assert "a file of Axolotl (base_model, datasets, val_set_size)" in what
    assert "base_model is model.name" in fix and "sequence_len is data.max_length" in fix
    assert "lora_r is lora.rank" in fix and "lora_target_linear is lora.targets: all" in fix
    assert "not there: load_in_8bit (the base under adapters" in fix and "lora_modules_to_save (of LoRA's" in fix
    assert "not there: special_tokens (a tokenizer" in fix and "not known here: bogus_key" in fix
    needless = next(line for line in fix.splitlines() if line.startswith("needless"))
    assert "model_type" in needless and "tf32" in needless and "liger_rope" in needless
    assert not [key for key, value in LORA.items() if value is not None and key not in fix]


def test_its_words_are_keys_of_ours() -> None:
    named = {name.partition(":")[0].partition(" (")[0] for name in OURS.values()}
    assert not [name for name in named if name not in known_keys()]


def test_files_of_others_with_one_such_key_are_not_taken_for_axolotls(tmp_path: Path) -> None:
    what, _ = refusal({"base_model": "some/model", "data": {"train": ["identity"]}}, tmp_path)
    assert "Axolotl" not in what
