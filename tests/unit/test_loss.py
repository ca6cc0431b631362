"""The chunked loss equals torch's own cross entropy, in value and in gradient."""

import pytest
import torch
import torch.nn.functional as F
from held_layers import LiveBytes

from duoka.model import chunks
from duoka.model.chunks import IGNORED, Bend, LowRank
from duoka.model.head import loss_from_logits
from duoka.model.loss import Goal, sum_cross_entropy


def make_case(dtype=torch.float64, rows=37, dim=12, vocab=53):
    torch.manual_seed(0)
    hidden = torch.randn(1, rows, dim, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, dim, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, vocab, (1, rows))
    labels[0, ::3] = IGNORED
    return hidden, weight, labels


def plain_loss(logits, labels, **options):
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum", **options)


def check_same(ours, plain, inputs, rtol=1e-9):
    """Value and every gradient, with a slope that is not one."""
    got = torch.autograd.grad(ours * 0.37, inputs, retain_graph=True)
    want = torch.autograd.grad(plain * 0.37, inputs, retain_graph=True)
    assert abs(ours.item() / plain.item() - 1) < rtol, (ours.item(), plain.item())
    for place, (ours_grad, plain_grad) in enumerate(zip(got, want, strict=True)):
        error = float((ours_grad - plain_grad).norm() / plain_grad.norm())
        assert error < rtol, f"gradient {place} is off by {error}"


@pytest.mark.parametrize("rows_per_chunk", [1, 5, 1000])
def test_value_and_gradients_equal_torch_at_any_chunk(monkeypatch, rows_per_chunk):
    hidden, weight, labels = make_case()
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 4 * weight.shape[0] * rows_per_chunk)
    ours, _ = sum_cross_entropy(hidden, weight, labels)
    check_same(ours, plain_loss(hidden @ weight.T, labels), (hidden, weight))


def test_at_a_real_vocabulary_in_fp32_it_is_exact_to_a_millionth():
    hidden, weight, labels = make_case(torch.float32, rows=700, dim=16, vocab=49152)
    weight = (weight.detach() / 4).requires_grad_()  # logits as wide as a model's: of wider ones fp32 knows less
    ours, _ = sum_cross_entropy(hidden, weight, labels)
    check_same(ours, plain_loss(hidden.double() @ weight.double().T, labels), (hidden, weight), rtol=1e-6)


def test_a_token_that_was_thought_impossible_costs_what_it_should():
    hidden, weight, labels = make_case(torch.float32)
    ours, _ = sum_cross_entropy(hidden * 100, weight, labels)  # losses up to a thousand: p underflows
    check_same(ours, plain_loss(hidden.double() * 100 @ weight.double().T, labels), (hidden, weight), rtol=1e-5)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("goal", [Goal(), Goal(0.2), Goal(by_probability=True)])
def test_heads_with_bias_adapter_scale_softcap_and_goal_equal_torch(monkeypatch, softcap, scale, goal):
    hidden, weight, labels = make_case()
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 4 * weight.shape[0] * 7)
    vocab, dim = weight.shape
    bias = torch.randn(vocab, dtype=torch.float64, requires_grad=True)
    down = torch.randn(3, dim, dtype=torch.float64, requires_grad=True)
    up = torch.randn(vocab, 3, dtype=torch.float64, requires_grad=True)
    ours, _ = sum_cross_entropy(
        hidden, weight, labels, bias=bias, low=LowRank(hidden @ down.T * 2.0, up), bend=Bend(scale, softcap),
        goal=goal,
    )  # fmt: skip
    logits = (hidden @ weight.T + bias + hidden @ down.T @ up.T * 2.0) * scale
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    plain = plain_loss(logits, labels, label_smoothing=goal.smoothing)
    if goal.by_probability:  # token by token: log p, weighted with p as a number
        likelihoods = [logits[0, row].log_softmax(-1)[label] for row, label in enumerate(labels[0]) if label >= 0]
        plain = -sum(likelihoods[i] * likelihoods[i].exp().item() for i in range(len(likelihoods)))
    check_same(ours, plain, (hidden, weight, bias, down, up))
    other, _ = loss_from_logits(logits, labels, None, goal, training=True)
    check_same(other, plain, (hidden, weight, bias, down, up))


def test_a_second_backward_pass_is_refused_and_says_why():
    hidden, weight, labels = make_case()
    ours, _ = sum_cross_entropy(hidden, weight, labels)
    torch.autograd.grad(ours, hidden, retain_graph=True)
    with pytest.raises(RuntimeError, match="taken twice"):
        torch.autograd.grad(ours, hidden)


def test_a_batch_without_targets_is_zero_and_still_has_gradients():
    hidden, weight, labels = make_case()
    ours, _ = sum_cross_entropy(hidden, weight, torch.full_like(labels, IGNORED))
    gradients = torch.autograd.grad(ours, (hidden, weight))
    assert float(ours) == 0.0
    assert all(float(gradient.abs().sum()) == 0.0 for gradient in gradients)


def test_a_frozen_head_gets_no_gradient_and_costs_none():
    hidden, weight, labels = make_case()
    frozen = weight.detach()
    sum_cross_entropy(hidden, frozen, labels)[0].backward()
    plain = F.cross_entropy((hidden @ frozen.T).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    want = torch.autograd.grad(plain, hidden)[0]
    assert frozen.grad is None
    assert torch.allclose(hidden.grad, want)


def test_autocast_takes_the_product_in_bf16_and_keeps_fp32_gradients_of_fp32_weights():
    hidden, weight, labels = make_case(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, _ = sum_cross_entropy(hidden, weight, labels)
    got = torch.autograd.grad(ours, weight)[0]
    plain = F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    want = torch.autograd.grad(plain, weight)[0]
    assert got.dtype == torch.float32
    error = float((got - want).norm() / want.norm())
    assert 0 < error < 2e-2, f"relative error {error}"


@pytest.mark.parametrize("rows", [32, 96])  # in one chunk, and in several
def test_of_the_heads_gradient_only_some_words_are_held_twice(monkeypatch, rows):
    """In half precision each chunk's product is added in fp32: as many words of it at once as are told."""
    vocab, dim, words = 4099, 64, 256
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2 * vocab * 32)
    monkeypatch.setattr(chunks, "MOST_PRODUCTS", vocab // words + 1)
    hidden, weight, labels = make_case(torch.float32, rows=rows, dim=dim, vocab=vocab)
    found = {}
    for size in (words, vocab):
        monkeypatch.setattr(chunks, "PRODUCT_BYTES", 2 * dim * size)
        with LiveBytes([]) as allocated, torch.autocast("cpu", torch.bfloat16):
            ours, _ = sum_cross_entropy(hidden, weight, labels)
        found[size] = allocated.peak, torch.autograd.grad(ours, (hidden, weight))
    (few, ours), (whole, at_once) = found[words], found[vocab]
    assert 0.9 < (whole - few) / (2 * dim * (vocab - words)) < 1.1, (whole, few)
    plain = torch.autograd.grad(plain_loss(hidden @ weight.T, labels), (hidden, weight))
    for got, same, wide in zip(ours, at_once, plain, strict=True):
        assert (got - same).norm() < 1e-3 * same.norm() and (got - wide).norm() < 2e-2 * wide.norm()


def test_correct_tokens_are_counted_over_targets_only():
    hidden, weight, labels = make_case()
    likeliest = (hidden @ weight.T).argmax(dim=-1)
    labels = torch.where(labels == IGNORED, labels, likeliest)
    _, correct = sum_cross_entropy(hidden, weight, labels, count=True)
    assert int(correct) == int((labels != IGNORED).sum())
