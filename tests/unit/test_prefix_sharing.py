"""What documents begin with alike is computed once, and nothing changes: held against each document alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from duoka.config.schema import RunConfig
from duoka.data.feed.prefixes import find_repeats
from duoka.model import attention, compiled_attention, native
from duoka.model.attention import register_attention
from duoka.model.build import LossModel
from duoka.model.documents import Documents
from duoka.model.kernels import settle_sharing
from duoka.model.prefixes import shorten
from duoka.model.value_head import ValueModel
from duoka.plan.hardware import Machine
from duoka.plan.layout import Layout
from duoka.plan.lengths import Lengths
from duoka.plan.report import make_plan
from duoka.plan.shape import demo_shape

VOCABULARY, COMPUTED = 64, 53


def draw(*lengths: int) -> list[list[int]]:
    numbers = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCABULARY, (length,), generator=numbers).tolist() for length in lengths]


def documents() -> list[list[int]]:
    """Two questions under one system prompt with two answers each, one answer twice, and a text of its own."""
    system, one, two, *rest = draw(9, 5, 7, 6, 4, 8, 3, 11)
    first, second = system + one, system + two
    return [first + rest[0], second + rest[1], rest[4], first + rest[2], first + rest[0], second + rest[3], second]


def pack(docs: list[list[int]]) -> dict[str, torch.Tensor]:
    def row(parts: list[list[int]]) -> torch.Tensor:
        return torch.tensor([number for part in parts for number in part])[None]

    return {
        "input_ids": row(docs),
        "labels": row([[*doc[1:], -100] for doc in docs]),
        "position_ids": row([list(range(len(doc))) for doc in docs]),
        "boundaries": torch.tensor([0, *torch.tensor([len(doc) for doc in docs]).cumsum(0)], dtype=torch.int32),
    }


def known(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As model_inputs hands it on."""
    ids = batch["input_ids"]
    return {**batch, "boundaries": Documents.of(batch["boundaries"], ids.device, ids)}  # type: ignore[dict-item]


def llama(attention: str = "duoka", **more: object) -> LlamaForCausalLM:
    register_attention()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=VOCABULARY, attn_implementation=attention, **more)
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # so that attention is far from even
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter.mul_(6)
    return model


def sharing(lm: torch.nn.Module, kind: type[LossModel] = LossModel) -> LossModel:
    model = kind(lm)
    model.no_sharing = ""
    return model


def alone(model: torch.nn.Module, docs: list[list[int]]) -> torch.Tensor:
    """log p of each next token, by transformers: one document at a time."""
    found = []
    for doc in docs:
        ids = torch.tensor(doc)
        logps = model(ids[None], use_cache=False).logits[0].log_softmax(dim=-1)
        found.append(F.pad(logps[:-1].gather(1, ids[1:, None]).squeeze(1), (0, 1)))
    return torch.cat(found)


def compare(ours: torch.nn.Module, theirs: torch.nn.Module, limit: float = 2e-6) -> None:
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None
        assert float((mine.grad - other.grad).norm() / other.grad.norm()) < limit, name


def test_a_row_keeps_one_copy_of_each_beginning() -> None:
    docs = documents()
    ids = torch.tensor([number for doc in docs for number in doc])[None]
    short = shorten(ids, torch.tensor([len(doc) for doc in docs]), ids.device)
    assert short is not None
    assert len(short.kept) == len({tuple(doc[: end + 1]) for doc in docs for end in range(len(doc))})
    assert torch.equal(ids[0, short.kept][short.keys.places], ids[0])
    assert sorted(short.keys.lengths.tolist()) == sorted(len(doc) for doc in {tuple(doc): doc for doc in docs})
    assert short.own.sum() == len(short.kept) and len(short.own) == len(short.keys.lengths)
    assert shorten(torch.arange(40)[None], torch.tensor([20, 20]), ids.device) is None


@pytest.fixture(params=("own kernel", "torch"))
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(native, "serves", lambda *_: False)


@pytest.mark.parametrize("window", (None, 6))
def test_losses_and_gradients_are_each_documents_own(kernel: None, window: int | None) -> None:
    docs = documents()
    lm = llama()
    seen: list[int] = []
    lm.model.embed_tokens.register_forward_hook(lambda _, given, __: seen.append(given[0].shape[1]))
    for layer in lm.model.layers:
        setattr(layer.self_attn, compiled_attention.ALLOWED, True)
        layer.self_attn.sliding_window = window
    if window:
        lm.config.sliding_window = window
    plain = llama("sdpa")
    batch = known(pack(docs))
    whole = LossModel(lm)(**batch)[0]
    loss = sharing(lm)(**batch)[0]
    assert seen[1] == COMPUTED < seen[0] == batch["input_ids"].shape[1]
    if window:
        want = torch.autograd.grad(whole, list(lm.parameters()))
        ours = torch.autograd.grad(loss, list(lm.parameters()))
        assert float(loss.detach()) == pytest.approx(float(whole.detach()), rel=1e-6)
        assert all(float((one - two).norm() / two.norm()) < 2e-6 for one, two in zip(ours, want, strict=True))
        return
    loss.backward()
    expected = -alone(plain, docs).sum()
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    compare(lm, plain)


def test_log_probabilities_and_values_stand_where_they_stood() -> None:
    docs = documents()
    lm, plain = llama(), llama("sdpa")
    model = sharing(lm, ValueModel)
    batch = known(pack(docs))
    logps, more = model(**batch, answer="values")
    want = alone(plain, docs)
    assert more is not None and torch.allclose(logps[0], want, atol=2e-6)
    assert more.shape == (2, 1, len(want))
    weights = torch.rand(len(want), generator=torch.Generator().manual_seed(5))
    (logps[0] * weights).sum().backward()
    (want * weights).sum().backward()
    compare(lm, plain)


def test_bf16_is_as_exact_as_whole_rows() -> None:
    docs, losses = documents(), []
    for kind in (LossModel, sharing):
        lm = llama()
        for layer in lm.model.layers:
            setattr(layer.self_attn, compiled_attention.ALLOWED, True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = kind(lm)(**known(pack(docs)))[0]
        loss.backward()
        losses.append((float(loss.detach()), lm.model.layers[0].self_attn.k_proj.weight.grad))
    (whole, want), (short, ours) = losses
    assert short == pytest.approx(whole, rel=2e-3)
    assert float((ours - want).norm() / want.norm()) < 0.03


def launch(query, key, value, asking, held, most_queries, most_keys, *, scale, window_size, enable_gqa):  # type: ignore[no-untyped-def]
    """What torch's kernel gives for documents whose last tokens ask, by a mask of the whole row."""
    assert window_size == (-1, 0) and (most_queries, most_keys) == (int(asking.diff().max()), int(held.diff().max()))
    places = [torch.arange(len(one)) for one in (query, key)]
    own = [
        torch.bucketize(place, edges.long(), right=True) for place, edges in zip(places, (asking, held), strict=True)
    ]
    from_end = [edges.long()[one] - place for place, one, edges in zip(places, own, (asking, held), strict=True)]
    seen = (own[0][:, None] == own[1][None]) & (from_end[0][:, None] <= from_end[1][None])
    heads = [one.transpose(0, 1)[None] for one in (query, key, value)]
    return F.scaled_dot_product_attention(*heads, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)[0].transpose(0, 1)


def test_one_launch_takes_documents_that_see_more_keys_than_they_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "find_varlen", lambda: launch)
    monkeypatch.setattr(attention, "has_kernel_for", lambda *_: True)
    lm, plain = llama(), llama("sdpa")
    loss, expected = sharing(lm)(**known(pack(documents())))[0], -alone(plain, documents()).sum()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    loss.backward()
    expected.backward()
    compare(lm, plain)


def test_a_gpu_whose_kernel_does_not_know_them_computes_each_sample_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_the_left(query, key, value, asking, held, *rest, **how):  # type: ignore[no-untyped-def]
        """As a kernel that is causal from the first token on: right where documents ask for all they see."""
        return launch(query, key[: len(query)], value[: len(query)], asking, asking, rest[0], rest[0], **how)

    how = torch.device("cpu"), torch.bfloat16, 16
    for kernel, works in ((launch, True), (from_the_left, False)):
        monkeypatch.setattr(attention, "WORKS", {})
        monkeypatch.setattr(attention, "find_varlen", lambda kernel=kernel: kernel)
        assert attention.why_no_kernel(*how) == ""
        assert (attention.why_no_kernel(*how, "prefixes") == "") == works
        monkeypatch.setattr(
            "duoka.model.kernels.why_no_kernel", lambda _, *rest: attention.why_no_kernel(how[0], *rest)
        )
        model = sharing(llama(head_dim=16))
        settle_sharing(model, Layout(precision="bf16"), torch.device("cuda", 0))
        assert (model.no_sharing == "") == works


def test_what_is_dropped_at_random_is_drawn_for_each_document() -> None:
    lm = llama(attention_dropout=0.1)
    model = sharing(lm)
    seen: list[int] = []
    lm.model.embed_tokens.register_forward_hook(lambda _, given, __: seen.append(given[0].shape[1]))
    batch = known(pack(documents()))
    model.train()(**batch)
    with torch.no_grad():
        model.eval()(**batch)
    assert seen == [batch["input_ids"].shape[1], COMPUTED]


def test_plans_count_what_is_computed_once() -> None:
    pairs = Lengths("tokenized", 99, 400.0, 500, (400,) * 16, shared=0.4, least_shared=0.3)
    machine = Machine(2, 64 * 2**30, 60 * 2**30)

    def plan(**settings: object) -> tuple[float, float]:
        raw = {"model": "demo", "stage": "dpo", "data": {"train": ["x"]}, "output": "out", "lora": {"rank": 8}}
        raw["train"] = {"micro_batch": "2048 tokens", "global_batch": 16}
        raw |= {name: {**raw[name], **some} for name, some in settings.items()}  # type: ignore[dict-item]
        found = make_plan(RunConfig.model_validate(raw), demo_shape(), machine, 1, lengths=pairs)
        return found.speed.parts["matrix products"], found.memory.peak_bytes

    shared = plan()
    for other in ({"data": {"prefix_sharing": False}}, {"lora": {"dropout": 0.1}}):
        whole = plan(**other)
        assert shared[0] < 0.7 * whole[0] and shared[1] < 0.9 * whole[1]
    assert Lengths.from_json(pairs.to_json()) == pairs


def test_what_pairs_share_is_counted_from_their_tokens() -> None:
    docs = [
        part
        for pair in zip(draw(30, 30), draw(9, 8), draw(7, 6), strict=True)
        for part in ([*pair[0], 1, *pair[1]], [*pair[0], 2, *pair[2]])
    ]
    row, lengths = np.array([number for doc in docs for number in doc]), np.array([len(doc) for doc in docs])
    found = find_repeats(row, lengths)
    assert found is not None and (~found[0]).sum() == 60
