"""A guide's YAML and data block train as they stand, and their converted form gives the same losses to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tiny import write_conversations

from duoka.runs.events import global_log, read_events
from duoka.runs.folder import RunFolder

YAML = """\
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


def train(folder: Path, file: str, *more: str) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "duoka", "train", file, "--nproc", "2", *more]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in read_events(global_log(RunFolder(run))) if event["type"] == "step"]


def test_a_guides_files_train_unchanged_and_the_converted_form_gives_the_same_losses(
    tmp_path: Path, tiny_model: Path
) -> None:
    (tmp_path / "ddp_train_config.yaml").write_text(YAML.format(model=tiny_model), "utf-8")
    data = tmp_path / "data"
    data.mkdir()
    (data / "dataset_info.json").write_text(ENTRY, "utf-8")
    lines = write_conversations(tmp_path / "lines.jsonl", 32).read_text("utf-8").splitlines()
    (data / "my_data.json").write_text(json.dumps([json.loads(line) for line in lines], ensure_ascii=False), "utf-8")

    said = train(tmp_path, "ddp_train_config.yaml")
    assert "4 per device x 2 accumulated x 2 processes = train.global_batch 16" in said, said
    theirs = losses(tmp_path / "ddp_training_output")
    assert len(theirs) == 6, "32 samples in batches of 16, three times"

    convert = [sys.executable, "-m", "duoka", "config", "convert", "ddp_train_config.yaml", "-o", "ours.yaml"]
    subprocess.run([*convert, "--nproc", "2"], cwd=tmp_path, check=True, capture_output=True, timeout=60)
    train(tmp_path, "ours.yaml", "output=other")
    assert losses(tmp_path / "other") == theirs
