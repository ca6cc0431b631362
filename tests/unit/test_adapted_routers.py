"""Adapters of a mixture whose router is a linear layer by its class and answers with a choice of experts (Phi-MoE)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from duoka.config.schema import LoraConfig
from duoka.errors import ConfigError
from duoka.model.lora import apply_lora, save_adapter

FACTS = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def build() -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, PhimoeConfig

    torch.manual_seed(0)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(PhimoeConfig(**FACTS))
    return model.eval()


def test_an_adapter_on_all_linear_layers_trains_and_opens_in_peft(tmp_path: Path) -> None:
    """The default targets ended in an AttributeError: PEFT adds to what the router answers, which is no tensor."""
    from peft import PeftModel

    model = apply_lora(build(), LoraConfig(rank=4))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and not any("router" in name for name in trained)
    ids = torch.randint(0, 100, (1, 8), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for parameter in trained.values():
            parameter.add_(0.05)
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in trained.values())
    save_adapter(model, tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))
    assert sorted(written["target_modules"]) == ["k_proj", "o_proj", "q_proj", "v_proj"], (
        "what lora.adapter goes on with"
    )
    again = PeftModel.from_pretrained(build(), tmp_path)
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)


def test_a_router_that_is_named_is_refused_with_what_may_be() -> None:
    with pytest.raises(ConfigError, match=r"names router \(PhimoeTopKRouter\), to whose answer") as refused:
        apply_lora(build(), LoraConfig(rank=4, targets=("router",)))
    assert "q_proj" in (refused.value.fix or "") and "router" not in (refused.value.fix or "")
