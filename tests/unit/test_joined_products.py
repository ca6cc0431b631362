"""Models that compute queries, keys and values by one product, or gate and up: as fast as others, and right."""

import families
import pytest
import torch
import torch.nn.functional as F

from duoka.config.schema import LoraConfig
from duoka.model import native
from duoka.model.build import LossModel, load_model
from duoka.model.compiled_attention import CompiledAttention
from duoka.model.fused import apply_fused, fused_parts
from duoka.model.gated import GatedDown
from duoka.model.gates import ACTS, Gated
from duoka.model.one_document import apart_from_others
from duoka.model.request import ModelRequest

PARTS = {  # what is replaced beside the adapters
    "phi3": {"norm", "rotation", "joined MLP by silu"},
    "glm4": {"norm", "joined MLP by silu"},
    "gpt_neox": {"rotation", "activation"},
    "gpt2": {"activation"},
}
HYBRIDS = {  # whose MLPs have names of their own
    "granitemoehybrid": {"norm", "rotation", "activation", "gated norm", "joined MLP by silu"},
    "lfm2": {"norm", "rotation", "MLP by silu"},
    "xlstm": {"activation"},
}
WHOLE = {"phi3": {"sliding_window": None}}
EDGES = torch.tensor([0, 11, 40], dtype=torch.int32)


def learn(folder, lora, fuse):
    torch.manual_seed(0)
    lm = load_model(ModelRequest(folder, dtype=torch.float32, lora=lora))
    for name, parameter in lm.named_parameters():  # B begins as zero, which would hide A's gradient
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1)
    if fuse:
        apply_fused(lm)
    model = LossModel(lm).train()
    ids = torch.arange(40)[None] * 7 % 60 + 3
    places = torch.cat([torch.arange(11), torch.arange(29)])[None]
    loss, _ = model(ids, ids.roll(-1), places, EDGES, torch.arange(40)[None])
    loss.backward()
    return lm, loss.detach(), {name: p.grad for name, p in lm.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, dropout=0.0)], ids=["full", "lora"])
@pytest.mark.parametrize("family", [*PARTS, *HYBRIDS])
def test_it_learns_the_same(tmp_path, family, lora):
    folder = families.write_family(tmp_path, family)
    lm, ours, got = learn(folder, lora, True)
    _, plain, want = learn(folder, lora, False)
    assert fused_parts(lm) - {"adapters"} == {**PARTS, **HYBRIDS}[family]
    assert abs(ours.item() / plain.item() - 1) < 1e-6
    for name, grad in want.items():
        error = float((got[name] - grad).norm() / grad.norm().clamp_min(1e-6))
        assert error < 1e-4, f"{name}: gradient is off by {error}"


@pytest.mark.skipif(native.find() is None, reason="no C++ compiler")
@pytest.mark.parametrize("family", PARTS)
def test_the_compiled_kernel_attends(tmp_path, family, monkeypatch):
    calls, forward = [], CompiledAttention.forward
    monkeypatch.setattr(CompiledAttention, "forward", staticmethod(lambda *a: (calls.append(1), forward(*a))[1]))
    lm, *_ = learn(families.write_family(tmp_path, family, **WHOLE.get(family, {})), None, True)
    assert len(calls) == lm.config.num_hidden_layers


def draw(*shape, dtype=torch.float64, seed=0):
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.to(dtype).requires_grad_()


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.name)
def test_gradients_of_gate_and_up_in_one_tensor_are_those_of_finite_differences(act):
    assert torch.autograd.gradcheck(lambda both: Gated.apply(both, None, act), (draw(3, 8),))
    inputs = draw(2, 3, 8), draw(5, 4, seed=1)
    assert torch.autograd.gradcheck(lambda both, down: GatedDown.apply(both, None, down, None, act), inputs)


@pytest.mark.skipif(native.find() is None, reason="no C++ compiler")
@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize("act", ACTS[:2], ids=lambda act: act.name)
def test_compiled_both_ways_give_the_same_bits(act, rows):
    both, down = draw(2, rows, 2 * 5000, dtype=torch.bfloat16), draw(8, 5000, dtype=torch.bfloat16, seed=1)
    pair = [half.contiguous().detach().requires_grad_() for half in both.chunk(2, dim=-1)]
    of_joined, of_pair = GatedDown.apply(both, None, down, None, act), GatedDown.apply(*pair, down, None, act)
    slope = torch.randn(of_pair.shape).bfloat16()
    joined_grad, down_grad = torch.autograd.grad(of_joined, (both, down), slope)
    *pair_grads, pair_down_grad = torch.autograd.grad(of_pair, (*pair, down), slope)
    assert torch.equal(of_joined, of_pair) and torch.equal(down_grad, pair_down_grad)
    assert torch.equal(joined_grad, torch.cat(pair_grads, dim=-1))


def test_values_are_copied_where_they_alone_would_keep_the_joined_product():
    product = F.linear(torch.randn(1, 5, 8), torch.randn(24, 8, requires_grad=True))
    query, _, value = (one.view(1, 5, 2, 4).transpose(1, 2) for one in product.chunk(3, dim=-1))
    turned = query * 1
    copied = apart_from_others(value, turned)
    assert torch.equal(copied, value) and copied.untyped_storage().nbytes() == value.numel() * 4
    assert apart_from_others(value, query) is value, "queries keep it as well"
    with torch.no_grad():
        assert apart_from_others(value, turned) is value, "nothing is kept"
    alone = F.linear(torch.randn(1, 5, 8), torch.randn(8, 8, requires_grad=True)).view(1, 5, 2, 4).transpose(1, 2)
    assert apart_from_others(alone, turned) is alone, "a product of their own"
