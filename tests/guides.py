"""What the DDP guide shows, as it stands: its nested YAML and its data set's entry, with names of a model and files.

Two tests read it: what the words mean (tests/unit/test_dialects.py), and that they train (tests/promises).
"""

from __future__ import annotations

import json
from pathlib import Path

from tiny import write_conversations

NESTED = """\
trainer:
  type: "ddp"
  max_epochs: 3
  per_device_train_batch_size: 4
  gradient_accumulation_steps: 2
  learning_rate: 2e-5
  logging_steps: 10
  save_steps: 50
  fp16: true  # 或bf16: true(若硬件支持)
model:
  model_name_or_path: "{model}"
  adapter_name_or_path: "lora"
  lora_rank: 8
  lora_alpha: 16
  lora_dropout: 0.05
data:
  dataset: "my_custom_dataset"
  max_seq_len: 512
  train_split: "train"
  eval_split: "test"
ddp:
  find_unused_parameters: false
  gradient_as_bucket_view: true
  timeout: 180000000
output:
  output_dir: "./ddp_training_output"
  logging_steps: 10
  save_steps: 50
  overwrite_output_dir: true
"""
ENTRY = """\
"my_custom_dataset": {
  "file_name": "my_data.json",
  "formatting": "sharegpt",
  "columns": {
    "messages": "messages"
  },
  "tags": {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system"
  }
}
"""


def write_guides_files(folder: Path, model: Path, num_conversations: int = 32) -> Path:
    """The guide's folder: ddp_train_config.yaml, data/dataset_info.json and the data; returns the YAML."""
    data = folder / "data"
    data.mkdir()
    yaml = folder / "ddp_train_config.yaml"
    yaml.write_text(NESTED.format(model=model), "utf-8")
    (data / "dataset_info.json").write_text(ENTRY, "utf-8")
    lines = write_conversations(folder / "lines.jsonl", num_conversations).read_text("utf-8").splitlines()
    (data / "my_data.json").write_text(json.dumps([json.loads(line) for line in lines], ensure_ascii=False), "utf-8")
    return yaml
