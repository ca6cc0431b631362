"""Every text-only example that trains, as it is but for a small model and small data, trains in a world of two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import write_conversations, write_tiny_model
from worlds import train_all

CORPUS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "unit/llamafactory_corpus.json").read_text("utf-8"))
# What is swapped beside model and data: the small model has four layers.
FILES: dict[str, dict[str, Any]] = {
    "train_lora/qwen3_lora_sft": {}, "train_lora/qwen3_lora_sft_ds3": {}, "train_lora/qwen3_lora_pretrain": {},
    "train_lora/qwen3_preprocess": {}, "train_full/qwen3_full_sft": {}, "extras/loraplus/llama3_lora_sft": {},
    "extras/llama_pro/llama3_freeze_sft": {"freeze_trainable_layers": 2},
    "ascend/qwen3_full_sft_fsdp2": {}, "ascend/qwen3_5_full_sft_fsdp2": {}, "ascend/qwen3moe_full_sft_fsdp": {},
    "ascend/qwen3_5moe_lora_sft_fsdp2": {},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    model = write_tiny_model(folder / "tiny")
    path = folder / "examples/deepspeed/ds_z3_config.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(CORPUS["side"]["deepspeed/ds_z3_config.json"]), "utf-8")
    chats = write_conversations(folder / "chats.jsonl", 12)
    texts = folder / "texts.jsonl"
    texts.write_text("\n".join(json.dumps({"text": f"word {n} " * 30}) for n in range(12)), "utf-8")
    jobs = []
    for name, swapped in FILES.items():
        data = texts if CORPUS["train"][name]["keys"]["stage"] == "pt" else chats
        small = {
            "model_name_or_path": str(model),
            "dataset": str(data),
            "max_steps": 1,
            "cutoff_len": 128,
            "bf16": False,
        }
        file = folder / f"{name.replace('/', '-')}.yaml"
        file.write_text(yaml.safe_dump(CORPUS["train"][name]["keys"] | small | swapped, sort_keys=False), "utf-8")
        jobs.append((str(file), [], str(folder / "runs" / name)))
    train_all(jobs, 2)
    return folder


@pytest.mark.parametrize("name", FILES)
def test_an_example_trains_with_model_and_data_swapped(folder: Path, name: str) -> None:
    run, keys = folder / "runs" / name, CORPUS["train"][name]["keys"]
    events = [json.loads(line) for line in (run / "events/run.jsonl").read_text("utf-8").splitlines()]
    layout, steps = events[0]["layout"], [event for event in events if event["type"] == "step"]
    assert len(steps) == 1 and 0 < steps[0]["loss"] < 10 and steps[0]["num_targets"] > 0
    assert layout["strategy"] == ("fsdp" if "deepspeed" in keys else "ddp"), layout
    file = "adapter_model.safetensors" if keys["finetuning_type"] == "lora" else "model.safetensors"
    assert (run / "final" / file).is_file()
