"""The compiled attention beside its definition in float64: windows, softcaps, sinks, and values of another size."""

import pytest
import torch

from duoka.model import native
from duoka.model.attention import attend
from duoka.model.compiled_attention import ALLOWED, CompiledAttention, attend_documents, fits
from duoka.model.documents import Documents
from duoka.model.one_document import Scoring

pytestmark = pytest.mark.skipif(native.find() is None, reason="no C++ compiler: there are no kernels")
HALF = 2**-8  # of a bf16 number, relative: rounding to the nearest is off by half of it at most
LENGTHS = (1, 2, 130, 47, 48, 49, 16), (64,), (97, 301, 12, 13)


def draw(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


@pytest.fixture(params=("fp32", "bf16", "bf16, multiplied in fp32"))
def kind(request):
    """A type of numbers, and whose kernel attends; the last one is bf16's where processors have no better."""
    native.forget()
    if request.param == "bf16" and native.level() < 2:
        pytest.skip("this processor has no AVX512-BF16")
    native.use_at_most(2 if request.param == "bf16" else 1)
    yield torch.float32 if request.param == "fp32" else torch.bfloat16
    native.forget()


def by_definition(query, key, value, sinks, own, lengths, how):
    """(1, tokens, heads, dim) each, in float64; `own` of each document's tokens ask, its last ones."""
    many, parts = query.shape[2] // key.shape[2], []
    for q, k, v in zip(query[0].split(own), key[0].split(lengths), value[0].split(lengths), strict=True):
        k, v = (one.repeat_interleave(many, dim=1) for one in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * how.scaling
        if how.softcap:
            scores = how.softcap * torch.tanh(scores / how.softcap)
        behind = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        hidden = (behind < 0) | (behind >= (how.window or len(k)))
        exponentials = scores.masked_fill(hidden, float("-inf")).exp()
        total = exponentials.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + sinks.exp()[:, None, None]
        parts.append(torch.einsum("hqk,khd->qhd", exponentials / total, v))
    return torch.cat(parts)[None]


def compare(kind, heads, dims, lengths, how, *, whole=True):
    """Answers and gradients of the kernel and of the definition."""
    (num_heads, groups), (dim, value_dim) = heads, dims
    own = [length if whole else -(-length // 3) for length in lengths]  # tokens at its end that ask
    edges = tuple(torch.tensor([0, *sizes]).cumsum(0).int() for sizes in (own, lengths))
    shapes = (sum(own), num_heads, dim), (sum(lengths), groups, dim), (sum(lengths), groups, value_dim)
    drawn = [draw(1, *shape, dtype=kind, seed=place) for place, shape in enumerate(shapes)]
    drawn += [] if how.sinks is None else [how.sinks]
    ours = [one.detach().clone().requires_grad_() for one in drawn]
    exact = [one.detach().double().requires_grad_() for one in drawn]
    sinks = ours[3] if how.sinks is not None else None
    own_how = Scoring(how.scaling, how.window, how.softcap, sinks=sinks)
    got = attend_documents(*(one.transpose(1, 2) for one in ours[:3]), edges, own_how)
    want = by_definition(*exact[:3], exact[3] if sinks is not None else None, own, lengths, how)
    slope = draw(*want.shape, dtype=kind, seed=9)
    got.backward(slope)
    want.backward(slope.double())
    limit = 1e-6 if kind is torch.float32 else 1.3 * HALF
    for place, (one, two) in enumerate([(got, want), *((a.grad, b.grad) for a, b in zip(ours, exact, strict=True))]):
        off = float((one.detach().double() - two.detach()).norm() / two.detach().norm())
        if place < 4:
            assert one.dtype == kind and off < limit, place
        else:  # of a sink: a sum over queries of what cancels
            is_wide = {kind, how.sinks.dtype} == {torch.float32}
            assert one.dtype == how.sinks.dtype and off < (1e-5 if is_wide else 3 * HALF)


@pytest.mark.parametrize("heads, dim", (((4, 2), 32), ((3, 3), 16), ((9, 3), 64), ((2, 1), 80), ((3, 1), 48)))
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("whole", (True, False), ids=("all ask", "some ask"))
def test_attention_of_documents(kind, heads, dim, lengths, whole):
    compare(kind, heads, (dim, dim), lengths, Scoring(0.2), whole=whole)


@pytest.mark.parametrize("window", (2, 16, 33, 64, 100, 128, 300))
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("whole", (True, False), ids=("all ask", "some ask"))
def test_windows(kind, window, lengths, whole):
    compare(kind, (4, 2), (32, 32), lengths, Scoring(0.2, window), whole=whole)


@pytest.mark.parametrize("dims", ((48, 32), (192, 128), (16, 64)))
@pytest.mark.parametrize("window", (None, 50))
def test_values_of_another_size_than_keys(kind, dims, window):
    compare(kind, (3, 3), dims, LENGTHS[2], Scoring(0.2, window))


@pytest.mark.parametrize("softcap", (2.0, 50.0))
@pytest.mark.parametrize("window", (None, 50))
@pytest.mark.parametrize("whole", (True, False), ids=("all ask", "some ask"))
def test_softcaps(kind, softcap, window, whole):
    compare(kind, (4, 2), (32, 32), LENGTHS[2], Scoring(0.3, window, softcap), whole=whole)


@pytest.mark.parametrize("sinks", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("window, softcap", ((None, None), (50, None), (7, 3.0)))
def test_sinks(kind, sinks, window, softcap):
    compare(kind, (4, 2), (32, 32), LENGTHS[2], Scoring(0.2, window, softcap, sinks=2 * draw(4, dtype=sinks)))


def test_a_sink_far_above_all_scores_leaves_nothing(kind):
    one = draw(1, 2, 40, 16, dtype=kind)
    edges = (torch.tensor([0, 40], dtype=torch.int32),) * 2
    sinks = torch.tensor([300.0, -300.0], requires_grad=True)
    out = attend_documents(one, one, one, edges, Scoring(sinks=sinks))
    out.float().sum().backward()
    assert not out[:, :, 0].any() and out[:, :, 1].isfinite().all()
    assert torch.equal(sinks.grad, torch.zeros(2))
    alone = attend_documents(one, one, one, edges, Scoring())
    assert torch.equal(out[:, :, 1], alone[:, :, 1])


def test_attention_reads_tensors_as_projections_leave_them(kind):
    """Heads of one wide tensor, padded rows, and a layout that it must copy: the same bits."""
    wide, edges = draw(2, 33, 6 * 32, dtype=kind), (torch.arange(3, dtype=torch.int32) * 33,) * 2
    cut = [part.unflatten(-1, (2, 32)).transpose(1, 2) for part in wide.split(64, dim=-1)]
    copied = [one.contiguous() for one in cut]
    assert all(native.laid_by_token(one).data_ptr() == one.data_ptr() for one in cut)
    answers = [attend_documents(*one, edges, Scoring(0.1)) for one in (cut, copied)]
    assert torch.equal(*answers)


def test_documents_that_would_fill_the_memory_of_many_threads_are_torchs():
    native.forget()
    native.use_at_most(1)
    inputs = (*[torch.empty(1, 4, 1, 16)] * 3, None)
    torch.set_num_threads(2)
    for dtype in (torch.float32, torch.bfloat16):
        assert fits(inputs, dtype, 1, 8192) and not fits(inputs, dtype, 1, 8193)
    native.forget()


@pytest.mark.parametrize("case", ("window", "softcap", "sinks", "values of another size"))
def test_a_models_attention_goes_there(monkeypatch, case):
    calls, forward = [], CompiledAttention.forward
    monkeypatch.setattr(CompiledAttention, "forward", staticmethod(lambda *a: (calls.append(1), forward(*a))[1]))
    torch.set_num_threads(2)
    layer = torch.nn.Module()
    documents = Documents.of(torch.tensor([0, 30, 70], dtype=torch.int32), torch.device("cpu"))
    query, key = draw(1, 4, 70, 32, dtype=torch.float32), draw(1, 2, 70, 32, dtype=torch.float32, seed=1)
    value = draw(1, 2, 70, 16 if case.startswith("values") else 32, dtype=torch.float32, seed=2)
    hows = {"window": {"sliding_window": 8}, "softcap": {"softcap": 4.0}, "sinks": {"s_aux": torch.randn(4)}}
    how = hows.get(case, {})
    plain, _ = attend(layer, query, key, value, None, documents=documents, **how)
    assert not calls
    setattr(layer, ALLOWED, True)
    own, _ = attend(layer, query, key, value, None, documents=documents, **how)
    assert calls
    torch.testing.assert_close(own, plain, atol=1e-5, rtol=1e-5)
