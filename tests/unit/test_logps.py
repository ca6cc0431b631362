"""Log-probabilities and entropies of target tokens equal log_softmax of all logits, in value and in gradient."""

import pytest
import torch
import torch.nn.functional as F

from duoka.config.schema import LoraConfig
from duoka.model import chunks
from duoka.model.build import LossModel, load_model
from duoka.model.chunks import IGNORED, Bend, LowRank
from duoka.model.logps import token_logps
from duoka.model.request import ModelRequest

ROWS, DIM, VOCAB = 37, 12, 53


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def draw_labels(rows=ROWS, vocab=VOCAB):
    labels = torch.randint(0, vocab, (1, rows))
    labels[0, ::3] = IGNORED
    return labels


def plain(logits, labels):
    """(log p, entropy) of every target, 0 elsewhere."""
    every = logits.log_softmax(dim=-1)
    is_target = labels != IGNORED
    logps = every.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1) * is_target
    return logps, torch.distributions.Categorical(logits=logits).entropy() * is_target


def check_same(ours, want, inputs, rtol=1e-10):
    """Values, and gradients where every token has a slope of its own: that is what losses on top of them ask for."""
    slopes = [torch.randn_like(one) for one in want]
    got_grads, want_grads = (
        torch.autograd.grad(
            sum((one * by).sum() for one, by in zip(answers, slopes, strict=True)), inputs, retain_graph=True
        )
        for answers in (ours, want)
    )
    for name, ones, others in (("value", ours, want), ("gradient", got_grads, want_grads)):
        for place, (one, other) in enumerate(zip(ones, others, strict=True)):
            assert one.shape == other.shape
            error = float((one - other).detach().norm() / other.detach().norm())
            assert error < rtol, f"{name} {place} is off by {error}"


@pytest.mark.parametrize("rows_per_chunk", [1, 5, 1000])
@pytest.mark.parametrize("more", ["", "entropy"])
def test_values_and_gradients_equal_log_softmax_at_any_chunk(monkeypatch, rows_per_chunk, more):
    torch.manual_seed(0)
    hidden, weight, labels = draw(1, ROWS, DIM), draw(VOCAB, DIM), draw_labels()
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 4 * VOCAB * rows_per_chunk)
    ours = token_logps(hidden, weight, labels, more=more)
    assert (ours.more is not None) == bool(more)
    check_same(ours[: 1 + bool(more)], plain(hidden @ weight.T, labels)[: 1 + bool(more)], (hidden, weight))


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("more", ["", "entropy"])
def test_heads_with_bias_adapter_scale_and_softcap(monkeypatch, softcap, scale, more):
    torch.manual_seed(0)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 4 * VOCAB * 7)
    hidden, weight, labels, bias = draw(1, ROWS, DIM), draw(VOCAB, DIM), draw_labels(), draw(VOCAB)
    down, up = draw(3, DIM), draw(VOCAB, 3)
    ours = token_logps(
        hidden, weight, labels, bias=bias, low=LowRank(hidden @ down.T * 2.0, up), bend=Bend(scale, softcap),
        more=more,
    )  # fmt: skip
    logits = (hidden @ weight.T + bias + hidden @ down.T @ up.T * 2.0) * scale
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    count = 1 + bool(more)
    check_same(ours[:count], plain(logits, labels)[:count], (hidden, weight, bias, down, up))


def test_a_tied_head_learns_from_both_ends():
    torch.manual_seed(0)
    weight, labels, ids = draw(VOCAB, DIM), draw_labels(), torch.randint(0, VOCAB, (1, ROWS))
    hidden = F.embedding(ids, weight).tanh()
    check_same(token_logps(hidden, weight, labels)[:1], plain(hidden @ weight.T, labels)[:1], (weight,))


def test_a_token_that_was_thought_impossible_has_its_log_probability():
    torch.manual_seed(0)
    hidden, weight, labels = draw(1, ROWS, DIM), draw(VOCAB, DIM), draw_labels()
    hidden, weight = hidden.detach() * 100, weight.detach()
    ours = token_logps(hidden.float(), weight.float(), labels, more="entropy")
    logps, entropy = plain(hidden @ weight.T, labels)
    assert logps.min() < -500
    assert float((ours.logps - logps).norm() / logps.norm()) < 1e-6
    assert float((ours.more - entropy).abs().max()) < 1e-3


def test_a_batch_without_targets_is_zero_and_still_has_gradients():
    torch.manual_seed(0)
    hidden, weight = draw(1, ROWS, DIM), draw(VOCAB, DIM)
    ours = token_logps(hidden, weight, torch.full((1, ROWS), IGNORED), more="entropy")
    gradients = torch.autograd.grad(ours.logps.sum() + ours.more.sum(), (hidden, weight))
    assert all(float(one.detach().abs().sum()) == 0.0 for one in (*ours, *gradients))


def test_a_frozen_head_gets_no_gradient():
    torch.manual_seed(0)
    hidden, weight, labels = draw(1, ROWS, DIM), draw(VOCAB, DIM).detach(), draw_labels()
    check_same(token_logps(hidden, weight, labels)[:1], plain(hidden @ weight.T, labels)[:1], (hidden,))


def test_autocast_takes_products_in_bf16_and_keeps_fp32_gradients_of_fp32_weights():
    torch.manual_seed(0)
    hidden, labels = draw(1, ROWS, DIM).detach().float(), draw_labels()
    weight = draw(VOCAB, DIM).detach().float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = token_logps(hidden, weight, labels)
    (got,) = torch.autograd.grad(ours.logps.sum(), weight)
    (want,) = torch.autograd.grad(plain(hidden @ weight.T, labels)[0].sum(), weight)
    assert ours.logps.dtype == got.dtype == torch.float32
    assert 0 < float((got - want).norm() / want.norm()) < 2e-2


def give_b_values(lm):
    """B begins as zero, which would hide A's gradient."""
    for name, parameter in lm.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1)


@pytest.mark.parametrize("is_readable", [True, False], ids=["read", "called"])
@pytest.mark.parametrize("head", ["tied", "untied", "adapted"])
def test_a_whole_model_answers_with_them(tiny_model, head, is_readable):
    torch.manual_seed(1)
    lora = LoraConfig(rank=4, dropout=0.0, targets=["lm_head", "q_proj"]) if head == "adapted" else None
    lm = load_model(ModelRequest(tiny_model, dtype=torch.float64, lora=lora))
    give_b_values(lm)
    model = LossModel(lm).train()
    if head == "untied":
        core = model.core
        core.lm_head.weight = torch.nn.Parameter(core.lm_head.weight.detach() + 0.1)
    model.has_plain_head = is_readable
    ids, positions = torch.randint(3, 260, (2, 20)), torch.arange(20).expand(2, -1)
    labels = ids.roll(-1, dims=1)
    labels[:, ::3] = IGNORED
    weights = [p for p in lm.parameters() if p.requires_grad]
    want = plain(model.core(input_ids=ids, position_ids=positions, use_cache=False).logits, labels)
    check_same(model(ids, labels, positions, answer="entropy"), want, weights)
    logps, nothing = model(ids, labels, positions, answer="logps")
    assert nothing is None
    loss, _ = model(ids, labels, positions)
    assert abs(float(logps.sum() / -loss) - 1) < 1e-10
