"""A sample of 131,072 tokens that four processes share: it trains, in the memory that the plan said."""

import json

import pytest
from commands import run_duoka, start_duoka
from test_tensor_runs import told
from tiny import build_tiny_tokenizer

from duoka.runs.folder import RunFolder

TOKENS, RANKS = 131_072, 4
YAML = """
model: {model}
stage: pretrain
data: {{train: [{data}], max_length: {tokens}}}
optim: {{lr: 1e-3}}
train: {{max_steps: 1, global_batch: 1, precision: fp32}}
parallel: {{sequence: {ranks}}}
log: {{to: []}}
output: {output}
"""


def write_model(folder):
    """Little attention, which is all of the time, and a wide MLP, which is much of the memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = build_tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=TOKENS, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_sample_of_128k_tokens_trains_on_four_processes_in_the_planned_memory(tmp_path):
    text = "".join(chr(97 + (n * n // 7) % 26) for n in range(TOKENS + 100))
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": text}) + "\n", encoding="utf-8")
    yaml, run = tmp_path / "long.yaml", RunFolder(tmp_path / "run")
    yaml.write_text(
        YAML.format(
            model=write_model(tmp_path / "model"), data=tmp_path / "long.jsonl", tokens=TOKENS, ranks=RANKS,
            output=run.path,
        ),
        encoding="utf-8",
    )  # fmt: skip
    memory = json.loads(run_duoka("plan", yaml, "--nproc", str(RANKS), "--json").stdout)["memory"]
    process = start_duoka("train", yaml, "--nproc", str(RANKS))
    try:
        output, _ = process.communicate(timeout=800)
    finally:
        process.kill()
    assert process.returncode == 0, output
    (step,) = told(run.path, "step")
    assert step["num_tokens"] == TOKENS, step
    print(memory, step)
    assert memory["low_bytes"] <= step["memory_bytes"] <= memory["high_bytes"], (memory, step)
