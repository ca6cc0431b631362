"""Bases that GPTQ or AWQ packed: their layers hold codes and no weight, and adapters go beside them all the same."""

import importlib.util
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from duoka.config.schema import LoraConfig
from duoka.errors import ConfigError
from duoka.model.lora import apply_lora
from duoka.model.quantize import options_to_learn_beside
from duoka.model.reading import read_model


class Coded(torch.nn.Module):
    """As gptqmodel lays a linear layer out, as far as PEFT looks; what it computes is plain."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, None
        self.register_buffer("qweight", torch.zeros(self.in_features // 8, self.out_features, dtype=torch.int32))
        self.register_buffer("plain", linear.weight.detach().clone())

    def forward(self, x):
        return x @ self.plain.T


@pytest.fixture
def coded_model(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and "layers" in name:
            above, _, last = name.rpartition(".")
            setattr(model.get_submodule(above), last, Coded(module))
    return model


@pytest.mark.parametrize("targets", ["all", ("q_proj", "v_proj")])
def test_adapters_go_beside_layers_of_codes(coded_model, monkeypatch, targets):
    asked = []
    monkeypatch.setattr("peft.get_peft_model", lambda model, settings: asked.append(settings) or model)
    apply_lora(coded_model, LoraConfig(rank=2, targets=targets))
    every = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert set(asked[0].target_modules) == (every if targets == "all" else set(targets))


def test_a_layer_that_is_not_there_is_still_named(coded_model):
    with pytest.raises(ConfigError, match="no linear layer of that name") as raised:
        apply_lora(coded_model, LoraConfig(rank=2, targets=("query",)))
    assert "q_proj" in (raised.value.fix or "")


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", None])
def test_training_asks_for_kernels_with_gradients(tmp_path, method):
    how = {"quant_method": method, "bits": 4, "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": how} if method else {}))
    options = options_to_learn_beside(tmp_path)
    if method not in ("gptq", "awq"):
        assert options == {}
    else:
        assert options["quantization_config"].backend == "auto_trainable"


@pytest.mark.parametrize(("method", "missing"), [("gptq", ["optimum", "gptqmodel"]), ("awq", ["gptqmodel"])])
def test_all_packages_that_are_missing_are_named_at_once(tmp_path, tiny_model, monkeypatch, method, missing):
    """transformers names one, and the other when that is there."""
    facts = json.loads((tiny_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(facts | {"quantization_config": {"quant_method": method}}))
    found = importlib.util.find_spec
    gone = ("optimum", "gptqmodel")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in gone else found(name, *more))
    with pytest.raises(ConfigError, match=f"packed by {method.upper()}, .* not installed here: ") as raised:
        read_model(tmp_path, scores=False)
    assert raised.value.fix.splitlines()[0] == f"pip install {' '.join(missing)}"
