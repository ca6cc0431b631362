"""Runs one case of `preferences.py` with TRL's DPOTrainer or with LLaMA-Factory, each in its own environment.

PYTHON benchmarks/preferences_peers.py CASE.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from sft_peers import Counter, install


def ends_of(counter: Counter) -> Any:
    """A callback that writes a line for each step."""
    from transformers import TrainerCallback

    class Ends(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in (logs or {}):
                facts = {"loss": logs["loss"], "grad_norm": logs["grad_norm"], "margin": logs.get("rewards/margins")}
                line = {"step": state.global_step, "num_tokens": counter.real, **facts}
                counter.file.write(json.dumps(line) + "\n")
                counter.file.flush()
                counter.real = 0

    return Ends()


def run_llamafactory(case: dict[str, Any], ends: Any) -> None:
    from llamafactory.train.tuner import run_exp

    folder = Path(case["work"])
    folder.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in Path(case["data"]).read_text(encoding="utf-8").splitlines()]
    pairs = [{"asked": row["prompt"], **{side: row[side][0] for side in ("chosen", "rejected")}} for row in rows]
    (folder / "pairs.json").write_text(json.dumps(pairs), encoding="utf-8")
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    columns = {"messages": "asked", "chosen": "chosen", "rejected": "rejected"}
    entry = {"file_name": str(folder / "pairs.json"), "ranking": True, "formatting": "sharegpt", "columns": columns}
    (folder / "dataset_info.json").write_text(json.dumps({"pairs": {**entry, "tags": tags}}), encoding="utf-8")
    run_exp(
        {
            "stage": "dpo", "do_train": True, "finetuning_type": "full", "pref_beta": 0.1, "pref_loss": "sigmoid",
            "model_name_or_path": case["model"], "template": "smollm2", "dataset": "pairs", "dataset_dir": str(folder),
            "cutoff_len": case["max_length"], "output_dir": str(folder / "out"), "overwrite_output_dir": True,
            "overwrite_cache": True, "preprocessing_num_workers": 1, "per_device_train_batch_size": case["rows"],
            "gradient_accumulation_steps": case["accumulation"], "max_steps": case["steps"], "learning_rate": 1e-5,
            "lr_scheduler_type": "constant", "weight_decay": 0.0, "bf16": False, "use_cpu": True,
            "save_strategy": "no", "report_to": "none", "logging_steps": 1, "seed": 0, "disable_tqdm": True,
        },
        callbacks=[ends],
    )  # fmt: skip


def main() -> None:
    case = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    counter = Counter(case)
    install(counter)
    run = run_llamafactory if case["tool"] == "llamafactory" else run_trl
    run(case, ends_of(counter))


def run_trl(case: dict[str, Any], ends: Any) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    rows = [json.loads(line) for line in Path(case["data"]).read_text(encoding="utf-8").splitlines()]
    tuned: dict[str, Any] = {}
    if case["tool"] == "trl-tuned":
        tuned = {"precompute_ref_log_probs": True, "gradient_checkpointing": False}
    arguments = DPOConfig(
        output_dir=case["work"], per_device_train_batch_size=case["rows"], max_steps=case["steps"],
        gradient_accumulation_steps=case["accumulation"], learning_rate=1e-5, lr_scheduler_type="constant",
        weight_decay=0.0, bf16=False, use_cpu=True, save_strategy="no", report_to="none", logging_steps=1, seed=0,
        disable_tqdm=True, beta=0.1, max_length=case["max_length"], model_init_kwargs={"dtype": "float32"}, **tuned,
    )  # fmt: skip

    DPOTrainer(
        model=case["model"], args=arguments, train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(case["model"]), callbacks=[ends],
    ).train()  # fmt: skip


if __name__ == "__main__":
    main()
