"""Keys of LLaMA-Factory's files do what they say: a seeded sample of 40 is trained with, and its effect looked at."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tiny import write_conversations, write_tiny_model
from worlds import train_all

from duoka.config.dialects.all import dialects

NUM_SAMPLED, SEED = 40, 11
BASE: dict[str, Any] = {
    "model_name_or_path": "tiny", "stage": "sft", "do_train": True, "finetuning_type": "lora", "lora_rank": 4,
    "lora_target": "all", "dataset": "chats", "dataset_dir": "data", "template": "chatml", "cutoff_len": 256,
    "output_dir": "out",
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "max_steps": 2,
    "lr_scheduler_type": "constant", "save_steps": 100, "report_to": "none", "logging_steps": 100,
}  # fmt: skip
FULL, FREEZE = {"finetuning_type": "full"}, {"finetuning_type": "freeze", "freeze_trainable_layers": 1}
TWO_EPOCHS = {"max_steps": -1, "num_train_epochs": 2, "max_samples": 8, "eval_dataset": "more"}


@dataclass
class Seen:
    """What a run left behind."""

    folder: Path

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.folder / "events/run.jsonl").read_text("utf-8").splitlines()
        return [event for line in lines if (event := json.loads(line))["type"] == kind]

    def of_steps(self, name: str) -> list[Any]:
        return [event[name] for event in self.events("step")]

    @property
    def layout(self) -> dict[str, Any]:
        return dict(self.events("run")[0]["layout"])

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        (file,) = (self.folder / "final").glob("*.safetensors")
        return load_file(file)

    @property
    def adapter(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "final/adapter_config.json").read_text("utf-8")))

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "checkpoints").iterdir())

    def trained_parts(self, model: Path) -> set[str]:
        before = load_file(model / "model.safetensors")
        return {name for name, value in self.weights.items() if not value.equal(before[name])}


def other_weights(seen: Seen, base: Seen) -> bool:
    """The first loss is that of the base; what was learned from it is not."""
    same_start = seen.of_steps("loss")[0] == base.of_steps("loss")[0]
    return same_start and any(not value.equal(base.weights[name]) for name, value in seen.weights.items())


def b_norm(seen: Seen) -> float:
    return sum(float(value.norm()) for name, value in seen.weights.items() if "lora_B" in name)


def rates(*wanted: float) -> Callable[[Seen, Seen], bool]:
    return lambda seen, base: seen.of_steps("lr") == pytest.approx(list(wanted))


def layout(**wanted: Any) -> Callable[[Seen, Seen], bool]:
    return lambda seen, base: all(seen.layout[name] == value for name, value in wanted.items())


def trains(*parts: str) -> Callable[[Seen, Seen], bool]:
    """Each part has moved, and nothing outside them."""

    def check(seen: Seen, base: Seen) -> bool:
        trained = seen.trained_parts(seen.folder.parent / "tiny")
        inside = [part for name in trained for part in parts if part in name]
        return set(inside) == set(parts) and len(inside) == len(trained)

    return check


def evaluated(*steps: int) -> Callable[[Seen, Seen], bool]:
    return lambda seen, base: sorted({event["step"] for event in seen.events("eval")}) == list(steps)


# key: (its value, what else stands there, what must be seen of the run beside that of BASE)
EFFECTS: dict[str, tuple[Any, dict[str, Any], Callable[[Seen, Seen], bool]]] = {
    "model_name_or_path": ("tiny2", {}, lambda s, b: s.of_steps("loss")[0] != b.of_steps("loss")[0]),
    "template": ("default", {}, lambda s, b: s.of_steps("num_tokens") == b.of_steps("num_tokens")),  # its own is chatml
    "stage": ("pt", {"dataset": "texts"}, lambda s, b: s.of_steps("num_targets")[0] > b.of_steps("num_targets")[0]),
    "finetuning_type": ("full", {}, lambda s, b: (s.folder / "final/model.safetensors").is_file()),
    "freeze_trainable_layers": (-1, FREEZE, trains("layers.0.")),
    "freeze_trainable_modules": ("mlp", FREEZE, trains("layers.3.mlp.")),
    "freeze_extra_modules": ("norm", FREEZE, trains("layers.3.", "model.norm.")),
    "use_llama_pro": (True, {**FREEZE, "freeze_trainable_layers": 2}, trains("layers.1.", "layers.3.")),
    "lora_rank": (2, {}, lambda s, b: all(2 in value.shape for value in s.weights.values())),
    "lora_alpha": (3, {}, lambda s, b: s.adapter["lora_alpha"] == 3),
    "use_rslora": (True, {"lora_alpha": 3}, lambda s, b: s.adapter["lora_alpha"] == 6),
    "loraplus_lr_ratio": (16, {}, lambda s, b: b_norm(s) > 8 * b_norm(b)),
    "pissa_init": (
        True, {},
        lambda s, b: s.of_steps("loss")[0] == pytest.approx(b.of_steps("loss")[0], rel=1e-5)
        and all(8 in value.shape for value in s.weights.values()),
    ),
    "use_muon": (True, {}, other_weights),
    "use_dft_loss": (True, {}, lambda s, b: s.of_steps("loss")[0] < 0.5 * b.of_steps("loss")[0]),
    "lora_dropout": (0.5, {}, lambda s, b: s.of_steps("loss")[1] != b.of_steps("loss")[1]),
    "lora_target": ("q_proj", {}, lambda s, b: all("q_proj" in name for name in s.weights)),
    "dataset": ("more", {}, lambda s, b: s.of_steps("num_tokens") != b.of_steps("num_tokens")),
    "eval_dataset": ("more", {}, lambda s, b: s.events("eval")[-1]["num_samples"] == 9),
    "val_size": (0.25, {}, lambda s, b: s.events("eval")[-1]["num_samples"] == 6),
    "max_samples": (3, {}, lambda s, b: s.of_steps("num_samples") == [3, 3]),
    "dataset_dir": ("elsewhere", {}, lambda s, b: s.of_steps("num_tokens") != b.of_steps("num_tokens")),
    "cutoff_len": (32, {}, lambda s, b: max(s.of_steps("num_tokens")) <= 4 * 32 < max(b.of_steps("num_tokens"))),
    "packing": (False, {}, layout(packing=False)),
    "neat_packing": (True, {"packing": False}, layout(packing=True)),
    "train_on_prompt": (True, {}, lambda s, b: s.of_steps("num_targets")[0] > b.of_steps("num_targets")[0]),
    "mask_history": (True, {}, lambda s, b: s.of_steps("num_targets")[0] < b.of_steps("num_targets")[0]),
    "adapter_name_or_path": ("base/final", {}, lambda s, b: s.of_steps("loss")[0] != b.of_steps("loss")[0]),
    "create_new_adapter": (
        True, {"adapter_name_or_path": "base/final", "lora_rank": 2},
        lambda s, b: s.adapter["r"] == 4 + 2 and s.of_steps("loss")[0] != b.of_steps("loss")[0],
    ),
    "label_smoothing_factor": (0.3, {}, lambda s, b: s.of_steps("loss")[0] != b.of_steps("loss")[0]),
    "learning_rate": ("3e-3", {}, rates(3e-3, 3e-3)),
    "lr_scheduler_type": ("linear", {}, rates(1e-2, 5e-3)),
    "lr_scheduler_kwargs": ({"min_lr_rate": 0.5}, {"lr_scheduler_type": "cosine_with_min_lr"}, rates(1e-2, 7.5e-3)),
    "warmup_ratio": (0.9, {"lr_scheduler_type": "linear"}, rates(5e-3, 1e-2)),
    "warmup_steps": (2, {"lr_scheduler_type": "linear", "max_steps": 3}, rates(5e-3, 1e-2, 1e-2)),
    "weight_decay": (0.5, {}, other_weights),
    "max_grad_norm": (1e-9, {}, other_weights),
    "adam_beta1": (0.5, {}, other_weights),
    "adam_beta2": (0.9, {}, other_weights),
    "adam_epsilon": (1.0, {}, other_weights),
    "num_train_epochs": (1, {"max_steps": -1}, lambda s, b: len(s.events("step")) == 6),
    "max_steps": (3, {}, lambda s, b: len(s.events("step")) == 3),
    "per_device_train_batch_size": (3, {}, lambda s, b: s.of_steps("num_samples") == [6, 6]),
    "gradient_accumulation_steps": (1, {}, lambda s, b: s.of_steps("num_samples") == [2, 2]),
    "bf16": (True, {}, layout(precision="bf16")),
    "pure_bf16": (True, {}, layout(precision="bf16")),
    "fp8": (True, FULL, layout(precision="fp8")),
    "gradient_checkpointing": (True, {}, layout(recompute="full")),
    "activation_checkpointing": (True, {}, layout(recompute="full")),
    "disable_gradient_checkpointing": (True, {}, layout(recompute="none")),
    "seed": (7, {}, lambda s, b: s.of_steps("num_tokens") != b.of_steps("num_tokens")),
    "save_steps": (1, {}, lambda s, b: s.checkpoints == ["step-00000001", "step-00000002"] != b.checkpoints),
    "save_strategy": (
        "epoch", {"max_steps": -1, "num_train_epochs": 2, "max_samples": 8},
        lambda s, b: s.checkpoints == ["step-00000002", "step-00000004"],
    ),
    "eval_strategy": ("epoch", {**TWO_EPOCHS, "eval_steps": 1}, evaluated(2, 4)),
    "evaluation_strategy": ("epoch", {**TWO_EPOCHS, "eval_steps": 1}, evaluated(2, 4)),
    "save_total_limit": (1, {"save_steps": 1}, lambda s, b: s.checkpoints == ["step-00000002"]),
    "eval_steps": (1, {"val_size": 0.25}, lambda s, b: len({event["step"] for event in s.events("eval")}) == 2),
    "report_to": ("tensorboard", {}, lambda s, b: any((s.folder / "tensorboard").iterdir())),
}  # fmt: skip
# What a run of one process does not show: the test that does, by file and a word in it.
SHOWN_ELSEWHERE = {
    "moe_aux_loss_coef": "promises/test_experts.py::balance",
    "accelerator_config": "unit/test_dialect_strangers.py::split_batches",
    "data_seed": "unit/test_dialects.py::data_seed", "enable_thinking": "unit/test_dialects.py::enable_thinking",
    "preserve_thinking": "unit/test_dialects.py::preserve_thinking", "do_train": "unit/test_dialects.py::do_train",
    "ddp_backend": "promises/test_world_sanity.py::backend", "ddp_timeout": "promises/test_launch.py::timeout",
    "ddp_bucket_cap_mb": "promises/test_ddp_options.py::bucket_mb",
    "ddp_find_unused_parameters": "promises/test_ddp_options.py::find_unused_parameters",
    "ddp_static_graph": "promises/test_any_split.py::static_graph",
    "deepspeed": "promises/test_guides_corpus.py::ds_z3_config", "fsdp": "promises/test_any_split.py::fsdp",
    "fp16": "gpu/test_gpu_promises.py::fp16", "model_revision": "unit/test_model_source.py::revision",
    "optim": "promises/test_optimizers.py::adamw", "output_dir": "promises/test_guides_files.py::ddp_training_output",
    "logging_steps": "unit/test_cli_train.py::log.every", "pissa_iter": "unit/test_pissa.py::pissa_iterations",
    "preprocessing_num_workers": "unit/test_data_prepare.py::workers", "quantization_bit": "unit/test_quantize.py::nf4",
    "quantization_type": "unit/test_quantize.py::fp4", "double_quantization": "unit/test_quantize.py::double",
    "quantization_method": "unit/test_dialects.py::quantization_method",
    "resume_from_checkpoint": "promises/test_guides_corpus.py::resume_from_checkpoint",
    "torch_compile": "promises/test_ddp_options.py::train.compile",
    "trust_remote_code": "unit/test_foreign_task.py::trust_remote_code",
    "train_from_scratch": "promises/test_from_nothing.py::from_scratch",
    "pref_loss": "promises/test_pairs_run.py::pref_loss", "pref_beta": "promises/test_pairs_run.py::pref_beta",
    "pref_ftx": "promises/test_pairs.py::sft_weight", "simpo_gamma": "promises/test_pairs.py::gamma",
    "dpo_label_smoothing": "promises/test_pairs.py::label_smoothing", "ld_alpha": "promises/test_pairs.py::ld_alpha",
    "kto_chosen_weight": "promises/test_labeled_run.py::kto_chosen_weight",
    "kto_rejected_weight": "promises/test_labeled_run.py::kto_rejected_weight",
    **{name: f"unit/test_dialects.py::{name}" for name in (
        "pref_bco_weight", "ref_model", "ref_model_adapters", "ref_model_quantization_bit",
    )},
    **{name: f"unit/test_dialect_ppo.py::{name}" for name in (
        "ppo_buffer_size", "ppo_epochs", "ppo_score_norm", "ppo_whiten_rewards", "reward_model", "reward_model_type",
    )},
}  # fmt: skip
# Drawn from the dialect's own table: a key that comes to be called implemented has to show what it does.
IMPLEMENTED = sorted(name for name, row in dialects()["llamafactory"].rows.items() if row.state == "implemented")
SAMPLE = sorted(random.Random(SEED).sample([name for name in IMPLEMENTED if name not in SHOWN_ELSEWHERE], NUM_SAMPLED))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs, one world for all of them: the base, and one for each key of the sample."""
    folder = tmp_path_factory.mktemp("keys")
    write_tiny_model(folder / "tiny", layers=4)
    write_tiny_model(folder / "tiny2", seed=1, layers=4)
    info: dict[str, Any] = {}
    for name, count, seed in (("chats", 24, 0), ("more", 9, 5)):
        path = write_conversations(folder / f"{name}.jsonl", count, seed=seed)
        info[name] = {"file_name": str(path), "formatting": "sharegpt", "columns": {"messages": "messages"},
                      "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user",
                               "assistant_tag": "assistant"}}  # fmt: skip
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": f"word {n} " * 40}) for n in range(24)), "utf-8")
    info["texts"] = {"file_name": str(folder / "texts.jsonl"), "columns": {"prompt": "text"}}
    for place, entries in (("data", info), ("elsewhere", {"chats": info["more"]})):
        (folder / place).mkdir()
        (folder / place / "dataset_info.json").write_text(json.dumps(entries), "utf-8")
    jobs = []
    for name in ("base", *SAMPLE):
        value, beside, _ = EFFECTS.get(name, (None, {}, None))
        keys = BASE | beside | ({} if name == "base" else {name: value})
        for key in ("model_name_or_path", "dataset_dir", "adapter_name_or_path"):
            if key in keys:
                keys[key] = str(folder / keys[key])
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(keys, sort_keys=False), "utf-8")
        jobs.append((str(folder / f"{name}.yaml"), [], str(folder / name)))
    train_all(jobs, 1)
    return folder


def test_every_implemented_key_has_an_effect_to_be_seen_or_a_test_that_shows_it() -> None:
    assert len(SAMPLE) == NUM_SAMPLED
    assert sorted([*EFFECTS, *SHOWN_ELSEWHERE]) == IMPLEMENTED
    for name, test in SHOWN_ELSEWHERE.items():
        file, _, word = test.partition("::")
        assert word in (Path(__file__).parents[1] / file).read_text("utf-8"), name


@pytest.mark.parametrize("name", SAMPLE)
def test_a_key_has_its_effect_on_the_run(folder: Path, name: str) -> None:
    seen, base = Seen(folder / name), Seen(folder / "base")
    assert EFFECTS[name][2](seen, base), f"{name}: {EFFECTS[name][0]} made no difference of its kind"
