"""Every text-only example that trains, as it is but for a small model and small data, trains in a world of two."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tiny import write_conversations, write_tiny_model
from worlds import train_all

from duoka.config.convert import converted_yaml
from duoka.config.load import load_config, resolved_yaml
from duoka.runs.folder import RunFolder
from duoka.serve.load_run import find_trained, load_trained

CORPUS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "unit/llamafactory_corpus.json").read_text("utf-8"))
# What is swapped beside model and data: the small model has four layers.
FILES: dict[str, dict[str, Any]] = {
    "train_lora/qwen3_lora_sft": {}, "train_lora/qwen3_lora_sft_ds3": {}, "train_lora/qwen3_lora_pretrain": {},
    "extras/dft/qwen2_full_sft": {}, "extras/muon/qwen2_full_sft": {}, "extras/pissa/llama3_lora_sft": {},
    "train_lora/qwen3_preprocess": {}, "train_full/qwen3_full_sft": {}, "extras/loraplus/llama3_lora_sft": {},
    "extras/llama_pro/llama3_freeze_sft": {"freeze_trainable_layers": 2},
    "ascend/qwen3_full_sft_fsdp2": {}, "ascend/qwen3_5_full_sft_fsdp2": {}, "ascend/qwen3moe_full_sft_fsdp": {},
    "ascend/qwen3_5moe_lora_sft_fsdp2": {},
}  # fmt: skip
if importlib.util.find_spec("bitsandbytes"):
    FILES |= {
        "extras/fsdp_qlora/llama3_lora_sft": {}, "train_qlora/qwen3_lora_sft_otfq": {},
        "train_qlora/qwen3_lora_sft_bnb_npu": {},
    }  # fmt: skip
# Of these the converted form is trained too.
CONVERTED = (
    "train_lora/qwen3_lora_sft", "train_full/qwen3_full_sft", "extras/llama_pro/llama3_freeze_sft",
    "train_lora/qwen3_lora_pretrain", "extras/loraplus/llama3_lora_sft", "extras/muon/qwen2_full_sft",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    model = write_tiny_model(folder / "tiny", layers=4)
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
        if name in CONVERTED:
            ours = file.with_suffix(".ours.yaml")
            ours.write_text(converted_yaml(load_config(file), folder), "utf-8")
            jobs.append((str(ours), [], str(folder / "ours" / name)))
    jobs += _longer_with_pissa(folder, jobs)
    train_all(jobs, 2)
    return folder


def _longer_with_pissa(folder: Path, jobs: list[Any]) -> list[Any]:
    """Three steps of the PiSSA example: replicated, sharded, and gone on with from the first step's checkpoint."""
    file = next(file for file, _, _ in jobs if "pissa" in file)
    three = ["max_steps=3", "save_steps=1", "lr_scheduler_type=constant", "warmup_ratio=0", "save_total_limit=3"]
    first = folder / "runs/replicated/checkpoints/step-00000001"
    more = {"replicated": [], "sharded": ["parallel.strategy=zero3"], "resumed": [f"resume_from_checkpoint={first}"]}
    return [(file, three + extra, str(folder / "runs" / name)) for name, extra in more.items()]


@pytest.mark.parametrize("name", FILES)
def test_an_example_trains_with_model_and_data_swapped(folder: Path, name: str) -> None:
    run, keys = folder / "runs" / name, CORPUS["train"][name]["keys"]
    events = [json.loads(line) for line in (run / "events/run.jsonl").read_text("utf-8").splitlines()]
    layout, steps = events[0]["layout"], [event for event in events if event["type"] == "step"]
    assert len(steps) == 1 and 0 < steps[0]["loss"] < 10 and steps[0]["num_targets"] > 0
    assert layout["strategy"] == ("fsdp" if "deepspeed" in keys else "ddp"), layout
    file = "adapter_model.safetensors" if keys["finetuning_type"] == "lora" else "model.safetensors"
    assert (run / "final" / file).is_file()


@pytest.mark.parametrize("name", CONVERTED)
def test_the_converted_file_gives_the_same_run_to_the_bit(folder: Path, name: str) -> None:
    theirs, ours = (folder / place / name for place in ("runs", "ours"))
    seen = []
    for run in (theirs, ours):
        events = [json.loads(line) for line in (run / "events/run.jsonl").read_text("utf-8").splitlines()]
        seen.append([(e["loss"], e["grad_norm"], e["lr"], e["num_targets"]) for e in events if e["type"] == "step"])
    assert seen[0] and seen[0] == seen[1]
    (file,) = (theirs / "final").glob("*.safetensors")
    weights = load_file(ours / "final" / file.name)
    assert all(value.equal(weights[key]) for key, value in load_file(file).items())


def test_pissa_is_the_same_run_sharded_and_gone_on_with(folder: Path) -> None:
    def read(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
        lines = (folder / "runs" / name / "events/run.jsonl").read_text("utf-8").splitlines()
        losses = [event["loss"] for line in lines if (event := json.loads(line))["type"] == "step"]
        return losses, load_file(folder / "runs" / name / "final/adapter_model.safetensors")

    losses, weights = read("replicated")
    assert len(losses) == 3 and losses[2] < losses[0]
    resumed = read("resumed")
    assert resumed[0] == losses[1:] and all(value.equal(weights[name]) for name, value in resumed[1].items())
    sharded = read("sharded")
    assert sharded[0] == pytest.approx(losses, rel=1e-5)
    for name, value in sharded[1].items():
        assert (value - weights[name]).norm() < 1e-5 * weights[name].norm(), name
    # The result, a plain adapter on the base, and the checkpoint, on what was left of the base, answer alike.
    loaded = load_config(folder / "extras-pissa-llama3_lora_sft.yaml")
    RunFolder(folder / "runs/sharded").config.write_text(resolved_yaml(loaded), "utf-8")
    logits = []
    for step in (None, 3):
        lm = load_trained(find_trained(str(folder / "runs/sharded"), step=step, say=print), dtype=torch.float32)
        with torch.no_grad():
            logits.append(lm(input_ids=torch.arange(3, 43)[None]).logits)
    assert (logits[0] - logits[1]).abs().max() < 1e-4
