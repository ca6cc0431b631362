"""Selective recompute redoes what is cheap: products and attention are computed once, by whichever kernel."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from duoka.config.schema import DataConfig, DataSource, ModelConfig, ParallelConfig, RunConfig
from duoka.data.feed.loader import GlobalBatch, pack_segments
from duoka.data.tokens.template import Sample
from duoka.model import compiled_attention, native
from duoka.model.build import LossModel, load_model
from duoka.model.compiled_attention import CompiledAttention
from duoka.model.request import ModelRequest
from duoka.parallel.apply import parallelize
from duoka.parallel.mesh import Mesh
from duoka.plan.layout import Layout
from duoka.train.stages.stage import build_stage

LAYERS, MICRO_BATCHES = 4, 3
SFT = RunConfig(model=ModelConfig(name="tiny"), data=DataConfig(train=(DataSource(name="identity"),)))


def batch_of(lengths):
    """A global batch of as many packed micro-batches as there are lists of documents' lengths."""
    torch.manual_seed(5)
    micros = []
    for own in lengths:
        ids = [torch.randint(3, 250, (length,)).numpy() for length in own]
        micros.append(pack_segments([Sample(one, one > 0) for one in ids], len(own)))
    targets = sum(micro.num_targets for micro in micros)
    return GlobalBatch(micros, targets, 1, 1, 0, 0, ids[0])


def step_under(recompute, folder, batch):
    """(loss, gradients) of one step."""
    model = LossModel(load_model(ModelRequest(folder, dtype=torch.float32)))
    engine = parallelize(model, Layout(recompute=recompute), ParallelConfig(), Mesh())
    engine.model.train()
    sums = engine.forward_backward(batch, build_stage(SFT))
    return sums.losses["tokens"], {name: p.grad for name, p in engine.named_trainable().items()}


class Counted(TorchDispatchMode):
    """How often each operator is computed; what a recomputed layer takes from its memory is not."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def torchs_own(monkeypatch):
    """Without the compiled kernel, which selective recompute goes without too."""
    monkeypatch.setattr(compiled_attention, "fits", lambda *_: False)


@pytest.mark.skipif(native.find() is None, reason="no C++ compiler")
@pytest.mark.parametrize(("recompute", "times"), [("none", 1), ("full", 2)])
def test_the_compiled_kernel_runs_once_unless_all_is_redone(tiny_model, monkeypatch, recompute, times):
    calls, forward = [], CompiledAttention.forward
    monkeypatch.setattr(CompiledAttention, "forward", staticmethod(lambda *a: (calls.append(1), forward(*a))[1]))
    step_under(recompute, tiny_model, batch_of([[20, 7, 11], [3, 9], [31]]))
    assert len(calls) == times * LAYERS * MICRO_BATCHES


@pytest.mark.parametrize(("recompute", "times"), [("none", 1), ("selective", 1), ("full", 2)])
def test_attention_of_a_document_is_computed_once_unless_all_is_redone(tiny_model, torchs_own, recompute, times):
    batch = batch_of([[20]] * MICRO_BATCHES)
    with Counted() as counted:
        step_under(recompute, tiny_model, batch)
    calls = {
        name: count for name, count in counted.calls.items() if name.startswith("_scaled_dot") and "back" not in name
    }
    assert sum(calls.values()) == times * LAYERS * MICRO_BATCHES, calls


def plain_attention(query, key, value, edges, scale):
    """Weights and inputs of each document, heads first: (place, weights, query, key, value)."""
    group = query.shape[1] // key.shape[1]
    for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        q, k, v = (t[start:end].transpose(0, 1) for t in (query, key, value))
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = q @ k.transpose(1, 2) * scale
        seen = torch.ones(end - start, end - start).tril().bool()
        yield slice(start, end), scores.masked_fill(~seen, float("-inf")).softmax(-1), q, k, v


@pytest.fixture
def cpu_kernel(monkeypatch, torchs_own):
    """torch's operator for packed rows, with a body that a CPU can run; how often it ran forward and backward."""
    import duoka.model.attention as room

    if room.find_varlen() is None:
        pytest.skip("this torch has no attention over documents")
    calls = {"forward": 0, "backward": 0}

    def forward(query, key, value, edges, edges_k, max_q, max_k, is_causal=False, scale=None, *rest):
        calls["forward"] += 1
        assert is_causal and max_q == max_k == int(edges.diff().max())
        out = torch.empty_like(query)
        for place, weights, _, _, v in plain_attention(query, key, value, edges, scale):
            out[place] = (weights @ v).transpose(0, 1)
        return out, query.new_zeros(query.shape[1], query.shape[0]), torch.zeros(2, dtype=torch.uint64)

    def backward(grad, query, key, value, out, lse, edges, edges_k, max_q, max_k, is_causal, state, scale=None, *rest):
        calls["backward"] += 1
        grads = [torch.empty_like(tensor) for tensor in (query, key, value)]
        for place, weights, q, k, v in plain_attention(query, key, value, edges, scale):
            g = grad[place].transpose(0, 1)
            d_weights = g @ v.transpose(1, 2)
            d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdim=True)) * scale
            own = (d_scores @ k, d_scores.transpose(1, 2) @ q, weights.transpose(1, 2) @ g)
            for whole, part in zip(grads, own, strict=True):
                heads = part.unflatten(0, (whole.shape[1], -1)).sum(1)  # what a group of queries shares
                whole[place] = heads.transpose(0, 1)
        return tuple(grads)

    monkeypatch.setattr(room, "has_kernel_for", lambda *_: True)
    with torch.library._scoped_library("torch_attn", "IMPL") as library:
        library.impl("_varlen_attn", forward, "CPU")
        library.impl("_varlen_attn_backward", backward, "CPU")
        yield calls


@pytest.mark.parametrize(("recompute", "times"), [("none", 1), ("selective", 1), ("full", 2)])
def test_the_kernel_of_packed_rows_runs_once_unless_all_is_redone(tiny_model, cpu_kernel, recompute, times):
    step_under(recompute, tiny_model, batch_of([[20, 7, 11], [3, 9], [31]]))
    assert cpu_kernel == {"forward": times * LAYERS * MICRO_BATCHES, "backward": LAYERS * MICRO_BATCHES}


def test_what_the_kernel_gave_is_what_the_backward_pass_gets(tiny_model, cpu_kernel):
    batch = batch_of([[20, 7, 11], [3, 9]])
    want, want_gradients = step_under("none", tiny_model, batch)
    loss, gradients = step_under("selective", tiny_model, batch)
    assert loss == want
    assert all(torch.equal(gradients[name], one) for name, one in want_gradients.items())
