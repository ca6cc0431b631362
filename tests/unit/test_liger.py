"""Kernels for GPUs: Liger's and duoka's, run by Triton's interpreter beside torch; how they are tried and called.

SKIPPED in part where Triton or Liger is not installed (`pip install triton liger-kernel` beside a torch for CPUs).
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from duoka.model import gpu_kernels
from duoka.model.gated import GatedDown
from duoka.model.loss import sum_cross_entropy
from duoka.model.norms import norm_on_gpu
from duoka.model.rotary import repeats_tables

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="NO TRITON: NO KERNEL WAS RUN")
needs_liger = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("triton", "liger_kernel")),
    reason="NO LIGER-KERNEL OR NO TRITON: LIGER'S KERNELS WERE NOT RUN",
)

SLOPES = """
import torch, torch.nn.functional as F
from duoka.model.slope_triton import cross_entropy_

torch.manual_seed(0)
looked = 0
for words in (1, 7, 512, 20011):  # a row in one piece, and in several
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows = torch.randn(6, words + 3).mul(8).to(dtype)[:, :words]  # not end to end
        if words > 8:
            rows[0, : words - 6] = float("-inf")  # words that are ruled out: all of a row's first piece
            rows[1] = 0.0
        labels = torch.randint(max(0, words - 5), words, (6,))
        wanted = rows.float().detach().requires_grad_()
        losses = F.cross_entropy(wanted, labels, reduction="none")
        losses.sum().backward()
        found = cross_entropy_(rows, labels)
        assert found.dtype is torch.float32
        torch.testing.assert_close(found, losses.detach(), rtol=1e-5, atol=1e-5)
        # The interpreter cuts bf16 off, where a GPU rounds it.
        close = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype]
        torch.testing.assert_close(rows.float(), wanted.grad, rtol=close, atol=1e-5)
        looked += 1
bad = torch.randn(3, 9)
losses = cross_entropy_(bad, torch.tensor([9, -1, 2]))
assert losses[:2].isnan().all() and losses[2].isfinite(), losses
rows = torch.randn(2, 9)
rows[0, 3] = float("nan")
assert cross_entropy_(rows, torch.tensor([0, 1])).isnan().tolist() == [True, False]
print("the same", looked)
"""

NORMS = """
import torch, torch.nn.functional as F
from duoka.model.norm_triton import RmsNorm

torch.manual_seed(0)
whole, half = torch.float32, torch.float16
looked = 0
for shape in ((2, 5, 48), (1, 3, 4, 16), (1, 700, 64), (7, 2049)):  # tiles of rows and of one
    for dtype, narrow in ((whole, whole), (whole, half), (half, half)):
        for learns in (True, False):
            x, weight = torch.randn(shape).to(dtype).requires_grad_(), torch.randn(shape[-1]).requires_grad_(learns)
            slope = torch.randn(*shape[:-2], shape[-1], shape[-2]).to(narrow).transpose(-1, -2)  # not end to end
            found = RmsNorm.apply(x, weight, 1e-5, narrow)
            found.backward(slope)
            wide, factors = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
            wanted = F.rms_norm(wide, factors.shape, factors, 1e-5)
            wanted.backward(slope.double())
            pairs = [(found, wanted, narrow), (x.grad, wide.grad, dtype)]
            pairs += [(weight.grad, factors.grad, torch.float32)] if learns else []
            assert (weight.grad is not None) == learns
            for one, two, kind in pairs:
                assert one.dtype is kind
                limit = 2**-9 if kind is torch.float16 else 1e-5
                torch.testing.assert_close(one.double(), two, rtol=limit, atol=10 * limit)
            looked += 1
none = torch.randn(0, 8, requires_grad=True)
RmsNorm.apply(none, torch.ones(8, requires_grad=True), 1e-5, torch.float32).sum().backward()
print("the same", looked)
"""

LIGERS = """
import numpy, torch, torch.nn.functional as F
import triton.language as tl
from triton.runtime import interpreter

# Liger's kernels call .to on numbers with a point, which a GPU gets as fp32, and the interpreter as Python's own.
whole = interpreter._implicit_cvt
def convert(arg):
    if type(arg) is not float:
        return whole(arg)
    return tl.tensor(interpreter.TensorHandle(numpy.array([arg], numpy.float32), tl.float32), tl.float32)
interpreter._implicit_cvt = convert
from duoka.model import gpu_kernels as kernels

def close(found, wanted, dtype):
    limit = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-8}[dtype]
    for one, two in zip(found, wanted, strict=True):
        assert one.dtype is dtype, one.dtype
        torch.testing.assert_close(one.float(), two.float(), rtol=limit, atol=10 * limit)

def learn(function, inputs, slopes):
    own = [one.detach().clone().requires_grad_() for one in inputs]
    answers = function(*(one * 1 for one in own))
    answers = answers if isinstance(answers, tuple) else (answers,)
    # Copies: a kernel may write over the gradient that comes.
    slopes = [one.clone().to(answer.dtype) for one, answer in zip(slopes, answers)]
    grads = torch.autograd.grad(answers, own, slopes)
    return [*(one.detach() for one in answers), *grads]

torch.manual_seed(0)
looked = 0
# No bf16 where two of them meet: the interpreter multiplies their bits as whole numbers (1.5 * 2 is 0).
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    wide = lambda tensors: [one.float() for one in tensors]
    meets = dtype is not torch.bfloat16
    # rotation, with tables of either width, for one row and for several
    for rows, heads, kv in ((1, 4, 2), (2, 3, 1)):
        q, k = torch.randn(rows, 6, heads, 16).to(dtype), torch.randn(rows, 6, kv, 16).to(dtype)
        slopes = [torch.randn(rows, n, 6, 16).to(dtype) for n in (heads, kv)]
        angles = torch.randn(rows, 6, 8).repeat(1, 1, 2)
        def plain(q, k):
            def turn(x):
                x = x.transpose(1, 2)
                return x * angles.cos()[:, None] + torch.cat((-x[..., 8:], x[..., :8]), -1) * angles.sin()[:, None]
            return turn(q), turn(k)
        for table in (torch.float32, dtype) if meets else (torch.float32,):
            cos, sin = angles.cos().to(table), angles.sin().to(table)
            turn = lambda q, k: kernels.rotate(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
            close(learn(turn, [q, k], slopes), learn(plain, wide([q, k]), slopes), dtype)
    looked += 1
    if not meets:
        continue
    # gated product, alone and inside the product behind it
    gate, up, slope = (torch.randn(2, 3, 24).to(dtype) for _ in range(3))
    plain = lambda a, b: F.silu(a) * b
    close(learn(kernels.silu_times, [gate, up], [slope]), learn(plain, wide([gate, up]), [slope]), dtype)
    seen = []
    grads = kernels.silu_times_backward(gate.clone(), up.clone(), lambda both: seen.append(both.clone()) or slope)
    wanted = learn(plain, wide([gate, up]), [slope])
    close([seen[0], *grads], wanted, dtype)
for part, trial in kernels.TRIALS.items():
    for dtype in (torch.float32, torch.float16):
        assert kernels.try_part(trial, torch.device("cpu"), dtype, kernels.Sizes()) == "", part
print("the same", looked)
"""


def interpret(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


@needs_triton
@pytest.mark.timeout(300)
def test_the_loss_in_one_kernel_is_torch_s() -> None:
    assert "the same 12" in interpret(SLOPES)


@needs_liger
@pytest.mark.timeout(300)
def test_liger_s_kernels_are_torch_s() -> None:
    assert "the same 3" in interpret(LIGERS)


# --- how they are tried and called, with stand-ins of the same signatures ---


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, dtype):
        inverse = (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse * weight).to(dtype)

    @staticmethod
    def backward(ctx, grad):
        x, w, inverse = ctx.saved_tensors
        along = (grad * w * x).sum(-1, keepdim=True) * inverse**3 / x.shape[-1]
        return grad * w * inverse - x * along, (grad * x * inverse).flatten(0, -2).sum(0), None, None


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return F.silu(a) * b

    @staticmethod
    def backward(ctx, grad):
        """As Liger's, in the memory of what it was given."""
        a, b = ctx.saved_tensors
        sigmoid = torch.sigmoid(a)
        slopes = grad * b * sigmoid * (1 + a * (1 - sigmoid)), grad * a * sigmoid
        return a.data.copy_(slopes[0]), b.data.copy_(slopes[1])


class Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
        ctx.save_for_backward(cos, sin)
        return Turn.turned(q, cos, sin), Turn.turned(k, cos, sin)

    @staticmethod
    def turned(x, cos, sin):
        first, second = x.float().chunk(2, dim=-1)
        cos, sin = (table[:, None, :, : x.shape[-1] // 2].float() for table in (cos, sin))
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)

    @staticmethod
    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors
        return Turn.turned(dq, cos, -sin), Turn.turned(dk, cos, -sin), *(None,) * 4


STAND_INS = {"RmsNorm": Norm, "LigerSiLUMulFunction": Product, "LigerRopeFunction": Turn}


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand-ins, on a CPU; what was called, by name."""
    called: list[str] = []

    def find(name: str) -> Any:
        called.append(name)
        return STAND_INS[name]

    monkeypatch.setattr(gpu_kernels, "find_function", find)
    monkeypatch.setattr(gpu_kernels, "takes", lambda part, *tensors: True)
    return called


CPU = torch.device("cpu")


@pytest.mark.parametrize("part", ["norm", "rotation", "MLP"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_answers_as_torch_does_is_trusted_and_nothing_else(part, dtype, liger, monkeypatch) -> None:
    trial = gpu_kernels.TRIALS[part]
    assert gpu_kernels.try_part(trial, CPU, dtype, gpu_kernels.Sizes()) == "" and liger
    (name,) = set(liger)
    right = STAND_INS[name]

    def spoil(method):
        whole = getattr(right, method)

        def wrong(ctx, *args):
            answer = whole(ctx, *args)
            first, *rest = answer if isinstance(answer, tuple) else (answer,)
            return (first * 1.2, *rest) if rest else first * 1.2

        both = {"forward": right.forward, "backward": right.backward, method: wrong}
        return type("Wrong", (torch.autograd.Function,), {name: staticmethod(one) for name, one in both.items()})

    for method in ("forward", "backward"):
        monkeypatch.setitem(STAND_INS, name, spoil(method))
        assert "does not answer" in gpu_kernels.try_part(trial, CPU, dtype, gpu_kernels.Sizes()), method

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            raise RuntimeError("no kernel image is available\nand more")

    monkeypatch.setitem(STAND_INS, name, Broken)
    assert gpu_kernels.try_part(trial, CPU, dtype, gpu_kernels.Sizes()) == (
        "it did not run here (no kernel image is available)"
    )


def test_nothing_is_used_that_was_not_tried(monkeypatch) -> None:
    monkeypatch.setattr(gpu_kernels, "TRIED", gpu_kernels.Tried())
    monkeypatch.setattr(gpu_kernels, "why_no_liger", lambda: "")
    monkeypatch.setattr(gpu_kernels, "why_no_triton", lambda: "no Triton")
    monkeypatch.setattr(
        gpu_kernels, "try_part", lambda trial, *how: "differs" if trial is gpu_kernels.TRIALS["rotation"] else ""
    )
    assert set(gpu_kernels.why_not().values()) == {"not tried"}
    assert set(gpu_kernels.try_all(CPU, torch.bfloat16, gpu_kernels.Sizes()).values()) == {"not tried"}
    found = gpu_kernels.try_all(torch.device("cuda", 0), torch.bfloat16, gpu_kernels.Sizes())
    assert found == {"norm": "no Triton", "rotation": "differs", "MLP": "", "loss": "no Triton"}
    assert not gpu_kernels.takes("MLP", torch.zeros(2)), "a tensor on a CPU"


def test_a_norm_is_narrow_at_once(liger) -> None:
    x, weight = torch.randn(2, 3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    ours = norm_on_gpu(x, weight, 1e-3)
    want = F.rms_norm(x, (8,), weight, 1e-3)
    assert torch.allclose(ours, want, atol=1e-6) and liger == ["RmsNorm"]
    got = torch.autograd.grad(ours.square().sum(), (x, weight))
    for one, two in zip(got, torch.autograd.grad(want.square().sum(), (x, weight)), strict=True):
        assert torch.allclose(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_gated_mlp_learns_the_same(liger, frozen) -> None:
    gate, up = torch.randn(2, 3, 6, requires_grad=True), torch.randn(2, 3, 6, requires_grad=True)
    weight = torch.randn(4, 6, requires_grad=not frozen)
    learned = (gate, up) if frozen else (gate, up, weight)
    want = F.linear(F.silu(gate) * up, weight)
    wanted = torch.autograd.grad(want.square().sum(), learned)
    ours = GatedDown.apply(gate * 1, up * 1, weight)
    got = torch.autograd.grad(ours.square().sum(), learned)
    assert torch.allclose(ours, want, atol=1e-6) and len(liger) == 2
    for one, two in zip(got, wanted, strict=True):
        assert torch.allclose(one, two, rtol=1e-4, atol=1e-5)


def test_a_product_that_waits_keeps_what_it_is_made_of(liger) -> None:
    """Zero-bubble schedules compute the weight's gradient later, from gate and up as they were."""
    from duoka.model.split_products import Waiting

    gate, up, waiting = torch.randn(3, 6, requires_grad=True), torch.randn(3, 6, requires_grad=True), Waiting()
    weight = torch.randn(4, 6, requires_grad=True)
    GatedDown.apply(gate * 1, up * 1, weight.detach(), (waiting, weight)).sum().backward()
    waiting.finish()
    (want,) = torch.autograd.grad(F.linear(F.silu(gate) * up, weight).sum(), weight)
    assert torch.allclose(weight.grad, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_loss_goes_through_one_kernel_where_it_is_plain(liger, monkeypatch, dtype) -> None:
    widths = []

    def kernel(logits, labels):
        widths.append(logits.dtype)
        wide = logits.float()
        losses = torch.logsumexp(wide, -1) - wide.gather(1, labels[:, None]).squeeze(1)
        slope = torch.softmax(wide, -1)
        slope[torch.arange(len(labels)), labels] -= 1
        logits.copy_(slope)
        return losses

    monkeypatch.setattr(gpu_kernels, "cross_entropy_", kernel)
    hidden = torch.randn(9, 5).to(dtype).requires_grad_()
    weight = torch.randn(11, 5).to(dtype).requires_grad_()
    labels = torch.randint(0, 11, (9,))
    ours, _ = sum_cross_entropy(hidden, weight, labels)
    want = F.cross_entropy(hidden.float() @ weight.float().t(), labels, reduction="sum")
    close = 1e-5 if dtype is torch.float32 else 2e-2
    assert abs(float(ours) / float(want) - 1) < close and set(widths) == {dtype}
    wanted = torch.autograd.grad(want, (hidden, weight))
    for one, two in zip(torch.autograd.grad(ours, (hidden, weight)), wanted, strict=True):
        assert torch.allclose(one.float(), two.float(), rtol=close, atol=close)
    widths.clear()
    sum_cross_entropy(hidden, weight, labels, bias=torch.zeros(11, dtype=dtype))
    sum_cross_entropy(hidden, weight, labels, count=True)
    assert not widths, "what is more than likelihood is computed as before"


def test_tables_of_repeated_halves_are_known() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    settings = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    rotary = LlamaRotaryEmbedding(config=LlamaConfig(**settings))
    assert repeats_tables(torch.nn.ModuleList([rotary]))

    class Interleaved(LlamaRotaryEmbedding):
        def forward(self, x, position_ids):
            cos, sin = super().forward(x, position_ids)
            return cos.flip(-1).cumsum(-1), sin

    other = Interleaved(config=LlamaConfig(**settings))
    assert not repeats_tables(torch.nn.ModuleList([rotary, other]))
    assert not repeats_tables(torch.nn.ModuleList())
