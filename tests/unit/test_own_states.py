"""Layers with a state, and layers that hand no borders on: in a packed row each document is computed as alone."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from families import family_config, packed, padded, without_dropout
from needs import since

from duoka.config.schema import LoraConfig
from duoka.errors import ConfigError
from duoka.model.attention import register_attention
from duoka.model.build import LossModel
from duoka.model.documents import Documents, group_by_length
from duoka.model.lora import apply_lora, is_adapter
from duoka.model.own_states import asks_what_is_read, with_own_scan
from duoka.model.tiny_copy import build_tiny, tiny_config
from duoka.parallel.recompute import apply_recompute

# On both sides of a chunk of 64 tokens, shorter than a convolution, and some about as long as others.
LENGTHS = (130, 3, 70, 64, 65, 2, 128)
# Linear attention, a state space, a convolution alone, a gated recurrence; attention that is told by nobody.
KINDS = ("qwen3_5_text", "mamba2", "lfm2", "recurrent_gemma", "nemotron", "stablelm")


def build_plain(kind: str, attention: str) -> torch.nn.Module:
    register_attention()
    config = tiny_config(family_config(kind))
    without_dropout(config)
    return build_tiny(config, attention, own_experts=False)


def build(kind: str) -> tuple[torch.nn.Module, LossModel]:
    """By transformers alone, and as duoka trains it."""
    return build_plain(kind, "eager"), LossModel(build_plain(kind, "duoka"))


def draw(lengths: tuple[int, ...], seed: int = 1) -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    return [torch.randint(8, 64, (length,), generator=numbers) for length in lengths]


def learn_alone(plain: torch.nn.Module, documents: list[torch.Tensor]) -> float:
    plain.zero_grad()
    total = torch.zeros(())
    for one in documents:
        logits = plain(one[None], use_cache=False).logits[0, :-1].float()
        total = total + F.cross_entropy(logits, one[1:], reduction="sum")
    total.backward()
    return float(total.detach())


# transformers' delta rule is off by 4e-4 from what fp64 gives here, ours by 8e-5.
OFF = {"qwen3_5_text": 1e-3}


def compare_gradients(model: LossModel, plain: torch.nn.Module) -> None:
    off = OFF.get(plain.config.model_type, 1e-4)
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    scale = max(float(gradient.norm()) for gradient in wanted.values())
    for name, parameter in model.lm.named_parameters():
        own = torch.zeros(()) if parameter.grad is None else parameter.grad
        assert float((own - wanted.get(name, torch.zeros(()))).norm()) < off * scale, name


@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_any_length_are_computed_as_alone(kind):
    plain, model = build(kind)
    documents = draw(LENGTHS)
    wanted = learn_alone(plain, documents)
    loss, _ = model(**packed(documents))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(wanted, rel=1e-5)
    compare_gradients(model, plain)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "stablelm"])
@pytest.mark.parametrize("how", ["full", "selective"])
def test_what_is_computed_again_reads_the_documents_of_its_own_pass(kind, how):
    """A pipeline begins other passes before the first one's backward."""
    plain, model = build(kind)
    model.train()
    assert asks_what_is_read(model.core)
    apply_recompute(model.lm, how)
    first, second = draw((70, 9, 33)), draw((5, 66, 41), seed=2)
    learn_alone(plain, [*first, *second])
    losses = [model(**packed(one))[0] for one in (first, second)]
    for loss in losses:
        loss.backward()
    compare_gradients(model, plain)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2"])
@pytest.mark.parametrize("how", ["none", "full"])
def test_adapters_drop_in_packed_rows_what_they_drop_in_padded_ones(kind, how):
    documents = draw((70, 9, 33))
    keys = [torch.arange(len(one)) + 1000 * place for place, one in enumerate(documents)]
    found = []
    for lay_out in (packed, padded):
        adapted = apply_lora(build_plain(kind, "duoka"), LoraConfig(rank=4, dropout=0.3))
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                parameter += 0.1 * ("lora_B" in name)
        model = LossModel(adapted).train()
        if how != "none":
            apply_recompute(model.lm, how, model.drops)
        token_keys = torch.cat(keys)[None] if lay_out is packed else torch.nn.utils.rnn.pad_sequence(keys, True)
        loss, _ = model(**lay_out(documents), token_keys=token_keys)
        loss.backward()
        gradients = [p.grad.flatten() for p in model.parameters() if p.requires_grad]
        found.append((loss.detach(), torch.cat(gradients)))
    torch.testing.assert_close(*(loss for loss, _ in found), rtol=1e-5, atol=0)
    one, other = (gradient for _, gradient in found)
    assert (one - other).norm() < 1e-4 * other.norm()


def drop_around(module, given, states):
    """As a model does that drops what each of its layers gives, and what that reads."""
    return F.dropout(states, 0.3, module.training)


def test_a_models_own_dropout_counts_the_same_calls(monkeypatch):
    """Whatever the number of groups that a layer is computed in."""
    documents = draw((70, 9, 33, 150))
    keys = [torch.arange(len(one)) + 1000 * place for place, one in enumerate(documents)]
    losses = []
    for lay_out in (packed, padded):
        plain = build_plain("lfm2", "duoka")
        for module in plain.modules():
            if type(module).__name__ == "Lfm2ShortConv":
                module.register_module("drop", torch.nn.Dropout(0.3))  # what says that this model drops by itself
                module.in_proj.register_forward_hook(drop_around)
            if type(module).__name__ == "Lfm2MLP":
                module.register_forward_hook(drop_around)
        model = LossModel(plain).train()
        token_keys = torch.cat(keys)[None] if lay_out is packed else torch.nn.utils.rnn.pad_sequence(keys, True)
        losses.append(model(**lay_out(documents), token_keys=token_keys)[0].detach())
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)


def test_layers_that_hand_everything_on_need_no_telling():
    assert not asks_what_is_read(build("llama")[1].core)


def test_a_layer_computed_again_by_itself_is_no_silent_mistake():
    """What reads a packed row as one document has other gradients, and nothing else would show it."""
    model = build("lfm2")[1]
    layer = next(module for module in model.modules() if hasattr(module, "forward_at_once"))
    hidden = torch.randn(1, 12, 64)
    with pytest.raises(LookupError):
        layer(hidden)
    with torch.no_grad():
        assert layer(hidden).shape == hidden.shape


@pytest.mark.parametrize("kind", ["qwen3_5_text", "stablelm"])
def test_a_row_of_one_document_is_continued(kind):
    plain, model = build(kind)
    row = draw((21,))[0][None]
    with torch.no_grad():
        assert model.next_token(row) == int(plain(row, use_cache=False).logits[0, -1].argmax())


@pytest.mark.parametrize(
    "lengths", [(5,), (4, 4, 4), (1, 1, 90), LENGTHS, (300, 200, 100, 50, 25, 12, 6, 3, 1), (7, 0, 3)]
)
def test_each_token_comes_back_to_its_place(lengths):
    edges = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    own = Documents.of(edges, torch.device("cpu")).own_rows
    row = torch.arange(int(edges[-1]))
    rows = [row[group.places].view(group.num_rows, group.longest) for group in own.groups]
    assert torch.equal(torch.cat([one.flatten() for one in rows])[own.back], row)
    starts = {int(start) for start, length in zip(edges, lengths, strict=False) if length}
    assert {int(begin) for one in rows for begin in one[:, 0]} == starts, "each begins a row"


def test_few_places_are_left_empty():
    numbers = torch.Generator().manual_seed(3)
    for _ in range(20):
        count = int(torch.randint(1, 40, (1,), generator=numbers))
        lengths = torch.randint(1, 2000, (count,), generator=numbers).tolist()
        groups = group_by_length(lengths)
        assert sorted(member for group in groups for member in group) == list(range(len(lengths)))
        filled = sum(len(group) * lengths[group[0]] for group in groups)
        assert filled <= 2 * sum(lengths) + 64 * len(lengths)


SCANS = {"mamba": {"dt_proj", "out_proj"}, "jamba": {"dt_proj"}, "nemotron_h": {"out_proj"}, "granitemoehybrid": set()}


@pytest.mark.parametrize("kind", SCANS)
def test_every_adapter_of_a_layer_that_scans_learns(kind):
    plain = build_plain(kind, "duoka")
    scanning = [name for name, module in plain.named_modules() if hasattr(module, "in_proj")]
    products = {
        n for name in scanning for n, m in plain.get_submodule(name).named_children() if type(m) is torch.nn.Linear
    }
    adapted = apply_lora(plain, LoraConfig(rank=4, dropout=0.0))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            parameter += 0.1 * ("lora_B" in name)
    loss, _ = LossModel(adapted).train()(**packed(draw((70, 9, 33))))
    loss.backward()
    adapters = {name: p for name, p in adapted.named_parameters() if is_adapter(name)}
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in adapters.values())
    names = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in adapters}
    assert products - names == SCANS[kind]
    if "dt_proj" in SCANS[kind]:
        with pytest.raises(ConfigError, match=r"dt_proj \(read by its weight\)"):
            apply_lora(build_plain(kind, "duoka"), LoraConfig(rank=4, targets=("dt_proj",)))


@since(transformers="5.24")
@pytest.mark.parametrize("kind", ["granitemoehybrid", "falcon_mamba"])
def test_kernels_of_a_whole_layer_are_left_where_it_has_adapters(monkeypatch, kind):
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    name = next(name for name in ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn") if hasattr(module, name))
    calls = []
    monkeypatch.setattr(module, name, lambda *args, **named: calls.append(name))  # it has no kernel: None
    monkeypatch.setattr("importlib.util.find_spec", lambda package: package == "mamba_ssm" or None)
    layer = next(one for one in build_plain(kind, "duoka").train().modules() if hasattr(one, "in_proj"))
    hidden = torch.randn(1, 9, layer.in_proj.in_features)
    answers = [with_own_scan(type(layer).forward, adapted)(layer, hidden) for adapted in (False, True)]
    assert calls == [name] and torch.equal(*answers)
