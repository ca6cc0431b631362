"""A guide's script around transformers' own Trainer, which wraps the model by itself: nothing of duoka in it."""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

folder = Path(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.float32)
rows = [{"input_ids": [5, 9, 3, 7, 11 + n], "labels": [5, 9, 3, 7, 11 + n]} for n in range(8)]
settings = TrainingArguments(
    output_dir=str(folder / "out"), max_steps=2, per_device_train_batch_size=2, use_cpu=True, save_strategy="no",
    report_to="none", disable_tqdm=True, learning_rate=1e-2, ddp_find_unused_parameters=False,
)  # fmt: skip
trainer = Trainer(model=model, args=settings, train_dataset=rows)
trainer.train()
wrapped = type(trainer.model_wrapped).__name__
weights = float(sum(one.detach().double().abs().sum() for one in model.parameters()))
facts = {"wrapped": wrapped, "size": settings.world_size, "mode": str(settings.parallel_mode), "weights": weights}
(folder / f"trainer-{settings.process_index}.json").write_text(json.dumps(facts))
