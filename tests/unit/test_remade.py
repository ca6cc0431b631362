"""What adapters read is made again in backward: the same bits, once for all readers, and nothing stays of it."""

import weakref

import pytest
import torch
import torch.nn.functional as F

from duoka.config.schema import LoraConfig
from duoka.model import adapted, gated
from duoka.model.adapted import AdaptedProduct
from duoka.model.build import LossModel, load_model
from duoka.model.fused import apply_fused
from duoka.model.gated import GatedAdapted
from duoka.model.gates import ACTS, SILU
from duoka.model.norms import RmsNorm
from duoka.model.remade import Recipe, can_be_remade, remade
from duoka.model.request import ModelRequest
from duoka.plan.compiler import has_kernels


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_gradients_are_those_of_finite_differences():
    torch.manual_seed(0)
    frozen = [draw(6, 5).detach(), draw(6).detach()]
    adapters = [draw(2, 5), draw(6, 2)]
    gate, up = draw(2, 3, 5), draw(2, 3, 5)
    for act in ACTS:
        call, inputs = [act, *frozen], [gate, up, *adapters]
        assert torch.autograd.gradcheck(lambda *x, call=call: GatedAdapted.apply(*x[:2], *call, *x[2:], 1.7), inputs)

    def behind_a_norm(x, weight, *adapters):
        given = RmsNorm.apply(x, weight, 1e-3)
        can_be_remade(given, lambda x, weight: F.rms_norm(x, (5,), weight, 1e-3), x, weight)
        both = [AdaptedProduct.apply(given, *frozen, *adapters, 1.7, None, 0, 0, remade(given)) for _ in range(2)]
        return both[0] * both[1]

    assert torch.autograd.gradcheck(behind_a_norm, [draw(2, 3, 5), draw(5), *adapters])


def test_adapters_before_which_nothing_learns_have_their_gradient():
    torch.manual_seed(0)
    gate, up, weight = draw(3, 5).detach(), draw(3, 5).detach(), draw(6, 5).detach()
    low, high = draw(2, 5), draw(6, 2)
    GatedAdapted.apply(gate, up, SILU, weight, None, low, high, 1.7).square().sum().backward()
    got = low.grad.clone(), high.grad.clone()
    low.grad = high.grad = None
    both = F.silu(gate) * up
    (both @ weight.t() + 1.7 * both @ low.t() @ high.t()).square().sum().backward()
    torch.testing.assert_close(got, (low.grad, high.grad))


def learn(folder, lora, *, keep, narrow, monkeypatch):
    """(loss, gradients, bytes kept of each token and layer) of a model that keeps what adapters read, or does not."""
    with monkeypatch.context() as patch:
        if keep:
            patch.setattr(adapted, "remade", lambda tensor: None)
            patch.setattr(gated, "call_of", lambda *_: None)
        lm = load_model(ModelRequest(folder, dtype=torch.bfloat16 if narrow else torch.float32, lora=lora))
        torch.manual_seed(2)
        for name, parameter in lm.named_parameters():
            if "lora_B" in name:  # zero would hide A's gradient
                parameter.data.normal_(0, 0.1)
        model = LossModel(lm).train()  # which counts what adapters drop
        apply_fused(lm)
        weights = {p.untyped_storage().data_ptr() for p in lm.parameters()}
        held = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                held[storage.data_ptr()] = storage.nbytes()
            return tensor

        torch.manual_seed(1)
        ids, keys = torch.randint(3, 260, (1, 40)), torch.randint(2**62, (1, 40))
        batch = ids, ids.roll(-1), torch.arange(40)[None], torch.tensor([0, 11, 40], dtype=torch.int32), keys
        keeping = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow), keeping:
            loss, _ = model(*batch)
        loss.backward()
    gradients = {name: p.grad for name, p in lm.named_parameters() if p.requires_grad}
    return loss.detach(), gradients, sum(held.values()), lm.config


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_the_same_bits_are_learned_and_less_is_kept(tiny_model, narrow, dropout, monkeypatch):
    ways = {"lora": LoraConfig(rank=4, dropout=dropout), "narrow": narrow, "monkeypatch": monkeypatch}
    kept = learn(tiny_model, keep=True, **ways)
    again = learn(tiny_model, keep=False, **ways)
    assert torch.equal(kept[0], again[0])
    for name, gradient in kept[1].items():
        assert torch.equal(gradient, again[1][name]), name
    config, width = kept[3], 2 if narrow else 4
    # Of each layer silu(gate) * up and what two norms gave, but that the first reads what nobody keeps; without
    # compiled kernels narrow norms are the model's own.
    norms = 0 if narrow and not has_kernels() else 2 * config.num_hidden_layers - 1
    fewer = config.num_hidden_layers * config.intermediate_size + norms * config.hidden_size
    assert kept[2] - again[2] == pytest.approx(40 * width * fewer, rel=0.01)


def test_it_is_made_once_for_all_readers_and_let_go():
    made = []

    def make(x):
        made.append(weakref.ref(doubled := 2 * x))
        return doubled

    x = torch.randn(4, 5, requires_grad=True)
    weight, low, high = torch.randn(6, 5), torch.randn(2, 5, requires_grad=True), torch.randn(6, 2, requires_grad=True)
    given = can_be_remade(2 * x, make, x)
    sums = sum(
        AdaptedProduct.apply(given, weight, None, low, high, 1.0, None, 0, 0, remade(given)).square().sum()
        for _ in range(3)
    )
    del given
    for turn in (1, 2):  # each pass over the same graph
        sums.backward(retain_graph=True)
        assert len(made) == turn and made[-1]() is None


def test_what_is_kept_in_its_place_goes_with_the_graph():
    """A recipe holds no tensors: a layer's go as soon as its own backward pass is done, not with the whole graph."""
    x = torch.randn(4, 5)
    inside = 2 * x.requires_grad_()
    there = weakref.ref(inside)
    given = can_be_remade(3 * inside, lambda tensor: 3 * tensor, inside)
    weight, low, high = torch.randn(6, 5), torch.randn(2, 5, requires_grad=True), torch.randn(6, 2)
    out = AdaptedProduct.apply(given, weight, None, low, high, 1.0, None, 0, 0, remade(given)).sum()
    del given, inside
    assert there() is not None
    out.backward()
    assert there() is None and out.grad_fn is not None


def test_what_has_to_be_kept():
    with torch.no_grad():
        assert remade(can_be_remade(torch.ones(2), torch.clone, torch.ones(2))) is None
    assert remade(torch.ones(2)) is None
    written = can_be_remade(torch.ones(2), torch.clone, torch.ones(2))
    assert remade(written.mul_(2)) is None, "what is there is not what would be made"
    assert isinstance(remade(can_be_remade(torch.ones(2), torch.clone, torch.ones(2))).recipe, Recipe)
