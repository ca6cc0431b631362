"""Runs one case of `rl.py` with TRL's GRPOTrainer, in TRL's own environment.

PYTHON benchmarks/rl_peers.py CASE.json
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    case = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    score = runpy.run_path(case["rewards"])["vowels"]
    rows = [json.loads(line) for line in Path(case["data"]).read_text(encoding="utf-8").splitlines()]
    total = case["prompts"] * case["answers"]
    at_once = total if case["tool"] == "trl-tuned" else case["answers"]
    tuned: dict[str, Any] = {"gradient_checkpointing": False} if case["tool"] == "trl-tuned" else {}
    arguments = GRPOConfig(
        output_dir=case["work"], per_device_train_batch_size=at_once, gradient_accumulation_steps=total // at_once,
        num_generations=case["answers"], max_completion_length=case["room"], max_steps=case["steps"],
        learning_rate=case["lr"], lr_scheduler_type="constant", weight_decay=0.0, temperature=1.0, bf16=False,
        loss_type="grpo", use_cpu=True, save_strategy="no", report_to="none", logging_steps=1, seed=0,
        disable_tqdm=True, model_init_kwargs={"dtype": "float32"}, **tuned,
    )  # fmt: skip
    seen = 0.0

    def vowels(completions: list[Any], **_: Any) -> list[float]:
        return [score(None, one[0]["content"], None) for one in completions]

    class Ends(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            nonlocal seen
            if "reward" in (logs or {}):
                line = {"step": state.global_step, "num_tokens": int(logs["num_tokens"] - seen), "loss": logs["loss"],
                        "reward": logs["reward"], "length": logs.get("completions/mean_length")}  # fmt: skip
                seen = logs["num_tokens"]
                with open(case["progress"], "a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")

    GRPOTrainer(
        model=case["model"], args=arguments, reward_funcs=vowels, train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(case["model"]), callbacks=[Ends()],
    ).train()  # fmt: skip


if __name__ == "__main__":
    main()
