"""What a model says of rows without a mask is no news to anybody who trains."""

import logging

import pytest
import torch
from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel
from transformers.models.mixtral import MixtralConfig, MixtralForCausalLM

from duoka.config.schema import LoraConfig
from duoka.model.build import LossModel, load_adapter
from duoka.model.lora import apply_lora, save_adapter

LOGGER = logging.getLogger("transformers.modeling_utils")


@pytest.fixture
def said():
    """Texts that go to the user, at transformers' own level."""
    texts = []

    class Keep(logging.Handler):
        def emit(self, record):
            texts.append(record.getMessage())

    handler, level = Keep(), LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.WARNING)
    yield texts
    LOGGER.setLevel(level)
    LOGGER.removeHandler(handler)


def test_rows_that_end_with_the_padding_token_are_not_warned_of(said):
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 32, "n_positions": 32}
    model = LossModel(GPT2LMHeadModel(GPT2Config(**sizes, pad_token_id=2, eos_token_id=2, bos_token_id=1)))
    ids = torch.tensor([[2, 5, 6, 2]])
    model(input_ids=ids, labels=ids, position_ids=torch.arange(4)[None])
    assert not [text for text in said if "attention_mask" in text]
    LOGGER.warning("other news")
    assert said[-1:] == ["other news"]


def test_peft_warns_of_nothing_that_a_user_could_change(tmp_path, recwarn):
    """Of GPT-2's layers, which are no nn.Linear, and of experts, when adapters are made and read."""
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 32, "n_positions": 32}
    apply_lora(GPT2LMHeadModel(GPT2Config(**sizes)), LoraConfig(rank=2), seed=1)
    config = MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    save_adapter(apply_lora(MixtralForCausalLM(config), LoraConfig(rank=2), seed=1), tmp_path)
    load_adapter(MixtralForCausalLM(config), tmp_path)
    said = [str(warning.message) for warning in recwarn]
    assert not [text for text in said if "fan_in_fan_out" in text or "_pattern" in text]
