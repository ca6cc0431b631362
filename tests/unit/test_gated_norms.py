"""Norms with a gate give the values and gradients of the model's own code, and keep nothing but what they read."""

from __future__ import annotations

import functools
import importlib
import inspect

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from duoka.model import gated_norms
from duoka.model.fused import apply_fused, fused_parts

DIM, ROWS = 24, 50
NORMS = {  # class, and what it is made with beside its width
    "mamba2.MambaRMSNormGated": {"group_size": 8},
    "granitemoehybrid.GraniteMoeHybridRMSNormGated": {"group_size": DIM},
    "falcon_h1.FalconH1RMSNormGated": {"n_groups": 2, "norm_before_gate": True},
    "qwen3_5.Qwen3_5RMSNormGated": {},
    "kimi_linear.KimiLinearRMSNormGated": {},
}


def make(name, **further):
    family, _, kind = name.partition(".")
    made = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), kind)
    known = inspect.signature(made).parameters  # transformers 5.17 has no groups in some
    norm = made(DIM, **{key: value for key, value in further.items() if key in known})
    torch.manual_seed(0)
    torch.nn.init.normal_(norm.weight)
    return torch.nn.Sequential(norm)


def learn(norm, x, gate, weight):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.nbytes) or one, lambda one: one):
        answer = norm(x, gate)
    answer.float().sin().sum().backward()
    found = answer.detach(), x.grad, gate.grad, weight.grad
    x.grad = gate.grad = weight.grad = None
    return found, sum(kept)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_after_each_other_are_what_the_model_computes(monkeypatch, name, dtype):
    monkeypatch.setitem(gated_norms.AT_ONCE, "cpu", 13 * DIM)
    holder = make(name, **NORMS[name])
    norm = holder[0]
    x, gate = (torch.randn(2, ROWS // 2, DIM).to(dtype).requires_grad_() for _ in range(2))
    wanted, _ = learn(norm, x, gate, norm.weight)
    assert apply_fused(holder) == 1 and fused_parts(holder) == {"gated norm"}
    found, kept = learn(norm, x, gate, norm.weight)
    for own, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, right, rtol=1e-5, atol=1e-6)
    assert kept == x.nbytes + gate.nbytes + norm.weight.nbytes
    again, _ = learn(functools.partial(checkpoint, norm, use_reentrant=False), x, gate, norm.weight)
    for own, first in zip(again, found, strict=True):
        assert torch.equal(own, first)
    torch.testing.assert_close(norm(x[:1], gate[:1]), wanted[0][:1])  # the weight is where it was
    assert list(norm.state_dict()) == ["weight"]


def test_what_is_normed_over_rows_or_reads_more_stays():
    class OverRows(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(DIM))

        def forward(self, hidden_states, gate=None):
            return self.weight * gate * hidden_states / hidden_states.norm(dim=-2, keepdim=True)

    class WithMore(OverRows):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(1))

        def forward(self, hidden_states, gate=None):
            return self.weight * gate * hidden_states * self.scale

    assert apply_fused(torch.nn.Sequential(OverRows(), WithMore())) == 0
