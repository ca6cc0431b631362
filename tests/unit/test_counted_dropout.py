"""Masks counted from token keys: their values, their statistics, and every kind of dropout that a model may have."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from counted_masks import is_dropped, keys_of
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    XGLMConfig,
    XGLMForCausalLM,
)

from duoka.config.schema import LoraConfig
from duoka.data.feed.epoch_plan import EpochPlan, MicroPlan
from duoka.data.feed.loader import Loader, build_batch, build_rows
from duoka.data.feed.token_keys import sample_keys, step_key
from duoka.data.tokens.template import Sample
from duoka.errors import ConfigError
from duoka.model.attention import register_attention
from duoka.model.build import LossModel, load_model
from duoka.model.dropout import drop, dropped, place_key
from duoka.model.fused import apply_fused
from duoka.model.request import ModelRequest
from duoka.parallel.inputs import model_inputs
from duoka.parallel.out_of_memory import smallest_batch
from duoka.parallel.recompute import apply_recompute
from duoka.units import Amount

CPU = torch.device("cpu")
LENGTHS = (11, 5, 8, 3)


class Store:
    """Four samples; the third is of two documents where `cut`."""

    def __init__(self, cut=False):
        dice = np.random.default_rng(0)
        self.ids = [dice.integers(3, 30, length).astype(np.int32) for length in LENGTHS]
        self.lengths = np.array(LENGTHS, np.int32)
        self.num_targets = self.lengths - 1
        self.cut = cut

    def __len__(self):
        return len(LENGTHS)

    def segments(self, index):
        ids = self.ids[index]
        parts = [ids[:3], ids[3:]] if self.cut and index == 2 else [ids]
        return [Sample(part, np.ones(len(part), bool)) for part in parts]


def layouts(store):
    """The same four samples, as micro-batches of four kinds."""
    key = step_key(7, 5)
    padded = [] if store.cut else [build_batch(store, MicroPlan(((1,), (3,), (0,), (2,))), False, 0, key)]
    one = [build_batch(store, MicroPlan(((index,),)), True, 0, key) for index in range(4)]
    two = [
        build_batch(store, MicroPlan(((2, 0),)), True, 0, key),
        build_batch(store, MicroPlan(((1, 3),)), True, 0, key),
    ]
    rows = [build_rows(store, MicroPlan(((0, 3), (2,), (1,))), (4, 16), 0, key)]
    return [micros for micros in (one, two, rows, padded) if micros]


# --- keys ---


@pytest.mark.parametrize("cut", [False, True])
def test_a_token_keeps_its_key_in_every_layout(cut):
    store = Store(cut)
    want = {}
    for sample, ids in enumerate(store.ids):
        for key, token in zip(keys_of(7, 5, sample, len(ids)), ids.tolist(), strict=True):
            want[key - 2**64 if key >= 2**63 else key] = token
    for micros in layouts(store):
        seen = {}
        for micro in micros:
            pairs = zip(micro.token_keys.view(-1).tolist(), micro.input_ids.view(-1).tolist(), strict=True)
            seen.update({key: token for key, token in pairs if key})
            assert micro.token_keys.shape == micro.input_ids.shape
        assert seen == want
    assert smallest_batch(layouts(store)[0][0]).token_keys.shape == (1, 1)


def test_steps_and_epochs_have_other_keys_and_evaluations_none():
    store = Store()
    plan = EpochPlan(store.lengths, store.num_targets, fingerprint="x", seed=7, global_batch=Amount(2, "samples"))
    loader = Loader(
        store, plan, rank=0, num_ranks=1, micro=Amount(64, "tokens"), packing=True, max_length=64, pad_id=0
    )  # fmt: skip
    batches = [loader.global_batch(epoch, index) for epoch in (0, 1) for index in (0, 1)]
    keys = {key for batch in batches for micro in batch.micro_batches for key in micro.token_keys.view(-1).tolist()}
    assert len(keys) == 2 * sum(LENGTHS)
    assert build_batch(store, MicroPlan(((0,),)), True, 0).token_keys is None


# --- masks ---


@pytest.mark.parametrize(("width", "p"), [(64, 0.05), (161, 0.5), (3, 0.2), (1, 0.999)])
def test_masks_are_those_of_the_oracle(width, p):
    keys = torch.from_numpy(sample_keys(step_key(3, 4), 9, 50))
    x = torch.ones(1, 50, width, requires_grad=True)
    got = drop(x, keys[None], place_key("there"), p, "there")
    want = is_dropped(keys_of(3, 4, 9, 50), "there", width, p)
    assert np.array_equal(got.detach()[0].numpy() == 0, want)
    (grad,) = torch.autograd.grad(got.sum(), x)
    assert torch.equal(grad, got), "what is dropped gets no gradient"
    kept = got.detach()[got.detach() > 0]
    assert torch.allclose(kept * (1 - round(p * 65536) / 65536), torch.ones(()))


def test_masks_look_like_draws():
    """Shares, and how dropped units of neighbors, tokens, places and steps go together: within chance."""
    tokens, width = 4096, 512
    for p in (0.05, 0.5):
        level = round(p * 65536)
        masks = {
            (step, place): dropped(
                torch.from_numpy(sample_keys(step_key(1, step), 3, tokens)), place_key(place), width, level
            ).double()
            for step in (0, 1)
            for place in ("one", "two")
        }
        base = masks[0, "one"]

        def deviations(a, b, p=p):
            """How many standard deviations a sum of products lies from what independent units give."""
            return abs(float(((a - p) * (b - p)).sum()) / (p * (1 - p) * a.numel() ** 0.5))

        assert abs(float(base.mean()) - p) < 5 * (p * (1 - p) / base.numel()) ** 0.5
        for lane in range(4):
            part = base[:, lane::4]
            assert abs(float(part.mean()) - p) < 5 * (p * (1 - p) / part.numel()) ** 0.5, lane
        for other in (masks[0, "two"], masks[1, "one"]):
            assert deviations(base, other) < 5
        for shift in (1, 2, 3, 4, 8):
            assert deviations(base[:, shift:], base[:, :-shift]) < 5, f"units {shift} apart"
            assert deviations(base[shift:], base[:-shift]) < 5, f"tokens {shift} apart"
        for dim, others in ((0, tokens), (1, width)):  # counts per unit and per token scatter as they should
            counts = base.sum(dim)
            assert abs(float(counts.var()) / (others * p * (1 - p)) - 1) < 6 * (2 / len(counts)) ** 0.5


# --- models ---

TINY = {"vocab_size": 32, "tie_word_embeddings": False}


def gpt2():
    return GPT2LMHeadModel(GPT2Config(
        **TINY, n_embd=16, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3,
        attn_implementation=register_attention(),
    ))  # fmt: skip


def opt():
    return OPTForCausalLM(OPTConfig(
        **TINY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=24, word_embed_proj_dim=16,
        max_position_embeddings=64, dropout=0.3, attention_dropout=0.3, attn_implementation=register_attention(),
    ))  # fmt: skip


def llama(**options):
    return LlamaForCausalLM(LlamaConfig(
        **TINY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, attn_implementation=register_attention(), **options,
    ))  # fmt: skip


def build(kind, recompute=""):
    torch.manual_seed(0)
    model = LossModel(kind()).train()
    if recompute:
        apply_recompute(model.lm, recompute, model.drops)
    return model


def learn(model, micros):
    loss = sum(model(**model_inputs(micro, CPU))[0] for micro in micros)  # all forward passes, then the backward
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), grads


@pytest.mark.parametrize("kind", [gpt2, opt, lambda: llama(attention_dropout=0.4)], ids=["gpt2", "opt", "llama"])
def test_a_models_own_dropout_and_its_attentions_are_counted(kind):
    model = build(kind)
    want, grads = learn(model, layouts(Store())[0])
    for recompute in ("", "full", "selective", "1/2"):
        again = build(kind, recompute)
        for micros in layouts(Store()):
            torch.manual_seed(5)  # and nothing depends on it
            loss, got = learn(again, micros)
            assert abs(float(loss / want) - 1) < 1e-5
            for name, grad in grads.items():
                error = float((got[name] - grad).norm() / grad.norm())
                assert error < 1e-4 or grad.norm() < 1e-4, f"{name} is off by {error}, recompute {recompute!r}"
    plain = float(learn(model.eval(), layouts(Store())[0])[0])
    assert abs(plain / float(want) - 1) > 5e-5, "dropout was on"
    assert plain == float(learn(model, layouts(Store())[0])[0])


def xglm():
    """Its attention is its own: its weights come as (rows, heads, ...) in one dim."""
    return XGLMForCausalLM(XGLMConfig(
        vocab_size=32, d_model=16, ffn_dim=24, num_layers=2, attention_heads=2, max_position_embeddings=64,
        dropout=0.3, attention_dropout=0.3, attn_implementation="eager",
    ))  # fmt: skip


def test_weights_of_a_written_out_attention_are_dropped_by_both_tokens_keys():
    splits = [(((1,), (3,), (0,), (2,)),), (((2,), (1,)), ((0,), (3,))), (((0,),), ((1,),), ((2,),), ((3,),))]
    micros = [[build_batch(Store(), MicroPlan(rows), False, 0, step_key(7, 5)) for rows in one] for one in splits]
    want, grads = learn(build(xglm), micros[0])
    for recompute in ("", "full"):
        for split in micros:
            loss, got = learn(build(xglm, recompute), split)
            assert abs(float(loss / want) - 1) < 1e-5
            for name, grad in grads.items():
                assert float((got[name] - grad).norm()) < 1e-4 * max(float(grad.norm()), 1), name


def test_states_as_wide_as_there_are_tokens_are_no_weights():
    keys = torch.tensor([keys_of(7, 5, row, 16) for row in range(2)], dtype=torch.uint64).view(torch.int64)
    kept = drop(torch.ones(2, 16, 16), keys, place_key("here"), 0.3, "here") != 0
    for row in range(2):
        assert (~kept[row].numpy() == is_dropped(keys_of(7, 5, row, 16), "here", 16, 0.3)).all()


@pytest.mark.parametrize("targets", ["all", ["lm_head", "q_proj"]])
def test_fused_adapters_drop_what_plain_ones_drop(tiny_model, targets):
    lm = load_model(
        ModelRequest(tiny_model, dtype=torch.float32, lora=LoraConfig(rank=4, dropout=0.3, targets=targets))
    )
    torch.manual_seed(2)
    for name, parameter in lm.named_parameters():
        if "lora_B" in name:  # zero at first, which would hide A's gradient
            parameter.data.normal_(0, 0.1)
    answers = {}
    for how in ("plain", "fused", "full", "selective"):
        model = LossModel(copy.deepcopy(lm)).train()
        assert apply_fused(model.lm, keeps_products=how not in ("fused", "full")) >= 13 if how != "plain" else True
        if how in ("full", "selective"):
            apply_recompute(model.lm, how, model.drops)
        answers[how] = [learn(model, micros) for micros in layouts(Store())]
    want, grads = answers["plain"][0]
    for loss, got in (one for found in answers.values() for one in found):
        assert abs(float(loss / want) - 1) < 1e-5
        for name, grad in grads.items():
            assert float((got[name] - grad).norm() / grad.norm()) < 1e-4, name


def test_passes_without_keys_draw_as_torch_does(tiny_model):
    lm = load_model(ModelRequest(tiny_model, dtype=torch.float32, lora=LoraConfig(rank=4, dropout=0.5)))
    for name, parameter in lm.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1)
    model = LossModel(lm).train()
    apply_fused(model.lm)
    ids = torch.randint(3, 30, (1, 20))
    losses = [float(model(ids, ids, torch.arange(20)[None])[0].detach()) for _ in range(2)]
    assert losses[0] != losses[1]


class Noisy(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) + 0.1 * torch.rand_like(x)


def test_what_draws_by_itself_is_refused_and_named():
    model = build(llama)
    model.lm.model.layers[1].mlp = Noisy(model.lm.model.layers[1].mlp)
    with pytest.raises(ConfigError, match=r"draws random numbers in training: rand_like in forward \(test_counted"):
        learn(model, layouts(Store())[0])
    learn(model.eval(), layouts(Store())[0])


def test_a_tensor_whose_tokens_are_unknown_is_refused():
    with pytest.raises(ConfigError, match=r"experts\.3 drops units of a tensor of"):
        drop(torch.ones(5, 4), torch.zeros((1, 9), dtype=torch.long), 1, 0.1, "experts.3")


def test_torch_is_what_it_was_after_a_pass():
    before = F.dropout
    learn(build(gpt2), layouts(Store())[0])
    assert F.dropout is before and (F.dropout(torch.ones(999), 0.5) == 0).any()
