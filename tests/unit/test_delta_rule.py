"""The gated delta rule in chunks, and its gradient, beside the rule itself: one token after the other, in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from held_layers import kept_under_autocast
from needs import since
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from duoka.model import compiled_delta, delta_rule, kimi_delta, native
from duoka.model.own_states import with_own_scan

ROWS, HEADS, DIM, DIM_OF_VALUES = 2, 4, 16, 24


@pytest.fixture(params=("compiled", "in torch's words"), autouse=True)
def form(request, monkeypatch):
    if request.param != "compiled":
        monkeypatch.setattr(compiled_delta, "fits", lambda *_: False)
    elif native.find() is None:
        pytest.skip("no C++ compiler")


def by_definition(query, key, value, g, beta, *, has_norms):
    query, key, value, g, beta = (one.double() for one in (query, key, value, g, beta))
    if has_norms:
        query, key = (one / (one.square().sum(-1, keepdim=True) + 1e-6).sqrt() for one in (query, key))
    query, key = (one.repeat_interleave(value.shape[2] // one.shape[2], dim=2) for one in (query, key))
    state = torch.zeros(value.shape[0], value.shape[2], key.shape[-1], value.shape[-1], dtype=torch.double)
    answers = []
    for t in range(value.shape[1]):
        state = state * (g[:, t].exp()[..., None, None] if g.dim() == 3 else g[:, t].exp()[..., None])
        missing = value[:, t] - torch.einsum("bhk,bhkv->bhv", key[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], beta[:, t, :, None] * missing)
        answers.append(torch.einsum("bhk,bhkv->bhv", query[:, t] * key.shape[-1] ** -0.5, state))
    return torch.stack(answers, dim=1)


def draw(tokens, key_heads, dtype=torch.float32):
    numbers = torch.Generator().manual_seed(tokens)

    def some(*shape):
        return torch.randn(ROWS, tokens, *shape, generator=numbers)

    inputs = [
        some(key_heads, DIM),
        some(key_heads, DIM),
        some(HEADS, DIM_OF_VALUES),
        -F.softplus(some(HEADS)),
        some(HEADS).sigmoid(),
    ]
    return [one.to(dtype).requires_grad_() for one in inputs], some(HEADS, DIM_OF_VALUES)


@pytest.mark.parametrize("tokens", [1, 5, 64, 150])
@pytest.mark.parametrize("key_heads", [HEADS, HEADS // 2])
@pytest.mark.parametrize("has_norms", [True, False])
def test_chunks_give_what_the_rule_gives_token_by_token(monkeypatch, tokens, key_heads, has_norms):
    monkeypatch.setitem(delta_rule.AT_ONCE, "cpu", ROWS * tokens * DIM_OF_VALUES * HEADS // 2)  # two turns
    inputs, weights = draw(tokens, key_heads)
    if not has_norms:
        inputs[1] = (inputs[1].detach() * 0.2).requires_grad_()
    results = []
    for rule in (delta_rule.delta_rule, by_definition):
        answer = rule(*inputs, has_norms=has_norms)
        results.append((answer, *torch.autograd.grad((answer * weights).sum(), inputs)))
    for own, wanted in zip(*results, strict=True):
        assert (own - wanted).norm().item() < 2e-6 * max(1.0, wanted.norm().item())


def test_products_are_fp32_under_autocast_and_little_is_kept():
    inputs, weights = draw(130, HEADS, torch.bfloat16)
    answer, kept = kept_under_autocast(lambda: delta_rule.delta_rule(*inputs, has_norms=True))
    assert kept == sum(one.nbytes for one in inputs)
    wanted = by_definition(*inputs, has_norms=True)
    assert (answer - wanted).norm().item() < 3e-3 * wanted.norm().item(), "no more than rounding the answer to bf16"
    gradients = [torch.autograd.grad((one * weights).sum(), inputs) for one in (answer, wanted)]
    for own, right in zip(*gradients, strict=True):
        assert own.dtype is torch.bfloat16 and (own - right).norm().item() < 6e-3 * right.norm().item()


@since(transformers="5.24")  # before, layers have it as an attribute, and theirs is left
def test_layers_of_transformers_call_it():
    for kind in (Qwen3_5GatedDeltaNet, KimiLinearDeltaAttention):
        assert with_own_scan(kind.forward) is not kind.forward
    plain = torch.nn.Linear.forward
    assert with_own_scan(plain) is plain


@pytest.mark.parametrize("tokens", [1, 16, 75])
@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("steep", [1.0, 30.0])
def test_kimi_s_gives_what_the_rule_gives_token_by_token(monkeypatch, tokens, has_norms, steep):
    """Each number of a key decays by itself; `steep`: most of it at once."""
    monkeypatch.setitem(kimi_delta.AT_ONCE, "cpu", ROWS * tokens * kimi_delta.CHUNK * DIM * 3)  # two turns
    inputs, weights = draw(tokens, HEADS)
    inputs[3] = (-steep * torch.rand(ROWS, tokens, HEADS, DIM)).requires_grad_()
    if not has_norms:
        inputs[1] = (inputs[1].detach() * 0.2).requires_grad_()
    results = []
    for rule in (kimi_delta.kimi_delta, by_definition):
        answer = rule(*inputs, has_norms=has_norms)
        results.append((answer, *torch.autograd.grad((answer * weights).sum(), inputs)))
    for own, wanted in zip(*results, strict=True):
        assert (own - wanted).norm().item() < 3e-6 * max(1.0, wanted.norm().item())


def test_kimi_s_keeps_what_it_reads():
    inputs, weights = draw(40, HEADS, torch.bfloat16)
    inputs[3] = (-torch.rand(ROWS, 40, HEADS, DIM)).requires_grad_()
    answer, kept = kept_under_autocast(lambda: kimi_delta.kimi_delta(*inputs, has_norms=True))
    assert kept == sum(one.nbytes for one in inputs) and answer.dtype is torch.bfloat16
    wanted = by_definition(*inputs, has_norms=True)
    gradients = [torch.autograd.grad((one * weights).sum(), inputs) for one in (answer, wanted)]
    for own, right in zip((answer, *gradients[0]), (wanted, *gradients[1]), strict=True):
        assert (own - right).norm().item() < 6e-3 * right.norm().item()


@pytest.mark.parametrize("dim", [48, 64, 128])
@pytest.mark.parametrize("each", [False, True], ids=["a decay for each head", "for each number of a key"])
def test_keys_as_long_as_models_have_them(dim, each, form):
    numbers = torch.Generator().manual_seed(dim)

    def some(*shape):
        return torch.randn(1, 70, *shape, generator=numbers)

    key_heads = 2 if each else 1
    inputs = [some(key_heads, dim), some(key_heads, dim), some(2, 8), -F.softplus(some(2, *[dim] * each))]
    inputs = [one.requires_grad_() for one in (*inputs, some(2).sigmoid())]
    weights, results = some(2, 8), []
    for rule in (kimi_delta.kimi_delta if each else delta_rule.delta_rule, by_definition):
        answer = rule(*inputs, has_norms=True)
        results.append((answer, *torch.autograd.grad((answer * weights).sum(), inputs)))
    for own, wanted in zip(*results, strict=True):
        assert (own - wanted).norm().item() < 3e-6 * max(1.0, wanted.norm().item())


@pytest.mark.skipif(native.find() is None, reason="no C++ compiler")
def test_threads_change_no_bit_of_the_kernel():
    (query, key, value, g, beta), weights = draw(40, HEADS)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)  # conftest.py sets it back
        answer = compiled_delta.compiled_delta(query, key, value, g, beta, True)
        found.append((answer, *torch.autograd.grad((answer * weights).sum(), (query, key, value, g, beta))))
    assert all(map(torch.equal, *found))


@pytest.mark.skipif(native.find() is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("tokens", "dim", "dim_of_values"), [(4, 24, 8), (4, 272, 8), (4, 16, 6), (16_385, 16, 4), (0, 16, 4)]
)
def test_other_sizes_are_left_to_torch(tokens, dim, dim_of_values, form):
    query, value = torch.zeros(1, tokens, 1, dim), torch.zeros(1, tokens, 1, dim_of_values)
    assert not compiled_delta.fits(query, value)
