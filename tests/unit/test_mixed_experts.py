"""A mixture as one function beside transformers' own code of the same experts in float64."""

import copy

import pytest
import torch
from families import family_config
from held_layers import kept_under_autocast

from duoka.model import experts
from duoka.model.attention import register_attention
from duoka.model.experts import find_experts, use_own_experts
from duoka.model.fused import apply_fused
from duoka.model.mixed_experts import ALLOWED
from duoka.model.tiny_copy import build_tiny, tiny_config

# Gates by SiLU; biases, transposed weights and a gate that no kernel knows; none at all.
KINDS = ("qwen3_moe", "deepseek_v3", "gpt_oss", "nemotron_h")
TOKENS, CHOSEN = 90, 2

pytestmark = pytest.mark.usefixtures("kernels")


def experts_of(kind, *, allowed=True):
    register_attention()
    lm = build_tiny(tiny_config(family_config(kind)), "duoka")
    use_own_experts(lm)
    if allowed:
        apply_fused(lm)
    return next(module for _, module in find_experts(lm))


def in_double(module):
    """By transformers' own code."""
    plain = copy.deepcopy(module).double()
    plain.config = copy.deepcopy(plain.config)
    plain.config._experts_implementation = "eager"
    return plain


def draw(module, dtype=torch.float32, *, unused=1):
    """Hidden states, choices and their weights; so many experts are chosen by nobody."""
    numbers = torch.Generator().manual_seed(3)
    dim = module.down_proj.shape[1 + module.is_transposed]
    hidden = torch.randn(TOKENS, dim, generator=numbers).to(dtype).requires_grad_()
    scores = torch.rand(TOKENS, module.num_experts, generator=numbers)
    scores[:, :unused] = -1
    index = scores.topk(CHOSEN, dim=-1).indices
    weights = torch.rand(TOKENS, CHOSEN, generator=numbers).requires_grad_()
    return hidden, index, weights


def learn(module, hidden, index, weights, narrow=False):
    module.zero_grad()
    inputs = [one.detach().clone().requires_grad_() for one in (hidden, weights)]
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        answer = module(inputs[0], index, inputs[1])
    slope = torch.randn(answer.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    (answer.double() * slope).sum().backward()
    names = {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
    return {"answer": answer.detach(), "hidden": inputs[0].grad, "weights": inputs[1].grad, **names}


def compare(found, wanted, limit):
    for name, want in wanted.items():
        got = found[name]
        assert float((got.double() - want).norm()) < limit * float(want.norm()), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fills", [True, False])
@pytest.mark.parametrize("narrow", [False, True])
def test_answers_and_gradients_are_those_of_the_models_own_code(kind, fills, narrow, monkeypatch):
    monkeypatch.setattr(experts, "fills_experts", lambda: fills)
    module = experts_of(kind)
    assert hasattr(module, ALLOWED)
    given = draw(module, torch.bfloat16 if narrow else torch.float32)
    wanted = learn(in_double(module), given[0].double(), given[1], given[2].double())
    found = learn(module, *given, narrow)
    assert found["answer"].dtype == given[0].dtype and found["hidden"].dtype == given[0].dtype
    compare(found, wanted, 2e-2 if narrow else 3e-6)
    first = found["gate_up_proj" if module.has_gate else "up_proj"]
    assert not first[0].any() and first[1].any(), "the first expert is chosen by nobody"


@pytest.mark.parametrize("kind", ("qwen3_moe", "gpt_oss"))
def test_it_is_as_near_in_bf16_as_separate_steps(kind):
    module = experts_of(kind)
    given = draw(module, torch.bfloat16)
    wanted = learn(in_double(module), given[0].double(), given[1], given[2].double())
    found, apart = learn(module, *given, True), learn(experts_of(kind, allowed=False), *given, True)

    def off(result):
        return {name: float((result[name].double() - want).norm() / want.norm()) for name, want in wanted.items()}

    ours, plain = off(found), off(apart)
    assert all(ours[name] < 1.3 * plain[name] + 1e-4 for name in wanted), (ours, plain)


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_experts_keep_what_their_first_product_gives(kind):
    module = experts_of(kind).requires_grad_(False).to(torch.bfloat16)
    hidden, index, weights = draw(module, torch.bfloat16)
    _, kept = kept_under_autocast(lambda: module(hidden, index, weights))
    width = (module.gate_up_proj if module.has_gate else module.up_proj).shape[2 if module.is_transposed else 1]
    rows = sum(experts.filled(index.flatten().bincount(minlength=module.num_experts).tolist()))
    beside = sum(one.nbytes for one in module.parameters()) + weights.nbytes
    assert kept == beside + 2 * width * (rows if experts.fills_experts() else TOKENS * CHOSEN)


def test_in_fp64_nothing_is_rounded_to_fp32():
    module = experts_of("gpt_oss").double()
    hidden, index, weights = draw(module, torch.float64)
    given = hidden, index, weights.detach().double().requires_grad_()
    compare(learn(module, *given), learn(in_double(module), *given), 1e-13)


def test_no_tokens_at_all_are_no_error():
    module = experts_of("qwen3_moe")
    hidden, index, weights = draw(module)
    found = learn(module, hidden[:0], index[:0], weights[:0])
    assert found["answer"].shape == (0, hidden.shape[1])
    assert not any(one.any() for name, one in found.items() if name not in ("answer", "hidden", "weights"))


def test_selective_recompute_keeps_products_as_torchs_operators():
    register_attention()
    lm = build_tiny(tiny_config(family_config("qwen3_moe")), "duoka")
    apply_fused(lm, keeps_products=True)
    assert not any(hasattr(module, ALLOWED) for _, module in find_experts(lm))
