"""Runs one fine-tune of `sft.py` with a peer, in that peer's own environment: trainer, trl, llamafactory,
unsloth or torchtune.

    PYTHON benchmarks/sft_peers.py CASE.json

CASE.json: tool, model (folder), data (messages file), steps, method, precision, packed, max_length, rows, accumulation,
progress (a file), work (a folder). After each optimizer step a line with its real tokens goes to `progress`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

LORA = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": "all-linear"}


class Counter:
    """Counts what is no padding in the batches that a step is given, and writes a line after each step."""

    def __init__(self, case: dict[str, Any]) -> None:
        rank = os.environ.get("RANK", "0")
        self.file = open(f"{case['progress']}.{rank}", "a", encoding="utf-8")  # noqa: SIM115
        self.real = self.slots = 0

    def seen(self, inputs: dict[str, Any]) -> None:
        import torch

        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        self.slots += ids.numel()
        if mask is not None and mask.ndim == 4:  # whom each token sees: padding does not even see itself
            itself = mask.diagonal(dim1=-2, dim2=-1)
            self.real += int((itself if itself.dtype == torch.bool else itself == 0).sum())
        else:
            self.real += ids.numel() if mask is None else int((mask != 0).sum())

    def stepped(self, step: int) -> None:
        self.file.write(json.dumps({"step": step, "num_tokens": self.real, "num_slots": self.slots}) + "\n")
        self.file.flush()
        self.real = self.slots = 0


def install(counter: Counter) -> Any:
    """Count in every trainer that descends from transformers'; returns the callback that ends a step."""
    import transformers

    plain = transformers.Trainer.training_step

    def training_step(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        counter.seen(inputs)
        return plain(self, model, inputs, *args, **kwargs)

    transformers.Trainer.training_step = training_step

    class Ends(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            counter.stepped(state.global_step)

    return Ends()


def tokenize(case: dict[str, Any]) -> tuple[Any, Any]:
    """Ids and labels (the assistant's turns) by the model's own template, as duoka's."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(case["model"])
    rows = []
    for line in Path(case["data"]).read_text(encoding="utf-8").splitlines():
        messages = json.loads(line)["messages"]
        ids: list[int] = []
        labels: list[int] = []
        for place, message in enumerate(messages):
            asks = message["role"] != "assistant"
            text = tokenizer.apply_chat_template(messages[: place + 1], tokenize=False, add_generation_prompt=asks)
            new = tokenizer(text, add_special_tokens=False)["input_ids"][len(ids) :]
            ids += new
            labels += [-100] * len(new) if asks else new
        rows.append({"input_ids": ids[: case["max_length"]], "labels": labels[: case["max_length"]]})
    return tokenizer, Dataset.from_list(rows)


def common(case: dict[str, Any]) -> dict[str, Any]:
    return {
        "output_dir": case["work"], "per_device_train_batch_size": case["rows"], "max_steps": case["steps"],
        "gradient_accumulation_steps": case["accumulation"], "learning_rate": 2e-5,
        "bf16": case["precision"] == "bf16", "use_cpu": True, "save_strategy": "no", "report_to": "none",
        "logging_steps": 1, "seed": 0, "disable_tqdm": True,
    }  # fmt: skip


def run_trainer(case: dict[str, Any], ends: Any) -> None:
    import torch
    from transformers import (
        AutoModelForCausalLM,
        DataCollatorForSeq2Seq,
        DataCollatorWithFlattening,
        Trainer,
        TrainingArguments,
    )  # fmt: skip

    tokenizer, rows = tokenize(case)
    model = AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.float32)
    if case["method"] == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **LORA))
    collate = DataCollatorWithFlattening() if case["packed"] else DataCollatorForSeq2Seq(tokenizer)
    arguments = TrainingArguments(**common(case))
    Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate, callbacks=[ends]).train()


def run_trl(case: dict[str, Any], ends: Any) -> None:
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    tokenizer, rows = tokenize(case)
    tuned = {"packing": True, "gradient_checkpointing": False} if case["packed"] else {}
    arguments = SFTConfig(
        **common(case), max_length=case["max_length"], model_init_kwargs={"dtype": "float32"}, **tuned
    )
    adapter = LoraConfig(task_type="CAUSAL_LM", **LORA) if case["method"] == "lora" else None
    SFTTrainer(
        model=case["model"], args=arguments, train_dataset=rows, processing_class=tokenizer, peft_config=adapter,
        callbacks=[ends],
    ).train()  # fmt: skip


def run_llamafactory(case: dict[str, Any], ends: Any) -> None:
    from llamafactory.train.tuner import run_exp

    folder = Path(case["work"])
    folder.mkdir(parents=True, exist_ok=True)
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    entry = {"file_name": case["data"], "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": tags}
    (folder / "dataset_info.json").write_text(json.dumps({"chats": entry}), encoding="utf-8")
    tuned = {"packing": True, "neat_packing": True, "disable_gradient_checkpointing": True} if case["packed"] else {}
    method: dict[str, Any] = {"finetuning_type": "full"}
    if case["method"] == "lora":
        method = {"finetuning_type": "lora", "lora_rank": 8, "lora_alpha": 16, "lora_target": "all"}
    run_exp(
        {
            **common(case), **method, **tuned, "stage": "sft", "do_train": True, "model_name_or_path": case["model"],
            "template": "smollm2", "dataset": "chats", "dataset_dir": str(folder), "cutoff_len": case["max_length"],
            "overwrite_output_dir": True, "overwrite_cache": True, "preprocessing_num_workers": 1,
        },
        callbacks=[ends],
    )  # fmt: skip


def run_unsloth(case: dict[str, Any], ends: Any) -> None:
    from trl import SFTConfig, SFTTrainer
    from unsloth import FastLanguageModel

    _, rows = tokenize(case)
    model, tokenizer = FastLanguageModel.from_pretrained(
        case["model"], max_seq_length=case["max_length"], load_in_4bit=False, full_finetuning=case["method"] == "full"
    )
    if case["method"] == "lora":
        linears = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        tuned = {"use_gradient_checkpointing": False} if case["packed"] else {}
        model = FastLanguageModel.get_peft_model(
            model, r=8, lora_alpha=16, lora_dropout=0, target_modules=linears, **tuned
        )
    tuned = {"packing": True, "gradient_checkpointing": False} if case["packed"] else {}
    arguments = SFTConfig(**common(case), max_length=case["max_length"], **tuned)
    SFTTrainer(
        model=model, args=arguments, train_dataset=rows, processing_class=tokenizer, callbacks=[ends]
    ).train()  # fmt: skip


def main() -> None:
    case = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if case["tool"] == "unsloth":  # before what it changes
        import unsloth  # noqa: F401
    if case["tool"] == "torchtune":  # has no part of transformers' trainer
        import sft_torchtune

        return sft_torchtune.run(case, Counter(case))
    ends = install(Counter(case))
    runs = {"trainer": run_trainer, "trl": run_trl, "llamafactory": run_llamafactory, "unsloth": run_unsloth}
    runs[case["tool"]](case, ends)


if __name__ == "__main__":
    main()
