"""In bf16, norms of sharded layers compute with the weights that one process has, not with these in half precision.

Alone: a world of several adds gradients in another order, which in bf16 is seen.
"""

import json
from collections import Counter

import pytest
import torch
from families import write_family
from safetensors.torch import load_file, save_file
from test_sharded import look_at
from tiny import build_tiny_tokenizer, write_conversations
from worlds import run_world, train_all

YAML = """
model: {model}
data: {{train: [{data}], max_length: 256}}
optim: {{lr: 1e-3}}
train: {{max_steps: 1, global_batch: 6, precision: bf16, seed: 7}}
log: {{to: []}}
output: {output}
"""
STRATEGIES = ("fsdp", "zero2")
# Norms with and without biases, of heads, with 1 added to their weights, of a class of their own.
FAMILIES = ("llama", "gpt2", "stablelm", "nemotron", "gemma2", "qwen3")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("norms")
    data = write_conversations(folder / "chats.jsonl", 18, seed=3)
    tokenizer, jobs = build_tiny_tokenizer(), []
    for name in FAMILIES:
        model = write_family(folder / "models" / name, name, tokenizer=tokenizer)
        _make_fine(model / "model.safetensors")
        yaml = folder / f"{name}.yaml"
        yaml.write_text(YAML.format(model=model, data=data, output=folder / "out"), encoding="utf-8")
        for strategy in (*STRATEGIES, "single"):  # the first one starts the group
            jobs.append((str(yaml), [f"parallel.strategy={strategy}"], str(folder / name / strategy)))
    train_all(jobs, 1)
    return folder


def _make_fine(file):
    """Vectors such as training makes them: half precision tells none of them from the next of its numbers, 0.8% off."""
    torch.manual_seed(1)
    weights = load_file(file)
    for one in weights.values():
        one.mul_(1 + 3e-3 * torch.rand_like(one) if one.dim() == 1 else 1)
    save_file(weights, file, metadata={"format": "pt"})


def _numbers(folder, key):
    lines = (folder / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines()
    return [event[key] for event in map(json.loads, lines) if event["type"] == "step"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_sharded_step_is_one_process_step(runs, name, strategy):
    for key, bound in (("loss", 1e-6), ("grad_norm", 5e-5)):
        sharded, alone = (_numbers(runs / name / one, key)[0] for one in (strategy, "single"))
        assert abs(sharded / alone - 1) < bound, f"{key} of {name}: {sharded} under {strategy}, {alone} alone"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_plan_sends_what_the_ledger_counts(runs, strategy):
    """Matrices of layers in two bytes a number; the embedding and norms, which compute in fp32, in four."""
    run_world(2, look_at, str(runs / "llama.yaml"), (strategy,), str(runs))
    facts = json.loads((runs / f"{strategy}-0.json").read_text())
    planned = Counter()
    for kind, sent in facts["plan_sends"]:
        planned[kind] += sent
    for kind, counted in facts["ledger"].items():
        assert abs(planned[kind] / counted["sent_bytes"] - 1) < 0.01, f"{kind}: {planned[kind]}, {counted}"
