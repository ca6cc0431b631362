"""The chunked loss equals torch's own cross entropy, in value and in gradient."""

import pytest
import torch
import torch.nn.functional as F

from duoka.model import loss as loss_module
from duoka.model.loss import IGNORED, count_correct, sum_cross_entropy


def make_case(dtype=torch.float64, rows=37, dim=12, vocab=53):
    torch.manual_seed(0)
    hidden = torch.randn(1, rows, dim, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, dim, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, vocab, (1, rows))
    labels[0, ::3] = IGNORED
    return hidden, weight, labels


@pytest.mark.parametrize("rows_per_chunk", [1, 5, 1000])
def test_value_and_gradients_equal_torch_at_any_chunk(monkeypatch, rows_per_chunk):
    hidden, weight, labels = make_case()
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 4 * weight.shape[0] * rows_per_chunk)
    ours = sum_cross_entropy(hidden, weight, labels)
    got = torch.autograd.grad(ours * 0.37, (hidden, weight))
    plain = F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    want = torch.autograd.grad(plain * 0.37, (hidden, weight))
    assert torch.allclose(ours, plain, rtol=1e-12)
    for ours_grad, plain_grad in zip(got, want, strict=True):
        assert torch.allclose(ours_grad, plain_grad, rtol=1e-9, atol=1e-12)


def test_backward_twice_through_a_kept_graph_gives_the_same_gradient():
    hidden, weight, labels = make_case()
    ours = sum_cross_entropy(hidden, weight, labels) * 3.0
    first = torch.autograd.grad(ours, hidden, retain_graph=True)[0]
    second = torch.autograd.grad(ours, hidden)[0]
    assert torch.equal(first, second)


def test_a_batch_without_targets_is_zero_and_still_has_gradients():
    hidden, weight, labels = make_case()
    ours = sum_cross_entropy(hidden, weight, torch.full_like(labels, IGNORED))
    gradients = torch.autograd.grad(ours, (hidden, weight))
    assert float(ours) == 0.0
    assert all(float(gradient.abs().sum()) == 0.0 for gradient in gradients)


def test_a_frozen_head_gets_no_gradient_and_costs_none():
    hidden, weight, labels = make_case()
    frozen = weight.detach()
    sum_cross_entropy(hidden, frozen, labels).backward()
    plain = F.cross_entropy((hidden @ frozen.T).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    want = torch.autograd.grad(plain, hidden)[0]
    assert frozen.grad is None
    assert torch.allclose(hidden.grad, want)


def test_autocast_takes_the_product_in_bf16_and_keeps_fp32_gradients_of_fp32_weights():
    hidden, weight, labels = make_case(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = sum_cross_entropy(hidden, weight, labels)
    got = torch.autograd.grad(ours, weight)[0]
    plain = F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    want = torch.autograd.grad(plain, weight)[0]
    assert got.dtype == torch.float32
    error = float((got - want).norm() / want.norm())
    assert 0 < error < 2e-2, f"relative error {error}"


def test_correct_tokens_are_counted_over_targets_only():
    hidden, weight, labels = make_case()
    likeliest = (hidden @ weight.T).argmax(dim=-1)
    labels = torch.where(labels == IGNORED, labels, likeliest)
    assert int(count_correct(hidden, weight, labels)) == int((labels != IGNORED).sum())
