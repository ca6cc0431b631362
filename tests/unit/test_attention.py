"""Packed documents never see each other: packed = each document alone, in loss and in all gradients."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from held_layers import LiveBytes
from transformers.models.llama import modeling_llama
from transformers.models.qwen2_moe import modeling_qwen2_moe

from duoka.model.attention import attend
from duoka.model.build import LossModel, load_model
from duoka.model.request import ModelRequest

LENGTHS = (17, 45, 3, 96, 1)


def documents(vocab):
    torch.manual_seed(1)
    return [torch.randint(3, vocab, (length,)) for length in LENGTHS]


def packed(docs):
    ids = torch.cat(docs)[None]
    places = torch.cat([torch.arange(len(doc)) for doc in docs])[None]
    labels = torch.cat([torch.cat([doc[1:], torch.tensor([-100])]) for doc in docs])[None]
    edges = torch.tensor([0, *torch.tensor([len(doc) for doc in docs]).cumsum(0)], dtype=torch.int32)
    return {"input_ids": ids, "labels": labels, "position_ids": places, "boundaries": edges}


def separate_loss(model, docs):
    """transformers' own attention and torch's own loss, a document at a time."""
    total = torch.zeros(())
    for doc in docs:
        if len(doc) > 1:
            total = total + F.cross_entropy(model(doc[None]).logits[0, :-1].float(), doc[1:], reduction="sum")
    return total


def check_packed_equals_separate(folder, limit):
    model = LossModel(load_model(ModelRequest(folder, dtype=torch.float32)))
    plain = load_model(ModelRequest(folder, dtype=torch.float32, attention="sdpa"))
    docs = documents(plain.config.vocab_size)
    ours, _ = model(**packed(docs))
    ours.backward()
    want = separate_loss(plain, docs)
    want.backward()
    assert abs(float(ours) / float(want) - 1) < limit, (float(ours), float(want))
    for (name, mine), theirs in zip(model.lm.named_parameters(), plain.parameters(), strict=True):
        error = float((mine.grad - theirs.grad).norm() / theirs.grad.norm())
        assert error < 10 * limit, f"{name}: gradient is off by {error}"


def test_packed_equals_separate(tiny_model):
    check_packed_equals_separate(tiny_model, 1e-6)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_packed_equals_separate_on_the_real_135m_model(demo_model):
    check_packed_equals_separate(demo_model, 1e-5)


def test_padded_rows_equal_separate(tiny_model):
    model = LossModel(load_model(ModelRequest(tiny_model, dtype=torch.float32)))
    docs = documents(model.lm.config.vocab_size)
    ids = torch.nn.utils.rnn.pad_sequence(docs, batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence(
        [torch.cat([doc[1:], torch.tensor([-100])]) for doc in docs], batch_first=True, padding_value=-100
    )
    places = torch.arange(ids.shape[1]).expand_as(ids)
    ours, _ = model(input_ids=ids, labels=labels, position_ids=places)
    want = separate_loss(load_model(ModelRequest(tiny_model, dtype=torch.float32, attention="sdpa")), docs)
    assert abs(float(ours) / float(want) - 1) < 1e-6


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 3.0, 0.0])])
@pytest.mark.parametrize("at_once", [2**24, 200])  # 200: two or three queries
def test_windows_softcap_and_sinks_equal_a_dense_mask(window, softcap, sinks, at_once, monkeypatch):
    monkeypatch.setattr("duoka.model.one_document.SCORES_AT_ONCE", at_once)
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 20, 8), torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8)
    learned = [one.requires_grad_() for one in (query, key, value)]
    learned += [] if sinks is None else [sinks.requires_grad_()]
    edges = torch.tensor([0, 7, 20], dtype=torch.int32)
    ours, _ = attend(
        torch.nn.Module(), query, key, value, None,
        cu_seq_lens_q=edges, sliding_window=window, softcap=softcap, s_aux=sinks,
    )  # fmt: skip
    document = torch.tensor([0] * 7 + [1] * 13)
    place = torch.arange(20)
    seen = (document[:, None] == document[None, :]) & (place[:, None] >= place[None, :])
    if window:
        seen &= place[:, None] - place[None, :] < window
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) / 8**0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    above = scores.masked_fill(~seen, float("-inf")).exp()
    below = above.sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp()[:, None, None])
    want = above / below @ value.repeat_interleave(2, 1)
    assert torch.allclose(ours.transpose(1, 2), want, atol=1e-6)
    direction = torch.randn_like(want)
    for one, other in zip(
        torch.autograd.grad((ours.transpose(1, 2) * direction).sum(), learned),
        torch.autograd.grad((want * direction).sum(), learned),
        strict=True,
    ):
        assert torch.allclose(one, other, atol=1e-5)


def test_scores_that_are_written_out_are_not_kept():
    """As torch's kernels keep none: a layer would hold some 20 bytes for each pair of tokens and head."""
    query, key, value = (torch.randn(1, 4, 256, 16, requires_grad=True) for _ in range(3))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        attend(torch.nn.Module(), query, key, value, None, softcap=2.0, sliding_window=None)
    assert sum({one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in kept}.values()) < 4 * 256 * 256


@pytest.mark.parametrize("layer", [0, 1])
def test_a_window_that_only_the_config_tells_of(layer):
    module = type("Layer", (torch.nn.Module,), {"__module__": modeling_qwen2_moe.__name__})()  # which masks by windows
    module.config = SimpleNamespace(sliding_window=4, layer_types=["sliding_attention", "full_attention"])
    module.layer_idx = layer
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 12, 8) for _ in range(3))
    ours, _ = attend(module, query, key, value, None)
    said, _ = attend(module, query, key, value, None, sliding_window=(4, None)[layer])
    assert torch.equal(ours, said)
    everything, _ = attend(module, query, key, value, None, sliding_window=None)
    assert torch.equal(ours, everything) == (layer == 1)
    unread = type("Layer", (torch.nn.Module,), {"__module__": modeling_llama.__name__})()  # which knows no windows
    unread.config, unread.layer_idx = module.config, layer
    assert torch.equal(attend(unread, query, key, value, None)[0], everything)


@pytest.mark.parametrize("window", [None, 4, 40])
def test_one_launch_for_all_documents_is_asked_for_the_same(monkeypatch, window):
    """The GPU's kernel is stood in for by a dense mask: what is checked is how it is called."""
    import duoka.model.attention as room

    def kernel(query, key, value, from_, to, longest, longest_too, *, scale, window_size, enable_gqa):
        assert enable_gqa and longest == longest_too == 13 and torch.equal(from_, to)
        place = torch.arange(20)
        document = torch.bucketize(place, from_.long(), right=True)
        behind, ahead = window_size
        distance = place[:, None] - place[None, :]
        seen = (document[:, None] == document[None, :]) & (distance >= -ahead)
        if behind >= 0:
            seen &= distance <= behind
        heads = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]
        return F.scaled_dot_product_attention(*heads, attn_mask=seen, scale=scale, enable_gqa=True)[0].transpose(0, 1)

    torch.manual_seed(0)
    inputs = (torch.randn(1, 4, 20, 8), torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8))
    edges = torch.tensor([0, 7, 20], dtype=torch.int32)
    options = {"cu_seq_lens_q": edges, "sliding_window": window, "scaling": 0.3}
    want, _ = attend(torch.nn.Module(), *inputs, None, **options)
    monkeypatch.setattr(room, "find_varlen", lambda: kernel)
    monkeypatch.setattr(room, "has_kernel_for", lambda *_: True)
    ours, _ = attend(torch.nn.Module(), *inputs, None, **options)
    assert ours.shape == want.shape
    assert torch.allclose(ours, want, atol=1e-6)


def test_documents_are_measured_once_per_micro_batch(tiny_model, monkeypatch):
    """Not in every layer, where a GPU would be asked and waited for."""
    import duoka.model.attention as room
    from duoka.data.feed.loader import Batch
    from duoka.parallel.inputs import model_inputs

    given = []

    def kernel(query, key, value, documents, *how):
        given.append(documents)
        return torch.zeros_like(query).transpose(1, 2)

    monkeypatch.setattr(room, "has_kernel_for", lambda *_: True)
    monkeypatch.setattr(room, "attend_all_documents", kernel)
    model, docs = LossModel(load_model(ModelRequest(tiny_model, dtype=torch.float32))), documents(256)
    batch = packed(docs)
    micro = Batch(**batch, attention_mask=None, num_targets=1, num_tokens=1, num_samples=1)
    inputs = model_inputs(micro, torch.device("cpu"))
    model(**inputs)
    assert len(given) == model.lm.config.num_hidden_layers > 1
    assert all(one is inputs["boundaries"] for one in given)
    assert (tuple(given[0].lengths.tolist()), given[0].longest) == (LENGTHS, 96)
    assert torch.equal(given[0].edges, batch["boundaries"])


def test_no_forward_pass_asks_a_tensor_for_a_number(tiny_model):
    """A GPU's host would wait there. Of fake tensors transformers asks nothing: so on real ones."""
    from duoka.model.chunks import Places
    from duoka.model.documents import Documents
    from duoka.torch_private import TorchDispatchMode

    asked = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func._schema.name
            if name in ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal"):
                asked.append(name)
            return func(*args, **(kwargs or {}))

    model = LossModel(load_model(ModelRequest(tiny_model, dtype=torch.float32))).train()
    batch = packed(documents(model.lm.config.vocab_size))
    batch["boundaries"] = Documents.of(batch["boundaries"], torch.device("cpu"))
    batch["places"] = Places.of(batch["labels"])
    model(**batch)
    with Watch():
        model(**batch)
        model(**{**batch, "boundaries": None})
    assert not asked, asked


def test_a_compiled_layer_is_one_graph_where_the_kernel_takes_all_documents(tiny_model, monkeypatch):
    import duoka.model.attention as room

    monkeypatch.setattr(room, "find_varlen", lambda: lambda query, *rest, **how: query * 1.0)
    monkeypatch.setattr(room, "has_kernel_for", lambda *_: True)
    model = LossModel(load_model(ModelRequest(tiny_model, dtype=torch.float32))).train()
    for layer in model.lm.model.layers:
        layer.compile(dynamic=True, backend="eager", fullgraph=True)
    batch = packed(documents(model.lm.config.vocab_size))
    model(**batch)[0].backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_whose_values_are_smaller_than_keys_keep_no_scores(dtype):
    """DeepSeek's: torch's kernels know heads of one size, and would leave them to its definition of attention."""
    torch.manual_seed(0)
    sizes, tokens = {"query": (4, 48), "key": (4, 48), "value": (4, 32)}, 512
    inputs = {name: torch.randn(1, heads, tokens, dim) for name, (heads, dim) in sizes.items()}
    wanted, found = (
        {name: one.to(kind).requires_grad_() for name, one in inputs.items()} for kind in (torch.float64, dtype)
    )
    scores = wanted["query"] @ wanted["key"].transpose(2, 3) * 48**-0.5
    unseen = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    (scores.masked_fill(unseen, float("-inf")).softmax(-1) @ wanted["value"]).square().sum().backward()
    with LiveBytes(found.values()) as live:
        out, _ = attend(torch.nn.Module(), **found, attention_mask=None)
        held = live.now
    assert held < tokens * 4 * 48 * 4 * 6 < 4 * tokens**2 * 4, "less than the scores of four heads"
    assert out.shape == (1, tokens, 4, 32)
    out.square().sum().backward()
    limit = 1e-5 if dtype is torch.float32 else 2e-2
    for name, one in wanted.items():
        error = float((found[name].grad - one.grad).norm() / one.grad.norm())
        assert error < limit, f"{name}: {error}"


def test_a_kernel_that_does_not_ask_about_shared_keys_is_used_too(monkeypatch):
    """torch 2.11's; its own shares them, which the trial sees."""
    import torch.nn.attention.varlen as theirs

    import duoka.model.attention as room

    asked = []

    def varlen_attn(query, key, value, *edges, scale=None, window_size=(-1, -1)):
        asked.append((scale, window_size))
        return query

    monkeypatch.setattr(theirs, "varlen_attn", varlen_attn)
    monkeypatch.setattr(room, "VARLEN", {})
    heads = torch.randn(3, 2, 4)
    assert room.find_varlen()(heads, heads, heads, scale=0.5, window_size=(-1, 0), enable_gqa=True) is heads
    assert asked == [(0.5, (-1, 0))]
    monkeypatch.setattr(theirs, "varlen_attn", lambda query, key, value: query)
    monkeypatch.setattr(room, "VARLEN", {})
    assert room.find_varlen() is None, "older ones know no scale"
