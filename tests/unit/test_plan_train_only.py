"""Plans of runs that train some layers only: what learns is counted, on each stage, and frozen layers keep less."""

import contextlib

import pytest
import torch
from families import family_config
from test_plan_shape import SMALL, build_on_meta

from duoka.config.schema import TrainOnlyConfig
from duoka.model import native
from duoka.model.attention import register_attention
from duoka.model.build import LossModel
from duoka.model.fp8 import apply_fp8
from duoka.model.freeze import apply_train_only
from duoka.model.fused import apply_fused
from duoka.plan.activations import activation_bytes_per_token
from duoka.plan.compiler import SWITCH, has_kernels
from duoka.plan.layout import Layout, parse_layout
from duoka.plan.memory import estimate_memory
from duoka.plan.recipe import Work, shares, static_memory
from duoka.plan.shape import shape_from_config
from duoka.plan.traffic import traffic
from duoka.plan.trained_weights import trained_parameters

TOKENS, DOCUMENT = 128, 32
MODEL = {
    "vocab_size": 331, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 2, "num_hidden_layers": 2,
    "num_key_value_heads": 1, "tie_word_embeddings": False, "head_dim": 32,
}  # fmt: skip
ALL = {"layers": 2, "extra": ["embed_tokens"]}


def unread_bytes(work, layout, number):
    """What a layer does not keep for want of what learns in it."""
    return activation_bytes_per_token(work, layout)[0] - activation_bytes_per_token(work, layout, 0, number)[0]


def kept_bytes(model_type, chosen, precision, changes):
    """What autograd keeps of one forward pass, weights apart."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[model_type](**MODEL | changes, pad_token_id=0)
    lm = AutoModelForCausalLM.from_config(config, attn_implementation=register_attention())
    apply_train_only(lm, TrainOnlyConfig(**chosen))
    model = LossModel(lm.train())
    if precision == "fp8":
        apply_fp8(lm, again=True)
    apply_fused(lm)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*lm.parameters(), *lm.buffers())}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    tokens = torch.randint(0, 300, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    edges = torch.arange(0, TOKENS + 1, DOCUMENT, dtype=torch.int32)
    half = contextlib.nullcontext() if precision == "fp32" else torch.autocast("cpu", torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), half:
        loss, _ = model(tokens, tokens, torch.arange(TOKENS)[None] % DOCUMENT, edges, torch.arange(TOKENS)[None])
    loss.backward()
    return sum(storage.nbytes() for storage in kept.values())


PARTS = (None, ["self_attn"], ["mlp"], ["q_proj", "down_proj"], ["self_attn.o_proj"], ["gate_proj", "up_proj"])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "plain bf16", "fp8"])
@pytest.mark.parametrize("modules", PARTS, ids=str)
def test_frozen_products_do_not_keep_what_they_read(modules, precision, monkeypatch, request):
    """Between a model that learns whole and one of which parts do, counted by autograd's own hooks."""
    if precision == "plain bf16":
        request.addfinalizer(native.forget)
        monkeypatch.setenv(SWITCH, "0")
        native.forget()
    precision = precision.removeprefix("plain ")
    some = {"layers": 0, "extra": ["embed_tokens"]} if modules is None else ALL | {"modules": modules}
    gone = kept_bytes("llama", ALL, precision, {}) - kept_bytes("llama", some, precision, {})
    work = Work(shape_of("llama"), None, has_kernels=has_kernels(), train_only=TrainOnlyConfig(**some))
    predicted = TOKENS * sum(unread_bytes(work, Layout(precision=precision), number) for number in range(2))
    assert 0 <= gone - predicted <= 64, "a few scales of 8-bit numbers"


def shape_of(model_type, **changes):
    return shape_from_config({"model_type": model_type, **MODEL, **changes})


def test_a_model_without_gates_keeps_one_tensor_of_the_feed_forward_width_where_frozen():
    plain = {"use_bias": False}
    some = {"layers": 0, "extra": ["embed_tokens"]}
    gone = kept_bytes("starcoder2", ALL, "fp32", plain) - kept_bytes("starcoder2", some, "fp32", plain)
    work = Work(shape_of("starcoder2", **plain), None, train_only=TrainOnlyConfig(**some))
    assert gone == TOKENS * sum(unread_bytes(work, parse_layout("single"), number) for number in range(2))


def test_no_layer_keeps_less_than_nothing_and_trained_ones_all():
    shape, layout = shape_of("llama"), parse_layout("single")
    work = Work(shape, None, train_only=TrainOnlyConfig(layers=1))
    assert unread_bytes(work, layout, 1) == 0
    assert 0 < unread_bytes(work, layout, 0) < activation_bytes_per_token(work, layout)[0]


LLAMA_LIKE = (
    {"layers": 1}, {"layers": -1}, {"layers": 1, "modules": ["self_attn"]}, {"layers": -1, "modules": ["mlp"]},
    {"layers": 1, "modules": ["self_attn.q_proj", "up_proj"]}, {"layers": 2, "modules": ["input_layernorm", "mlp"]},
    {"layers": 1, "extra": ["embed_tokens"]}, {"layers": 1, "extra": ["lm_head"]},
    {"layers": [1], "extra": ["norm", "lm_head", "model.embed_tokens"]},
)  # fmt: skip
GPT = ({"layers": 1, "extra": ["wte"]}, {"layers": 1, "extra": ["wpe", "ln_f"]}, {"layers": 1, "modules": ["attn"]})
MIXED = ({"layers": -1}, {"layers": 1}, {"layers": 1, "modules": ["mlp"]}, {"layers": 1, "modules": ["experts"]})
OPT = {"num_key_value_heads": None, "ffn_dim": 130, "word_embed_proj_dim": 96}
DOTS = {"n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
COUNTED = [
    *(("llama", {}, chosen) for chosen in LLAMA_LIKE),
    *(("qwen3", {"tie_word_embeddings": True}, chosen) for chosen in LLAMA_LIKE),
    ("qwen3", {}, {"layers": 1, "modules": ["q_norm"]}),
    ("olmo2", {}, {"layers": 1, "modules": ["k_norm"]}),
    *(("gpt2", {"num_key_value_heads": None}, chosen) for chosen in GPT),
    ("opt", OPT, {"layers": 1, "extra": ["embed_positions"]}),
    ("opt", OPT, {"layers": 1, "extra": ["embed_tokens"]}),
    *(("dots1", DOTS, chosen) for chosen in MIXED),
    *(("qwen2_moe", {"num_experts": 4, "decoder_sparse_step": 2}, chosen) for chosen in MIXED[:3]),
    ("qwen2_moe", {"num_experts": 4, "decoder_sparse_step": 2}, {"layers": [1], "modules": ["experts", "gate"]}),
    ("ernie4_5_moe", {"moe_num_experts": 4, "use_bias": True}, {"layers": 1, "extra": ["lm_head"]}),
]


@pytest.mark.parametrize(("model_type", "changes", "chosen"), COUNTED)
def test_what_learns_is_counted_as_it_is_frozen(model_type, changes, chosen):
    facts = {"model_type": model_type, **SMALL, **changes}
    model, chosen = build_on_meta(facts), TrainOnlyConfig(**chosen)
    apply_train_only(model, chosen)
    truth = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert trained_parameters(shape_from_config(facts), chosen) == truth


DEEP = {"num_hidden_layers": 8}


@pytest.mark.parametrize("layout", ["single.pp4", "zero1x2.pp2", "single.pp2.tp2"])
def test_a_stage_has_the_weights_that_learn_on_it_and_no_others(layout):
    layout, shape = parse_layout(layout), shape_of("llama", **DEEP, num_key_value_heads=2)
    work = Work(shape, None, train_only=TrainOnlyConfig(layers=1))
    found = sorted(one.trainable for one in shares(work, layout))
    assert found == [0] * (layout.pp - 1) + [shape.num_per_layer // layout.tp]
    assert static_memory(work, layout).gradients_bytes == 4 * shape.num_per_layer // layout.tp


def test_the_stage_that_learns_is_the_fullest():
    """One layer of eight, with state: two stages have no more of it than one process."""
    shape = shape_of("llama", **DEEP, hidden_size=512, num_attention_heads=16)
    alone, first = (Work(shape, None, train_only=TrainOnlyConfig(layers=one)) for one in (1, -1))
    for work in (alone, first):
        memory = estimate_memory(work, parse_layout("single.pp2"), 16)
        assert memory.parts["optimizer"] == 8 * shape.num_per_layer


COUNTED_BYTES = {  # by the ledger of runs of two processes and two micro-batches: what a rank sent to gather weights
    "all": ({}, "fsdp", "fp32", 5648896),
    "the last layer": ({"layers": 1}, "fsdp", "fp32", 3926016),
    "the second": ({"layers": [1]}, "fsdp", "fp32", 5304320),
    "the first": ({"layers": -1}, "fsdp", "fp32", 5648896),
    "the last, in bf16": ({"layers": 1}, "fsdp", "bf16", 2032128),
    "the last, weights whole": ({"layers": 1}, "zero2", "bf16", 172544),
}


@pytest.mark.parametrize("name", COUNTED_BYTES)
def test_layers_without_a_backward_pass_are_not_gathered_for_one(name):
    """But one below them, which FSDP fetches ahead, and has at the next forward pass."""
    chosen, strategy, precision, counted = COUNTED_BYTES[name]
    facts = SMALL | {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 4, "vocab_size": 264}
    facts |= {"model_type": "llama", "num_attention_heads": 4, "tie_word_embeddings": True}
    work = Work(shape_from_config(facts), None, train_only=TrainOnlyConfig(**chosen) if chosen else None)
    layout = Layout(dp=2, shard=2, strategy=strategy, precision=precision)
    sent = sum(one.sent_bytes for one in traffic(work, layout, 2, accumulation=2) if one.kind == "all-gather")
    assert sent == pytest.approx(counted, rel=0.001)


def test_layers_are_those_that_read_text_where_a_tower_for_images_has_more_of_them():
    from duoka.model.tiny_copy import build_tiny, tiny_config

    model = build_tiny(tiny_config(family_config("got_ocr2")), "eager")
    apply_train_only(model, TrainOnlyConfig(layers=1))
    trained = {name.rpartition(".layers.")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"model.language_model"}
