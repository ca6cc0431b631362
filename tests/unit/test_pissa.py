"""PiSSA: base + adapter is the original at the start, by any way of loading, and the result is a plain adapter."""

import peft
import pytest
import torch
import transformers

from duoka.config.schema import LoraConfig
from duoka.errors import ConfigError
from duoka.model.box import Box
from duoka.model.build import load_adapter, load_model
from duoka.model.lora import is_adapter, save_adapter
from duoka.model.request import ModelRequest
from duoka.model.shards import build_without_memory

IDS = torch.arange(3, 43)[None]


def lora(**keys):
    return LoraConfig(**({"rank": 4, "alpha": 6.0, "dropout": 0.0, "init": "pissa"} | keys))


def load(folder, **keys):
    return load_model(ModelRequest(folder, dtype=torch.float32, lora=lora(**keys), seed=5)).eval()


@torch.no_grad()
def logits(lm):
    return lm(input_ids=IDS).logits


@pytest.mark.parametrize("keys", [{}, {"pissa_iterations": 0}, {"rank": 40, "alpha": 20.0}, {"targets": ("q_proj",)}])
def test_at_the_start_base_and_adapter_are_the_original(tiny_model, keys):
    original, begun = load_model(ModelRequest(tiny_model, dtype=torch.float32)).eval(), load(tiny_model, **keys)
    assert (logits(begun) - logits(original)).abs().max() < 2e-5
    with begun.disable_adapter():
        assert (logits(begun) - logits(original)).abs().max() > 1e-2, "the base gave nothing up"


def test_what_the_base_gives_up_is_what_peft_takes(tiny_model):
    settings = peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", init_lora_weights="pissa")
    theirs = peft.get_peft_model(load_model(ModelRequest(tiny_model, dtype=torch.float32)), settings).state_dict()
    whole, searched = load(tiny_model, pissa_iterations=0).state_dict(), load(tiny_model).state_dict()
    original = load_model(ModelRequest(tiny_model, dtype=torch.float32)).state_dict()
    for name in (name for name in whole if name.endswith("base_layer.weight")):
        plain = original[name.removeprefix("base_model.model.").replace(".base_layer", "")]
        taken = (plain - theirs[name]).norm()
        assert (whole[name] - theirs[name]).norm() < 1e-4 * taken, name
        # Random weights have no strong directions, which the search then finds only nearly.
        assert (plain - searched[name]).norm() > 0.98 * taken, name


def test_read_by_boxes_it_begins_with_the_same_bits(tiny_model):
    _, source = build_without_memory(ModelRequest(tiny_model, dtype=torch.float32, lora=lora(), seed=5))
    for name, wanted in load(tiny_model).named_parameters():
        for start in (0, 1):
            box = Box((start,) * wanted.dim(), tuple(max(1, size // 3) - start for size in wanted.shape))
            assert source.read(name, wanted.shape, box).equal(wanted[box.slices]), name
        assert source.read(name, wanted.shape).equal(wanted), name


def test_the_result_is_a_plain_adapter_of_the_base_as_it_came(tiny_model, tmp_path):
    trained = load(tiny_model)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if is_adapter(name):
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    save_adapter(trained, tmp_path)
    again = load_adapter(load_model(ModelRequest(tiny_model, dtype=torch.float32)), tmp_path).eval()
    assert (logits(again) - logits(trained)).abs().max() < 5e-5
    assert (logits(again) - logits(load(tiny_model))).abs().max() > 1e-2
    assert trained.peft_config["default"].r == 4, "the model in training keeps its own rank"


def test_a_tied_head_is_refused_however_it_is_loaded(tiny_model):
    for way in (load_model, build_without_memory):
        with pytest.raises(ConfigError, match=r"embed_tokens\.weight too") as caught:
            way(ModelRequest(tiny_model, dtype=torch.float32, lora=lora(targets=("q_proj", "lm_head")), seed=5))
        assert "drop lm_head from lora.targets" in (caught.value.fix or "")


def test_layers_that_keep_their_weights_lying_begin_as_the_original(tmp_path):
    settings = transformers.GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(settings).save_pretrained(tmp_path)
    original, begun = load_model(ModelRequest(tmp_path, dtype=torch.float32)).eval(), load(tmp_path)
    assert (logits(begun) - logits(original)).abs().max() < 2e-5
    with begun.disable_adapter():
        assert (logits(begun) - logits(original)).abs().max() > 1e-3
    _, source = build_without_memory(ModelRequest(tmp_path, dtype=torch.float32, lora=lora(), seed=5))
    for name, wanted in begun.named_parameters():
        box = Box((1,) * wanted.dim(), tuple(size - 1 for size in wanted.shape))
        assert source.read(name, wanted.shape, box).equal(wanted[box.slices]), name
