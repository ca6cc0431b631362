"""Runs one fine-tune of `sft.py` with torchtune's own recipes for one device (see `sft_peers.py`, which starts it).

SmolLM2 is a Llama whose embeddings are tied, so torchtune's Llama 3.2 is built in its sizes (its rotary positions are
scaled, which costs nothing more). The recipes save at an epoch's end and cannot be told not to: that is left out.
"""

from __future__ import annotations

import importlib.util
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

from sft_peers import Counter, tokenize

PAD = 0  # <|endoftext|>, which no conversation holds


class Rows:
    """What torchtune expects of a dataset: `tokens` and `labels` of each row."""

    def __init__(self, path: str) -> None:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        self.rows = [{"tokens": row["input_ids"], "labels": row["labels"]} for row in found]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> dict[str, list[int]]:
        return self.rows[place]


def rows_of(tokenizer: Any, path: str, max_length: int, packed: bool) -> Any:
    if not packed:
        return Rows(path)
    from torchtune.datasets import PackedDataset

    return PackedDataset(Rows(path), max_seq_len=max_length, padding_idx=PAD)


def write_rows(case: dict[str, Any]) -> Path:
    """By the model's own template, in a process of its own: torchtune itself needs no transformers."""
    path = Path(case["work"]) / "rows.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, __file__, json.dumps(case), str(path)], check=True)
    return path


class Tokenizer:
    """All that a recipe itself asks of one: rows come tokenized."""

    pad_id = PAD


def model_of(case: dict[str, Any]) -> dict[str, Any]:
    shape = json.loads((Path(case["model"]) / "config.json").read_text(encoding="utf-8"))
    sizes = {
        "vocab_size": shape["vocab_size"], "num_layers": shape["num_hidden_layers"],
        "num_heads": shape["num_attention_heads"], "num_kv_heads": shape["num_key_value_heads"],
        "embed_dim": shape["hidden_size"], "intermediate_dim": shape["intermediate_size"],
        "max_seq_len": case["max_length"], "norm_eps": shape["rms_norm_eps"],
    }  # fmt: skip
    if case["method"] == "full":
        return {"_component_": "torchtune.models.llama3_2.llama3_2", **sizes}
    return {
        "_component_": "torchtune.models.llama3_2.lora_llama3_2", **sizes, "apply_lora_to_mlp": True,
        "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"], "lora_rank": 8, "lora_alpha": 16,
    }  # fmt: skip


def config_of(case: dict[str, Any], rows: Path) -> dict[str, Any]:
    """Their configs for one device (`llama3_2/1B_full_single_device`, `..._lora_...`), with this case's sizes."""
    files = sorted(file.name for file in Path(case["model"]).glob("*.safetensors"))
    return {
        "output_dir": case["work"], "device": "cpu", "dtype": case["precision"], "seed": 0, "shuffle": True,
        "epochs": 1, "max_steps_per_epoch": case["steps"], "batch_size": case["rows"],
        "gradient_accumulation_steps": case["accumulation"], "clip_grad_norm": 1.0, "compile": False,
        "enable_activation_checkpointing": False, "optimizer_in_bwd": False, "resume_from_checkpoint": False,
        "log_every_n_steps": 1, "model": model_of(case),
        "dataset": {
            "_component_": "sft_torchtune.rows_of", "path": str(rows), "max_length": case["max_length"],
            "packed": case["packed"],
        },
        "tokenizer": {"_component_": "sft_torchtune.Tokenizer"},
        "optimizer": {"_component_": "torch.optim.AdamW", "fused": True, "lr": 2e-5},
        "lr_scheduler": {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup", "num_warmup_steps": 1,
        },
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": case["model"],
            "checkpoint_files": files, "output_dir": case["work"], "model_type": "LLAMA3_2",
        },
        "metric_logger": {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": case["work"]},
    }  # fmt: skip


def recipe_of(method: str) -> Any:
    """Its recipes are scripts: their package raises when it is imported."""
    name = {"full": "full_finetune_single_device.py", "lora": "lora_finetune_single_device.py"}[method]
    package = importlib.util.find_spec("torchtune")
    assert package is not None
    path = Path(str(package.origin)).parents[1] / "recipes" / name
    names = runpy.run_path(str(path))
    return names["FullFinetuneRecipeSingleDevice" if method == "full" else "LoRAFinetuneRecipeSingleDevice"]


def run(case: dict[str, Any], counter: Counter) -> None:
    from omegaconf import OmegaConf

    class Watched(recipe_of(case["method"])):  # type: ignore[misc]
        def _loss_step(self, batch: dict[str, Any]) -> Any:
            counter.slots += batch["tokens"].numel()
            counter.real += int((batch["tokens"] != PAD).sum())
            return super()._loss_step(batch)

        def save_checkpoint(self, epoch: int) -> None:
            pass

    config = OmegaConf.create(config_of(case, write_rows(case)))
    recipe = Watched(cfg=config)
    recipe.setup(cfg=config)
    log = recipe._metric_logger.log_dict

    def log_dict(payload: Any, step: int) -> None:
        log(payload, step)
        counter.stepped(step)

    recipe._metric_logger.log_dict = log_dict
    recipe.train()


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(list(tokenize(json.loads(sys.argv[1]))[1])), encoding="utf-8")
