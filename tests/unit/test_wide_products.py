"""bf16 products where the CPU has no instructions for them: torch's own numbers, of kernels for fp32."""

import json
import os
import subprocess
import sys

import pytest

# In a process of its own: a kernel that takes another's place does so for all that comes after.
SCRIPT = """
import json, warnings
import torch
warnings.simplefilter("error")  # torch warns of kernels that take the place of others

from duoka.model.wide_products import widen_products

generator = torch.Generator()

def draw(*shape):
    return torch.randn(shape, generator=generator).bfloat16()

def products(pieces):
    named = {}
    for name, (rows, inner, columns) in {
        "wide": (40, 70, 900), "tall": (900, 70, 40), "in pieces": (90, 900, 9000), "tall, in pieces": (9000, 900, 90),
        "few rows": (2, 600, 500), "small": (8, 8, 8), "nothing summed": (64, 0, 64), "no rows": (0, 64, 64),
    }.items():
        if "pieces" in name and not pieces:
            continue  # torch takes many seconds
        generator.manual_seed(1)
        a, b = draw(rows, inner), draw(columns, inner).t()
        named[name] = (a @ b, a.double() @ b.double(), inner)
        bias = draw(columns)
        named[f"{name}, added"] = (
            torch.addmm(bias, a, b, beta=0.5, alpha=2), 0.5 * bias.double() + 2 * (a.double() @ b.double()), inner + 1)
        out = torch.empty(0).bfloat16()
        torch.mm(a, b, out=out)
        named[f"{name}, into"] = (out, a.double() @ b.double(), inner)
    batches = {"batch": (6, 40, 30, 90), "batch, in pieces": (3, 200, 6000, 300)}
    for name, (count, rows, inner, columns) in batches.items():
        if "pieces" in name and not pieces:
            continue
        generator.manual_seed(1)
        a, b, bias = draw(count, rows, inner), draw(count, inner, columns), draw(count, 1, columns)
        named[name] = (a @ b, a.double() @ b.double(), inner)
        named[f"{name}, added"] = (torch.baddbmm(bias, a, b), bias.double() + a.double() @ b.double(), inner + 1)
    return named

def gradients(dtype):
    torch.manual_seed(2)
    layer = torch.nn.Linear(70, 130)
    x = torch.randn(2, 50, 70).bfloat16().to(dtype).requires_grad_(True)
    layer = layer.bfloat16().to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.float32):
        layer(x).double().square().sum().backward()
    return [x.grad.double(), layer.weight.grad.double()]

def attention(dtype):
    torch.manual_seed(3)
    query, key, value = (torch.randn(2, 4, 33, 16).bfloat16().to(dtype).requires_grad_(True) for _ in range(3))
    mask = torch.randn(2, 1, 33, 33).bfloat16().to(dtype)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    out.double().square().sum().backward()
    return [one.double() for one in (out.detach(), query.grad, key.grad, value.grad)]

def off(ours, exact):
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, exact))

before = products(False)
is_wide = widen_products()
errors = {}
for name, (ours, exact, terms) in products(True).items():
    assert ours.dtype is torch.bfloat16 and ours.shape == exact.shape, name
    if exact.numel():
        # One rounding to bf16 (half of a last digit, 2**-9), and fp32's own of the sums.
        room = exact.abs() * 2.0**-8 + terms * 1e-6 + 1e-30
        other = (ours != before[name][0]).double().mean() if name in before else 0
        errors[name] = [float(((ours.double() - exact).abs() / room).max()), float(other)]
print(json.dumps({
    "wide": is_wide, "again": widen_products(), "errors": errors,
    "kept": float(torch.mm(torch.ones(9, 9), torch.ones(9, 9)).sum()),
    "layer": off(gradients(torch.float32), gradients(torch.float64)),
    "attention": off(attention(torch.bfloat16), attention(torch.float64)),
}))
"""


@pytest.fixture(scope="module")
def told():
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}  # as a CPU without them, whatever this one is
    ended = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_numbers_are_those_of_exact_sums_rounded_once(told):
    assert told["wide"] and told["again"] and told["kept"] == 729
    assert len(told["errors"]) == 25
    for name, (off, other) in told["errors"].items():
        assert off <= 1, (name, off)
        assert other < 0.01, f"{name}: {other:.1%} of the numbers are rounded otherwise than by torch"


def test_passes_of_layers_and_attention(told):
    assert told["layer"] < 5e-3 and told["attention"] < 1e-2


def test_cpus_with_instructions_keep_their_kernels(monkeypatch):
    import duoka.model.wide_products as module

    monkeypatch.setattr(module, "has_cpu_bf16", lambda: True)
    monkeypatch.setattr(module.torch.library, "Library", lambda *_: pytest.fail("a kernel is replaced"))
    assert not module.widen_products.__wrapped__()
