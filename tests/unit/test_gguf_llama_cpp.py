"""GGUF files in llama.cpp itself, where cyllama (its wheel) is installed: the same tokens, the same greedy answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_gguf import LINEAR, LLAMA3, TEXT, YARN, write_model
from transformers import AutoModelForCausalLM

from duoka.data.tokens.tokenizer import load_tokenizer
from duoka.model.gguf import write_gguf

llama_cpp = pytest.importorskip("cyllama.llama.llama_cpp", reason="cyllama is not installed: pip install cyllama")
pytest.importorskip("gguf")
TEXTS = (TEXT, "<|im_start|>user\nHi  42\n\n1. x<|im_end|>\n", "a\tb  cé 多卡\r\n  x's I'M 12345")
BEGIN, COUNT = (5, 6, 7, 20, 30, 40, 41, 42), 24


def greedy(model, ids: tuple[int, ...], count: int) -> list[int]:
    context = llama_cpp.LlamaContext(model, llama_cpp.LlamaContextParams())
    sampler = llama_cpp.LlamaSampler(llama_cpp.LlamaSamplerChainParams())
    sampler.add_greedy()
    found: list[int] = []
    batch = llama_cpp.llama_batch_get_one(list(ids))
    while len(found) < count:
        context.decode(batch)
        found.append(sampler.sample(context, -1))
        batch = llama_cpp.llama_batch_get_one(found[-1:], len(ids) + len(found) - 1)
    return found


@pytest.mark.parametrize(
    ("kind", "stored", "options"),
    [
        ("llama", "f16", {"attention_bias": True, "mlp_bias": True}),
        ("llama", "f32", {"tied": False, "head_dim": 32}),
        ("llama", "f32", {"tied": False, "rope_parameters": LLAMA3}),
        ("llama", "f32", {"tied": False, "rope_parameters": YARN}),
        ("qwen2", "bf16", {"tied": False}),
        ("qwen3", "f32", {"tied": False, "rope_parameters": LINEAR, "head_dim": 32}),
        ("qwen2", "f32", {"tied": False, "rope_parameters": YARN}),
        ("qwen3", "f32", {"head_dim": 32}),
    ],
)
def test_tokens_and_answers_are_those_of_the_folder(tmp_path: Path, kind: str, stored: str, options: dict) -> None:
    folder = write_model(tmp_path / "model", kind, **options)
    llama_cpp.disable_logging()
    model = llama_cpp.LlamaModel(str(write_gguf(folder, stored, "model").path), llama_cpp.LlamaModelParams())
    vocabulary, tokenizer = model.get_vocab(), load_tokenizer(folder)
    for text in TEXTS:
        assert list(vocabulary.tokenize(text, False, True)) == tokenizer.encode(text)[0]
    assert vocabulary.token_eos() == tokenizer.eos_id and vocabulary.is_eog(tokenizer.eos_id)
    answer = greedy(model, BEGIN, COUNT)
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = lm(torch.tensor([[*BEGIN, *answer[:-1]]])).logits[0, len(BEGIN) - 1 :]
    # Its cache is in 16 bits: what it says is the likeliest, or as good as.
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    assert float((logits.amax(-1) - chosen).max()) < 0.02
