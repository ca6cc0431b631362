"""LoRA on a mixture's experts: thin products beside each expert's own, as PEFT's weights with both in one say."""

import copy

import peft
import pytest
import torch
from families import family_config

from duoka.config.schema import LoraConfig
from duoka.errors import ConfigError
from duoka.model.attention import register_attention
from duoka.model.build import load_adapter
from duoka.model.expert_adapters import adapt_rows
from duoka.model.experts import ADAPTERS, use_own_experts
from duoka.model.fused import apply_fused
from duoka.model.lora import adapted_experts, apply_lora, quiet_adapters
from duoka.model.tiny_copy import build_tiny, tiny_config

# The last has weights that lie the other way, biases and a gate of its own, and gets adapters from PEFT by name alone.
KINDS = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")
BY_NAME = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TOKENS = 70


def adapted(kind, *, at_once=True, rank=3):
    """A tiny model whose adapters' B is not zero, without adapters on its attention."""
    register_attention()
    lm = build_tiny(tiny_config(family_config(kind)), "duoka")
    use_own_experts(lm)
    if kind == "gpt_oss":
        model = peft.get_peft_model(lm, peft.LoraConfig(r=rank, lora_alpha=5, target_parameters=BY_NAME))
        adapt_rows(model)
    else:
        model = apply_lora(lm, LoraConfig(rank=rank, alpha=5))
    numbers = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if ".lora_B." in name:
                one.copy_(torch.randn(one.shape, generator=numbers) * 0.3)
    if at_once:
        apply_fused(model)
    return model


def wrapper_of(model):
    """The outer of the two wrappers around a layer's experts."""
    assert adapted_experts(model)
    return next(one for name, one in model.named_modules() if name.endswith("mlp.experts"))


def draw(wrapper, dtype, *, unused=1):
    experts, numbers = wrapper.get_base_layer(), torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, experts.down_proj.shape[1 + experts.is_transposed], generator=numbers).to(dtype)
    scores = torch.rand(TOKENS, experts.num_experts, generator=numbers)
    scores[:, :unused] = -1
    return hidden, scores.topk(2, dim=-1).indices, torch.rand(TOKENS, 2, generator=numbers)


def learn(wrapper, hidden, index, weights, narrow=False):
    wrapper.zero_grad()
    inputs = [one.detach().clone().requires_grad_() for one in (hidden, weights)]
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        answer = wrapper(inputs[0], index, inputs[1])
    slope = torch.randn(answer.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    (answer.double() * slope).sum().backward()
    found = {name: one.grad.clone() for name, one in wrapper.named_parameters() if one.requires_grad}
    assert len(found) == 4, "both adapters' A and B"
    return {"answer": answer.detach(), "hidden": inputs[0].grad, "weights": inputs[1].grad, **found}


def by_definition(wrapper, hidden, index, weights):
    """Each expert's W + scale B A, in fp64 and in transformers' own code."""
    outer, experts = copy.deepcopy(wrapper).double(), copy.deepcopy(wrapper.get_base_layer()).double()
    experts.config = copy.deepcopy(experts.config)
    experts.config._experts_implementation = "eager"
    whole, count = {}, experts.num_experts
    for one in (outer, outer.base_layer):
        a, b = one.lora_A["default"].weight, one.lora_B["default"].weight
        rank = len(a) // count
        deltas = [b[:, expert::count] @ a[expert * rank : (expert + 1) * rank] for expert in range(count)]
        delta = torch.stack(deltas).mT if experts.is_transposed else torch.stack(deltas)
        whole[one.parameter_name] = getattr(experts, one.parameter_name) + one.scaling["default"] * delta
    inputs = [one.detach().double().requires_grad_() for one in (hidden, weights)]
    answer = torch.func.functional_call(experts, whole, (inputs[0], index, inputs[1]))
    slope = torch.randn(answer.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    (answer * slope).sum().backward()
    found = {name: one.grad for name, one in outer.named_parameters() if one.requires_grad}
    return {"answer": answer.detach(), "hidden": inputs[0].grad, "weights": inputs[1].grad, **found}


def off(found, wanted):
    return {name: float((found[name].double() - want).norm() / want.norm()) for name, want in wanted.items()}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("narrow", [False, True])
def test_answers_and_gradients_are_those_of_weights_with_both(kind, at_once, narrow):
    wrapper = wrapper_of(adapted(kind, at_once=at_once))
    given = draw(wrapper, torch.bfloat16 if narrow else torch.float32)
    wanted, found = by_definition(wrapper, *given), learn(wrapper, *given, narrow)
    assert found["answer"].dtype == given[0].dtype
    assert all(share < (2e-2 if narrow else 3e-6) for share in off(found, wanted).values()), off(found, wanted)


@pytest.mark.parametrize("at_once", [True, False])
def test_nothing_as_large_as_the_weights_is_kept(at_once):
    wrapper = wrapper_of(adapted("qwen3_moe", at_once=at_once)).to(torch.bfloat16)
    hidden, index, weights = (one[:6] for one in draw(wrapper, torch.bfloat16))
    kept, own = [], {one.untyped_storage().data_ptr() for one in wrapper.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        wrapper(hidden.requires_grad_(), index, weights)
    least = min(one.numel() for one in wrapper.get_base_layer().parameters())
    others = {one.untyped_storage() for one in kept if one.untyped_storage().data_ptr() not in own}
    assert others and all(one.nbytes() < 2 * least for one in others)


def test_without_adapters_and_merged_it_answers_as_before():
    model = adapted("qwen3_moe")
    wrapper = wrapper_of(model)
    given = draw(wrapper, torch.float32)
    with torch.no_grad():
        beside, base = wrapper(*given), wrapper.get_base_layer()(*given)
        with model.disable_adapter():
            assert torch.equal(wrapper(*given), base)
        assert not torch.allclose(beside, base, rtol=0.1)
        wrapper.merge()
        wrapper.base_layer.merge()
        merged = wrapper(*given)
        plain = wrapper.unload_and_optionally_merge_module(merge=False, safe_merge=False, adapter_names=None)
    assert torch.allclose(merged, beside, rtol=1e-4, atol=1e-5)
    assert torch.equal(plain(*given), merged) and not getattr(plain, ADAPTERS, {})


def test_two_adapters_at_once_are_peft_s():
    model = adapted("qwen3_moe")
    wrapper = wrapper_of(model)
    given = draw(wrapper, torch.float32)
    with torch.no_grad(), quiet_adapters():
        one, base = wrapper(*given), wrapper.get_base_layer()(*given)
        model.add_adapter("other", model.peft_config["default"])
        model.base_model.set_adapter(["default", "other"])  # the other's B is zero
        both = wrapper(*given)
        model.base_model.set_adapter("other")
        other = wrapper(*given)
    assert torch.allclose(both, one, rtol=1e-4, atol=1e-5) and torch.allclose(other, base, rtol=1e-4, atol=1e-5)


def test_a_saved_adapter_answers_alike(tmp_path):
    model = adapted("qwen3_moe")
    model.save_pretrained(tmp_path)
    base = build_tiny(tiny_config(family_config("qwen3_moe")), "duoka")
    use_own_experts(base)
    loaded = load_adapter(base, tmp_path)
    ids = torch.arange(8, 30)[None]
    with torch.no_grad():
        assert torch.allclose(loaded(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    given = draw(wrapper_of(model), torch.float32)
    seen = []
    hook = (
        wrapper_of(loaded)
        .get_base_layer()
        .register_forward_pre_hook(lambda one, _: seen.append(getattr(one, ADAPTERS, {})))
    )
    with torch.no_grad():
        wrapper_of(loaded)(*given)
    hook.remove()
    assert seen[0].keys() == {"gate_up_proj", "down_proj"}, "by rows, not by weights with both"


def test_dropout_is_refused_in_words():
    lm = build_tiny(tiny_config(family_config("qwen3_moe")), "duoka")
    with pytest.raises(ConfigError, match=r"lora.dropout is 0.05, and lora.targets takes in experts") as seen:
        apply_lora(lm, LoraConfig(dropout=0.05))
    assert "dropout: 0" in str(seen.value)
