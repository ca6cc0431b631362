"""fp32 products by oneDNN in place of torch's MKL: the same numbers however matrices lie, and of large ones only."""

import json
import os
import platform
import subprocess
import sys

import pytest
import torch

from duoka.plan.hardware import halves_avx512, mkl_is_slow
from duoka.torch_private import onednn_product

IS_X86 = platform.machine() in ("x86_64", "AMD64")
needs_onednn = pytest.mark.skipif(onednn_product is None or not IS_X86, reason="no oneDNN for this processor")

# In a process of its own: a kernel that takes another's place does so for all that comes after.
SCRIPT = """
import json, warnings
import torch
warnings.simplefilter("error")  # torch warns of kernels that take the place of others
import duoka.model.onednn_products as ours

ours.mkl_is_slow = torch.backends.mkl.is_available = lambda: True  # wherever this runs
ours.takes_across = lambda: True
calls, product = [], ours.onednn_product
ours.onednn_product = lambda a, weight, bias: (calls.append(a.shape), product(a, weight, bias))[1]
generator = torch.Generator().manual_seed(1)

def draw(*shape):
    return torch.randn(shape, generator=generator)

def off(found, exact):
    assert found.dtype is torch.float32 and found.shape == exact.shape
    return float((found.double() - exact).norm() / exact.norm().clamp_min(1e-30))

a, b, c = draw(700, 300), draw(300, 500), draw(700, 500)
long, words, tall = draw(1100, 70), draw(1100, 9000), draw(9000, 70)
many, bias, sums = draw(70, 70_000).t(), draw(500), draw(700, 500)
broad = draw(10_000, 500)
kept = [draw(8, 8) @ draw(8, 8), draw(4000, 8) @ draw(8, 4000), draw(0, 512) @ draw(512, 512)]
assert ours.use_onednn() and ours.use_onednn()
generator.manual_seed(1)
draw(700, 300), draw(300, 500), draw(700, 500), draw(1100, 70), draw(1100, 9000), draw(9000, 70), draw(70, 70_000)
draw(500), draw(700, 500), draw(10_000, 500)
calls.clear()
again = [draw(8, 8) @ draw(8, 8), draw(4000, 8) @ draw(8, 4000), draw(0, 512) @ draw(512, 512)]
errors, counts = {}, {"thin or small": len(calls)}

def check(name, compute, exact):
    calls.clear()
    errors[name] = off(compute(), exact)
    counts[name] = len(calls)

d = torch.Tensor.double
check("rows", lambda: a @ b, d(a) @ d(b))
check("large", lambda: words @ tall, d(words) @ d(tall))
check("turned", lambda: c @ b.t(), d(c) @ d(b).t())
check("of rows", lambda: a.t() @ c, d(a).t() @ d(c))
check("in pieces", lambda: words.t() @ long, d(words).t() @ d(long))
check("long, in pieces", lambda: many @ tall[:100].t(), d(many) @ d(tall[:100]).t())
check("part of a matrix", lambda: broad[:999, 200:] @ b, d(broad[:999, 200:]) @ d(b))
check("by a part of one", lambda: a[:, 50:] @ b[50:, 7:], d(a[:, 50:]) @ d(b[50:, 7:]))
check("by a part of one, turned", lambda: long @ broad[:, 70:140].t(), d(long) @ d(broad[:, 70:140]).t())
flat = broad.t().contiguous()
check("into, by rows", lambda: torch.mm(c[:80], flat, out=torch.empty(0)), d(c[:80]) @ d(flat))
odd = torch.cat([draw(1), b.flatten()])[1:].view(300, 500)
check("odd place", lambda: a @ odd, d(a) @ d(odd))
check("into", lambda: torch.mm(words.t(), long, out=torch.empty(0)), d(words).t() @ d(long))
check("into a part", lambda: torch.mm(a, b, out=torch.empty(900, 500)[50:750]), d(a) @ d(b))
check("into, of many columns", lambda: torch.mm(c[:80], broad.t(), out=torch.empty(0)), d(c[:80]) @ d(broad).t())
check("bias", lambda: torch.addmm(bias, a, b), d(bias) + d(a) @ d(b))
check("times", lambda: torch.addmm(bias, a, b, beta=0.5), 0.5 * d(bias) + d(a) @ d(b))
check("times 0", lambda: torch.addmm(torch.full((500,), torch.nan), a, b, beta=0), d(a) @ d(b))
check("matrix, times", lambda: torch.addmm(sums, a, b, beta=-3, alpha=2), -3 * d(sums) + 2 * d(a) @ d(b))
check("matrix added", lambda: torch.addmm(sums, a, b), d(sums) + d(a) @ d(b))
check("sum", lambda: sums.clone().addmm_(a, b), d(sums) + d(a) @ d(b))
check("sum of pieces", lambda: tall.clone().addmm_(words.t(), long), d(tall) + d(words).t() @ d(long))
check("sum, times", lambda: sums.clone().addmm_(a, b, alpha=2), d(sums) + 2 * d(a) @ d(b))

ours.takes_across = lambda: False
check("Zen 4, of rows", lambda: a.t() @ c, d(a).t() @ d(c))
check("Zen 4, rows", lambda: a @ b, d(a) @ d(b))
ours.takes_across = lambda: True

def gradients(dtype):
    torch.manual_seed(2)
    layer = torch.nn.Linear(300, 500).to(dtype)
    x = torch.randn(2, 350, 300).to(dtype).requires_grad_(True)
    layer(x).square().sum().backward()
    return torch.cat([one.grad.flatten() for one in (x, layer.weight, layer.bias)])

check("layer", lambda: gradients(torch.float32), gradients(torch.float64))
refused = []
for wrong in (lambda: torch.mm(draw(600, 600), draw(700, 600)), lambda: torch.mm(a, b, out=torch.empty(0).double())):
    try:
        wrong()
    except RuntimeError as error:
        refused.append(str(error))
print(json.dumps({
    "errors": errors, "counts": counts, "refused": refused,
    "kept": all(torch.equal(x, y) for x, y in zip(kept, again, strict=True)),
    "double": off((a.double() @ b.double()).float(), d(a) @ d(b)),
}))
"""


@pytest.fixture(scope="module")
def told():
    env = {**os.environ, "ONEDNN_VERBOSE": "1"}  # it says which of its programs computes each product
    ended = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    *programs, found = ended.stdout.splitlines()
    return {**json.loads(found), "programs": [one.split(",") for one in programs if ",exec," in one]}


@needs_onednn
def test_numbers_are_those_of_fp32_however_matrices_lie(told):
    assert all(off < 1e-6 for off in told["errors"].values()), told["errors"]


@needs_onednn
def test_no_product_is_left_to_the_slow_definition(told):
    """oneDNN has fast programs for some layouts, and for all others one that takes some hundred times as long."""
    products = [one for one in told["programs"] if "inner_product" in one]
    assert len(products) >= sum(told["counts"].values()) and len(products[0]) > 6
    assert not [one for one in products if any(word.startswith("ref") for word in one)]


@needs_onednn
def test_who_computes_what(told):
    """Large products once, what lies across by pieces; thin, small, and scaled in place: torch's own."""
    counts = told["counts"]
    assert {name for name, count in counts.items() if not count} == {
        "thin or small",
        "times 0",
        "sum, times",
        "by a part of one",
        "by a part of one, turned",
        "Zen 4, of rows",
    }
    in_pieces = {"in pieces", "long, in pieces", "into", "into, of many columns", "sum of pieces"}
    assert {name for name, count in counts.items() if count > 1} == {"layer", *in_pieces}
    assert counts["layer"] == 3
    assert told["kept"] and told["double"] < 1e-7


@needs_onednn
def test_what_torch_refuses_is_refused_in_its_words(told):
    assert "cannot be multiplied" in told["refused"][0] and "dtype" in told["refused"][1]


@pytest.mark.parametrize(
    "vendor, flags, limit, slow",
    (
        ("AuthenticAMD", "fma avx2 avx512f", "", True),
        ("AuthenticAMD", "fma avx2 avx512f", "AVX512_CORE_BF16", True),
        ("AuthenticAMD", "fma avx2 avx512f", "avx2", False),
        ("AuthenticAMD", "fma avx2", "", False),
        ("GenuineIntel", "fma avx2 avx512f", "", False),
    ),
)
def test_where_mkl_is_slow(tmp_path, vendor, flags, limit, slow):
    facts = tmp_path / "cpuinfo"
    facts.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: {flags}\n\nprocessor\t: 1\n")
    assert mkl_is_slow(facts, {"ONEDNN_MAX_CPU_ISA": limit}) == slow


@pytest.mark.parametrize(
    "vendor, family, halves",
    (
        ("AuthenticAMD", "cpu family\t: 25\n", True),  # Zen 4
        ("AuthenticAMD", "cpu family\t: 26\n", False),  # Zen 5
        ("GenuineIntel", "cpu family\t: 6\n", False),
        ("AuthenticAMD", "", False),
    ),
)
def test_whose_avx512_is_two_halves(tmp_path, vendor, family, halves):
    facts = tmp_path / "cpuinfo"
    facts.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n{family}\nprocessor\t: 1\n")
    assert halves_avx512(facts) == halves


def test_elsewhere_no_kernel_is_replaced(monkeypatch):
    import duoka.model.onednn_products as module

    monkeypatch.setattr(module, "mkl_is_slow", lambda: False)
    monkeypatch.setattr(torch.library, "Library", lambda *_: pytest.fail("a kernel is replaced"))
    assert not module.use_onednn.__wrapped__()
