"""Thin products of adapters beside their definition in float64."""

import pytest
import torch

from duoka.model import native
from duoka.model.thin import collect, spread_, squeeze

SHAPES = ((1, 16, 1), (37, 80, 3), (130, 272, 8), (300, 64, 17))  # rows, width, rank


def draw(*shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(found, wanted, dtype):
    limit = 1e-6 if dtype is torch.float32 else 5e-3
    assert float((found.double() - wanted).norm()) < limit * float(wanted.norm())


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("sizes", SHAPES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_products_are_those_of_the_definition(sizes, dtype):
    rows, width, rank = sizes
    whole = draw(rows, 2 * width, dtype=dtype, seed=0)
    x, matrix, thin = whole[:, :width], draw(rank, width, dtype=dtype, seed=1), draw(rows, rank, dtype=dtype, seed=2)
    exact, m, t = x.double(), matrix.double(), thin.double()
    check(squeeze(x, matrix, 0.5), 0.5 * exact @ m.t(), dtype)
    check(collect(thin, x, 0.5), 0.5 * t.t() @ exact, dtype)
    beside = whole[:, width:].clone()
    spread_(x, thin, matrix, 0.5)
    check(x, exact + 0.5 * t @ m, dtype)
    assert torch.equal(whole[:, width:], beside), "what lies beside the rows is no part of them"


@pytest.mark.skipif(native.find() is None, reason="no C++ compiler")
def test_other_widths_are_left_to_torch():
    x, matrix = draw(5, 24, dtype=torch.float32, seed=0), draw(2, 24, dtype=torch.float32, seed=1)
    assert torch.equal(squeeze(x, matrix).contiguous(), (matrix @ x.t()).t().contiguous())


@pytest.mark.skipif(native.find() is None, reason="no C++ compiler")
def test_threads_change_no_bit():
    x, matrix = draw(301, 272, dtype=torch.bfloat16, seed=0), draw(9, 272, dtype=torch.bfloat16, seed=1)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            thin = squeeze(x, matrix)
            to = x.clone()
            spread_(to, thin, matrix)
            found.append((thin, to, collect(thin, x)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for some in found[1:] for one, other in zip(found[0], some, strict=True))
