"""Runs one case of `preferences.py` with TRL's DPOTrainer, in TRL's own environment.

PYTHON benchmarks/preferences_peers.py CASE.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from sft_peers import Counter, install


def main() -> None:
    case = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    counter = Counter(case)
    install(counter)
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

    class Ends(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in (logs or {}):
                facts = {"loss": logs["loss"], "grad_norm": logs["grad_norm"], "margin": logs.get("rewards/margins")}
                line = {"step": state.global_step, "num_tokens": counter.real, **facts}
                counter.file.write(json.dumps(line) + "\n")
                counter.file.flush()
                counter.real = 0

    DPOTrainer(
        model=case["model"], args=arguments, train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(case["model"]), callbacks=[Ends()],
    ).train()  # fmt: skip


if __name__ == "__main__":
    main()
