"""Backward passes in two parts: the same gradients, of matrices only when their part comes."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from duoka.model.fused import apply_fused
from duoka.model.split_products import Waiting, split_products
from duoka.parallel.recompute import apply_recompute

SIZES = {
    "vocab_size": 31, "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip
IDS = torch.arange(3, 14)[None]


def make(kind, config):
    torch.manual_seed(1)
    return kind(config(**SIZES)).train()


def loss_of(model, precision):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        hidden = model.get_decoder()(input_ids=IDS, use_cache=False).last_hidden_state
    return hidden.float().square().sum() + hidden.float().sum()


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("kind", "config"), [(LlamaForCausalLM, LlamaConfig), (Qwen2ForCausalLM, Qwen2Config)])
def test_gradients_are_the_same_and_those_of_matrices_come_later(kind, config, precision, recompute):
    plain, split = make(kind, config), make(kind, config)
    later = split_products(split)
    for model in (plain, split):
        apply_fused(model)
        if recompute != "none":
            apply_recompute(model, recompute)
    loss_of(plain, precision).backward()
    later.now = waiting = Waiting()
    loss_of(split, precision).backward()
    later.now = None
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    found = {name for name, p in split.named_parameters() if p.grad is not None}
    matrices = {name for name in wanted if "_proj.weight" in name}
    assert len(matrices) == 14 and found == wanted.keys() - matrices
    waiting.finish()
    for name, p in split.named_parameters():
        if name in wanted:
            assert torch.allclose(p.grad, wanted[name], rtol=1e-6, atol=1e-6), name


def test_without_a_pass_under_way_nothing_waits():
    model = make(LlamaForCausalLM, LlamaConfig)
    split_products(model)
    loss_of(model, "fp32").backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "_proj.weight" in name)
