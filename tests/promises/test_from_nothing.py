"""A model from nothing is the same model, and learns the same, whoever draws how much of it."""

import json
import math
import sysconfig
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import build_tiny_tokenizer
from worlds import train_all

from duoka.config.load import load_config
from duoka.model.build import load_model
from duoka.model.source import model_folder

TOLERANCE = 1e-5
STEPS = 24

YAML = """
model: {{depth: 2, tokenizer: {tokenizer}, width: 64, head_dim: 16, kv_heads: 2}}
data: {{train: [{text}], eval: [{held_out}], max_length: 64}}
optim: {{lr: 0.02, adamw_lr: 0.02, embedding_lr: 0.1, head_lr: 0.02}}
train: {{global_batch: 1024 tokens, max_steps: {steps}, precision: fp32, seed: 5, eval_every: 100}}
checkpoint: {{every: 100}}
log: {{to: []}}
"""
CUT = "train.micro_batch=200 tokens"
SPLITS = {
    "1 process": (1, []),
    "1 process, accumulating": (1, [CUT]),
    "2 processes, ddp": (2, ["parallel.strategy=ddp"]),
    "2 processes, zero1": (2, ["parallel.strategy=zero1", CUT]),
    "2 processes, fsdp": (2, ["parallel.strategy=fsdp"]),
}


def write_text(path, first, last):
    """Files of Python's own library as text."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = [file.read_text(encoding="utf-8")[:6000] for file in sorted(folder.glob("*.py"))[first:last]]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts if text.strip()), encoding="utf-8")
    return texts


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every split trained, and a twin: the same model begun from a standard folder of its weights."""
    folder = tmp_path_factory.mktemp("nothing")
    build_tiny_tokenizer().save_pretrained(folder / "tokenizer")
    write_text(folder / "text.jsonl", 0, 12)
    write_text(folder / "held_out.jsonl", 12, 13)
    yaml = folder / "new.yaml"
    paths = {"tokenizer": folder / "tokenizer", "text": folder / "text.jsonl", "held_out": folder / "held_out.jsonl"}
    yaml.write_text(YAML.format(steps=STEPS, **paths), encoding="utf-8")
    loaded = load_config(yaml)
    begun = load_model(model_folder(loaded.config.model, folder), dtype=torch.float32, seed=5, attention="sdpa")
    begun.save_pretrained(folder / "begun")
    build_tiny_tokenizer().save_pretrained(folder / "begun")
    text = yaml.read_text(encoding="utf-8").replace(f"depth: 2, tokenizer: {paths['tokenizer']}", "name: begun")
    text = text.replace(", width: 64, head_dim: 16, kv_heads: 2", "")
    settings = "name: muon, betas: [0.8, 0.95], eps: 1.0e-10, schedule: wsd, decay: 0.5, warmup: 0.01, "
    twin = folder / "twin.yaml"
    twin.write_text(text.replace("optim: {", "optim: {" + settings) + "stage: pretrain\n", encoding="utf-8")

    for size in (1, 2):
        jobs = [(yaml, more, folder / name) for name, (number, more) in SPLITS.items() if number == size]
        train_all(jobs + ([(twin, [], folder / "twin")] if size == 1 else []), size)
    return folder


def events(folder, kind):
    lines = (folder / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines()
    return [line for line in map(json.loads, lines) if line["type"] == kind]


@pytest.mark.parametrize("name", [*list(SPLITS)[1:], "twin"])
def test_any_split_begins_and_learns_the_same(runs, name):
    """The twin knows nothing of depth: its settings are written, its weights are read from a folder."""
    ours, one = events(runs / name, "step"), events(runs / "1 process", "step")
    assert len(ours) == len(one) == STEPS
    for key in ("loss", "grad_norm"):
        error = max(abs(a[key] / b[key] - 1) for a, b in zip(ours, one, strict=True))
        assert error < TOLERANCE, f"{key} is off by {error}"
    weights, wanted = (load_file(runs / run / "final" / "model.safetensors") for run in (name, "1 process"))
    assert weights.keys() == wanted.keys()
    for key, value in wanted.items():
        error = float((weights[key] - value).norm() / value.norm())
        assert error < 20 * TOLERANCE, f"{key} is off by {error}"


def test_it_begins_knowing_nothing_and_learns_more_than_how_often_bytes_are(runs):
    """A loss below the entropy of single bytes needs more than counting them: what stands before is used."""
    steps = events(runs / "1 process", "step")
    assert steps[0]["loss"] == pytest.approx(math.log(320), abs=0.01)  # 259 tokens, in rows up to a multiple of 64
    texts = (json.loads(line)["text"] for line in (runs / "text.jsonl").read_text(encoding="utf-8").splitlines())
    counts = Counter(byte for text in texts for byte in text.encode())
    total = sum(counts.values())
    unigram = -sum(count / total * math.log(count / total) for count in counts.values())
    assert steps[-1]["loss"] < unigram, f"{steps[-1]['loss']} after {STEPS} steps; counting bytes alone gives {unigram}"
