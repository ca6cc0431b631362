"""The compiled parts of a step beside torch's own form in float64: as close as numbers of their type can be."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from duoka.model import compiled_attention, native
from duoka.model.attention import register_attention
from duoka.model.build import LossModel
from duoka.model.decode import MOST_ROWS, FewRowsLinear, answer_fast, attend_rows
from duoka.model.documents import Documents
from duoka.model.dropout import dropped, level_of
from duoka.model.fused import apply_fused
from duoka.model.gated import GatedDown
from duoka.model.gates import ACTS, Gated, gradients, times
from duoka.model.norms import NarrowRmsNorm
from duoka.model.rotary import own_rotation
from duoka.plan.compiler import SWITCH, find_compiler, has_kernels

pytestmark = pytest.mark.skipif(native.find() is None, reason="no C++ compiler: native.cpp was not compiled")
HALF = 2**-8  # of a bf16 number, relative: rounding to the nearest is off by half of it at most


def draw(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def far(got, want):
    return float((got.detach().double() - want.detach()).norm() / want.detach().norm())


def compare(function, oracle, inputs, limit=HALF / 1.2):
    """Answers and gradients of both; the oracle's in float64."""
    ours = [one.detach().clone().requires_grad_() for one in inputs]
    exact = [one.detach().double().requires_grad_() for one in inputs]
    got, want = function(*ours), oracle(*exact)
    slope = draw(*want.shape, seed=9).to(got.dtype)
    got.backward(slope)
    want.backward(slope.double())
    assert far(got, want) < limit
    for place, (one, two) in enumerate(zip(ours, exact, strict=True)):
        assert one.grad.dtype == one.dtype
        assert far(one.grad, two.grad) < limit, place


@pytest.mark.parametrize("x_type", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("weight_type", (torch.float32, torch.bfloat16))
def test_the_norm(x_type, weight_type):
    inputs = draw(2, 37, 24, dtype=x_type), draw(24, dtype=weight_type, seed=1)
    compare(lambda x, w: NarrowRmsNorm.apply(x, w, 1e-3), lambda x, w: F.rms_norm(x, (24,), w, 1e-3), inputs)


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.name)
def test_the_gated_product(act):
    gate, up, down = draw(5, 40), draw(5, 40, seed=1), draw(8, 40, seed=2)
    compare(lambda g, u: Gated.apply(g, u, act), lambda g, u: act.value(g) * u, (gate, up), limit=1.3 * HALF)
    ours, plain = lambda g, u, w: GatedDown.apply(g, u, w, None, act), lambda g, u, w: F.linear(act.value(g) * u, w)
    compare(ours, plain, (gate, up, down), limit=1.3 * HALF)


@pytest.mark.parametrize("act", ACTS[:2], ids=lambda act: act.name)
def test_a_gate_far_below_zero_is_shut(act):
    """However far: a share of e^-88 was left open, which is much of the largest numbers."""
    gate, ones = torch.tensor([-3e38, -1e30, -1e4, -90.0, 90.0, 1e4, 3e38]).bfloat16(), torch.ones(7).bfloat16()
    found = times(act, gate, ones), *gradients(act, gate, ones, ones.clone, None, in_place=True)
    assert all(float(one[0]) == 0 and one.isfinite().all() for one in found)
    if act is ACTS[0]:  # torch's own GELU has no number there
        compare(Gated.apply, lambda g, u: F.silu(g) * u, (gate, ones))


def theirs(query, key, cos, sin):
    def turned(x):
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)

    cos, sin = cos.unsqueeze(1).to(query.dtype), sin.unsqueeze(1).to(query.dtype)
    return query * cos + turned(query) * sin, key * cos + turned(key) * sin


@pytest.mark.parametrize("tables", (torch.float32, torch.bfloat16))
def test_the_rotation(tables):
    cos, sin = draw(1, 7, 16, dtype=tables, seed=3), draw(1, 7, 16, dtype=tables, seed=4)
    turn = own_rotation(theirs)

    def both(one):
        def run(query, key):
            with torch.autocast("cpu", torch.bfloat16, enabled=query.dtype is torch.bfloat16):
                return torch.cat(one(query.transpose(1, 2), key.transpose(1, 2), cos, sin), dim=1)

        return run

    compare(both(turn), both(theirs), (draw(2, 7, 4, 16), draw(2, 7, 2, 16)))


@pytest.fixture
def anew(monkeypatch):
    """Found again, as by another process."""
    native.forget()
    yield
    native.forget()


def test_logits_become_the_slope_of_their_loss():
    logits, targets = 4 * draw(6, 3001), torch.tensor([0, 3000, 17, 5, 5, 1024])
    exact = logits.double().requires_grad_()
    want = F.cross_entropy(exact, targets, reduction="none")
    want.sum().backward()
    slope = logits.clone()
    losses = native.cross_entropy_(slope, targets)
    assert torch.allclose(losses, want.detach(), rtol=1e-6)
    assert far(slope, exact.grad) < HALF


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("units", (6, 256, 1001))
def test_dropout_drops_what_torch_drops(dtype, units):
    x, keys, level = draw(5, units, dtype=dtype), torch.tensor([0, -1, 2**62, -(2**63), 12345]), level_of(0.3)
    want = x.masked_fill(dropped(keys, -987654321987654321, units, level), 0.0)
    assert torch.equal(native.drop(x, keys, -987654321987654321, level), want)
    assert 0.2 < float((want == 0).float().mean()) < 0.45


def test_sums_take_narrow_parts():
    sums, part = draw(300, dtype=torch.float32), draw(300, seed=1)
    assert torch.equal(native.add_(sums.clone(), part), sums + part.float())


def model_of(lengths):
    register_attention()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, attn_implementation="duoka",
    )  # fmt: skip
    ids = torch.randint(3, 300, (1, sum(lengths)))
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    edges = torch.tensor([0, *lengths]).cumsum(0).int()
    return LossModel(LlamaForCausalLM(config)), (ids, ids.roll(-1), places, Documents.of(edges, torch.device("cpu")))


def learn(model, inputs, narrow=True):
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        loss, _ = model(*inputs)
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters()}


def test_a_whole_model_is_nearer_to_fp32_than_torchs_bf16(monkeypatch):
    """Every part of it in one step, and none of it where the switch says so."""
    model, inputs = model_of((40, 7, 70))
    apply_fused(model.lm)
    exact, wanted = learn(model, inputs, narrow=False)
    calls = []
    for name in ("norm_forward", "gate_times", "rotate", "cross_entropy_", "fits"):
        place = compiled_attention if name == "fits" else native
        plain = getattr(place, name)
        monkeypatch.setattr(
            place, name, lambda *a, plain=plain, name=name, **k: (calls.append(name), plain(*a, **k))[1]
        )
    loss, found = learn(model, inputs)
    assert {name: calls.count(name) for name in set(calls)} == {
        "norm_forward": 5, "gate_times": 2, "rotate": 8, "cross_entropy_": 1, "fits": 2,
    }  # fmt: skip
    calls.clear()
    monkeypatch.setattr(native, "find", lambda: None)
    torch_loss, torchs = learn(model, inputs)
    assert not set(calls) - {"fits"}
    assert abs(loss / exact - 1) < 1e-3
    assert abs(torch_loss / exact - 1) < 1e-3
    ours, plain = (max(far(one[name], want.double()) for name, want in wanted.items()) for one in (found, torchs))
    assert ours < 1.2 * plain, (ours, plain)


@pytest.mark.parametrize("label", (8, -1, -100))
def test_a_label_outside_of_the_head_is_refused_as_torch_does(label):
    logits = draw(3, 8)
    with pytest.raises(IndexError, match="outside of the head's 8 words"):
        native.cross_entropy_(logits.clone(), torch.tensor([0, label, 7]))
    losses = native.cross_entropy_(logits.clone(), torch.tensor([0, 3, 7], dtype=torch.int32))
    want = F.cross_entropy(logits.double(), torch.tensor([0, 3, 7]), reduction="none")
    assert torch.allclose(losses, want, rtol=1e-6)


@pytest.mark.parametrize("narrow", (True, False))
@pytest.mark.parametrize("edges", ([0, 4, 7], [0, 4, 12], [2, 4, 10]))
def test_documents_that_do_not_fill_their_row_are_not_attended(edges, narrow):
    """Memory that nobody wrote would be the answer: torch's form refuses them."""
    model, (ids, labels, places, _) = model_of((6, 4))
    apply_fused(model.lm)
    documents = Documents.of(torch.tensor(edges, dtype=torch.int32), torch.device("cpu"))
    with pytest.raises(RuntimeError), torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        model(ids, labels, places, documents)


def test_sums_that_lie_otherwise_are_left_to_torch():
    assert native.adds(draw(8, 4, dtype=torch.float32), draw(8, 4))
    assert not native.adds(draw(4, 8, dtype=torch.float32).t(), draw(8, 4))


@pytest.mark.parametrize("narrow", (True, False))
def test_the_count_of_threads_changes_no_bit(narrow):
    model, inputs = model_of((40, 7, 70))
    apply_fused(model.lm)
    answers = []
    for count in (1, 2):
        torch.set_num_threads(count)  # conftest.py sets it back
        answers.append(learn(model, inputs, narrow))
    (one, grads), (two, again) = answers
    assert one == two and all(torch.equal(grads[name], again[name]) for name in grads)


def test_without_a_compiler_there_is_no_library(monkeypatch, anew):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    assert find_compiler() is None and not has_kernels()
    assert native.find() is None and native.level() == 0


def test_it_is_compiled_once_and_a_broken_compiler_costs_nothing(tmp_path, monkeypatch, anew):
    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path / "cache"))
    assert native.find() is not None
    (path,) = (tmp_path / "cache" / "native").glob("*.so")
    made = path.stat().st_mtime_ns
    native.forget()
    assert native.find() is not None and path.stat().st_mtime_ns == made
    whole = path.read_bytes()
    path.unlink()  # this process has it in its memory: what a new one finds is asked of one
    path.write_bytes(whole[:5000])  # by a machine that went down
    asked = "from duoka.model import native; print(native.level())"
    said = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=120, check=True)
    assert said.stdout.strip() == str(native.level())
    made_again = [one for one in path.parent.glob("*.so") if one.stat().st_size > 5000]
    assert len(made_again) == 1
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path / "other"))
    native.forget()
    assert native.find() is None
    assert "false could not make them" in native.why_not()
    monkeypatch.setenv(SWITCH, "0")
    native.forget()
    assert native.find() is None and not has_kernels()


def test_a_cache_that_cannot_be_written_is_no_reason_to_go_without(tmp_path, monkeypatch, anew):
    (tmp_path / "cache").write_text("a file, where a folder should be")
    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path / "cache"))
    assert native.find() is not None


def test_ranks_use_what_all_have(anew):
    best = native.level()
    native.use_at_most(best)
    assert native.level() == best
    native.use_at_most(1)
    assert native.level() == 1 and native.serves(draw(2)) and not native.why_not()
    native.use_at_most(0)
    assert native.find() is None and not native.serves(draw(2))
    assert native.why_not() == "another rank has none"


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("window", (0, 4))
def test_attention_of_a_decoding_pass(dtype, window):
    """Rows of other lengths and one that is empty, over keys and values that their own token joins; each by itself."""
    heads, groups, dim, lengths = 6, 2, 20, (0, 9, None, 3)
    stores = [
        None if n is None else [draw(groups, n + 4, dim, dtype=dtype, seed=n + side) for side in (0, 50)]
        for n in lengths
    ]
    query, key, value = (draw(len(lengths), n, 1, dim, dtype=dtype, seed=70 + n) for n in (heads, groups, groups))

    def ask(rows):
        picked = [stores[row] for row in rows]
        places = [[0 if one is None else one[side].data_ptr() for one in picked] for side in (0, 1)]
        places += [[0 if one is None else one[0].shape[1] for one in picked], [lengths[row] or 0 for row in rows]]
        mine = [one[list(rows)].contiguous() for one in (query, key, value)]
        return attend_rows(*mine, torch.tensor(places), window, 0.3)

    found = ask(range(len(lengths)))
    assert found.shape == (len(lengths), 1, heads, dim) and not found[2].any()
    for row, length in enumerate(lengths):
        if length is None:
            continue
        keys, values = (one.double()[:, : length + 1].repeat_interleave(heads // groups, dim=0) for one in stores[row])
        assert torch.equal(stores[row][0][:, length], key[row, :, 0]), "its own key was not written"
        scores = (keys @ query[row].double().transpose(1, 2)).squeeze(2) * 0.3  # (heads, tokens)
        if window:
            scores[:, : max(0, length + 1 - window)] = -torch.inf
        want = torch.einsum("ht,htd->hd", scores.softmax(-1), values)
        assert far(found[row, 0], want) < (HALF if dtype is torch.bfloat16 else 1e-6)
        assert torch.equal(ask([row])[0], found[row]), "a row depends on its neighbors"


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(("inputs", "outputs"), ((64, 48), (77, 5)))
def test_products_of_few_rows(dtype, inputs, outputs):
    """As torch's in float64; a row's numbers are the same among any others; gradients and many rows are torch's."""
    plain = torch.nn.Linear(inputs, outputs).to(dtype)
    wrapped = torch.nn.Sequential(torch.nn.Embedding(3, inputs, dtype=dtype), plain)
    assert answer_fast(wrapped) and type(plain) is FewRowsLinear
    x = draw(MOST_ROWS + 1, inputs, dtype=dtype)
    with torch.no_grad():
        want = F.linear(x.double(), plain.weight.double(), plain.bias.double())
        whole = plain(x[:MOST_ROWS])
        assert far(whole, want[:MOST_ROWS]) < (HALF if dtype is torch.bfloat16 else 1e-6)
        for rows in (1, 2, 3, 7, 8, 9, 13):
            assert torch.equal(plain(x[3 : 3 + rows]), whole[3 : 3 + rows]), f"{rows} rows compute otherwise"
        assert torch.equal(plain(x), F.linear(x, plain.weight, plain.bias))
    assert torch.equal(plain(x[:2]), F.linear(x[:2], plain.weight, plain.bias))
    assert plain(x[:2]).requires_grad
    with torch.no_grad():
        assert not answer_fast(torch.nn.Conv1d(2, 2, 3)), "a convolution is no product of rows"
