"""Our rotation beside transformers' own: what GPUs compute, tried on the CPU, where models keep theirs."""

import pytest
import torch
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as interleaved
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from duoka.model.rotary import own_rotation, rotate


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)), dtype=torch.float64)


def test_the_rotation_and_its_gradient_are_those_of_transformers():
    query, key, cos, sin = draw(2, 4, 7, 8), draw(2, 2, 7, 8), draw(2, 7, 8), draw(2, 7, 8) + 1
    answers = []
    for turn in (apply_rotary_pos_emb, rotate):
        inputs = [query.clone().requires_grad_(), key.clone().requires_grad_()]
        out = turn(*inputs, cos, sin)
        answers.append([*out, *torch.autograd.grad((out[0] * query).sum() + (out[1] * key).sum(), inputs)])
    for theirs, ours in zip(*answers, strict=True):
        assert torch.allclose(theirs, ours, rtol=1e-12, atol=1e-12)


def test_under_autocast_it_is_computed_wide_and_rounded_once():
    query, key, cos, sin = (t.float() for t in (draw(1, 4, 7, 8), draw(1, 2, 7, 8), draw(1, 7, 8), draw(1, 7, 8)))
    with torch.autocast("cpu", torch.bfloat16):
        got, _ = rotate(query.bfloat16(), key.bfloat16(), cos, sin)
    want, _ = apply_rotary_pos_emb(query.bfloat16(), key.bfloat16(), cos, sin)
    assert got.dtype == torch.bfloat16
    assert torch.allclose(got.float(), want, rtol=2**-8, atol=2**-12)


def test_on_a_cpu_a_model_keeps_its_own(monkeypatch):
    monkeypatch.setattr("duoka.model.rotary.rotate", lambda *_: pytest.fail("ours, on a CPU"))
    query, key, cos, sin = draw(1, 4, 7, 8), draw(1, 2, 7, 8), draw(1, 7, 8), draw(1, 7, 8)
    turn = own_rotation.__wrapped__
    monkeypatch.setattr("duoka.model.rotary.answers_alike", lambda _: True)
    answers = [one(query, key, cos, sin) for one in (turn(apply_rotary_pos_emb), apply_rotary_pos_emb)]
    assert all(torch.equal(one, two) for one, two in zip(*answers, strict=True))


def test_another_rotation_is_left_alone():
    assert own_rotation(interleaved) is None  # neighbors are pairs there, not halves
    assert own_rotation(None) is None
