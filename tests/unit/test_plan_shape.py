"""Counts from config.json are exactly what transformers builds, and adapters are what PEFT builds."""

import json
from dataclasses import replace

import pytest

from duoka.config.schema import LoraConfig
from duoka.errors import ConfigError
from duoka.plan.families import FAMILIES
from duoka.plan.shape import (
    demo_shape,
    facts_from_depth,
    lora_parameters,
    read_shape,
    shape_from_config,
    shape_from_depth,
    shape_from_parameters,
)

SMALL = {
    "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 331, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
UNGROUPED = {"num_key_value_heads": None}
# Whose classes assume no experts, a kind for each of 24 layers, no count of key-value heads, and fail.
NOT_BY_DEFAULT = {"dots1", "gpt_neo", "nemotron"}
CASES = [
    ("llama", {"tie_word_embeddings": False}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 20, "num_key_value_heads": None}),
    ("mistral", {}),
    ("mistral", {"head_dim": 8, "tie_word_embeddings": True}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    ("qwen3", {}),
    ("qwen3", {"head_dim": 24, "attention_bias": True, "tie_word_embeddings": True}),
    ("gemma", {}),
    ("gemma", {"head_dim": 32, "tie_word_embeddings": False}),
    ("gemma2", {}),
    ("gemma3_text", {"head_dim": 16}),
    ("smollm3", {}),
    ("granite", {"tie_word_embeddings": True}),
    ("seed_oss", {}),
    ("seed_oss", {"attention_out_bias": True, "attention_bias": False}),
    ("olmo2", {}),
    ("phi3", {}),
    ("olmo3", {}),
    ("glm", {}),
    ("glm4", {"head_dim": 16}),
    ("ministral3", {}),
    ("cwm", {}),
    ("arcee", {"head_dim": 16, "mlp_bias": True}),
    ("nemotron", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    ("stablelm", {"use_qkv_bias": True, "tie_word_embeddings": True}),
    ("exaone4", {"head_dim": 16}),
    ("phi", {}),
    ("phi", {"num_key_value_heads": None, "tie_word_embeddings": True}),
    ("ernie4_5", {"head_dim": 16}),
    ("ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
    ("starcoder2", {}),
    ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    ("gpt_neox", {**UNGROUPED, "tie_word_embeddings": False}),
    ("gpt_neox", {**UNGROUPED, "attention_bias": False}),
    ("bloom", {**UNGROUPED, "n_layer": 3, "n_head": 6}),
    ("falcon", {**UNGROUPED}),
    ("falcon", {**UNGROUPED, "bias": True, "parallel_attn": False, "ffn_hidden_size": 100}),
    ("falcon", {**UNGROUPED, "multi_query": False, "alibi": True, "tie_word_embeddings": False}),
    ("falcon", {**UNGROUPED, "new_decoder_architecture": True, "num_kv_heads": 2}),
    ("gptj", {**UNGROUPED, "rotary_dim": 8, "tie_word_embeddings": False}),
    (
        "codegen",
        {**UNGROUPED, "n_inner": 100, "rotary_dim": 8, "n_head": 8, "n_embd": 64, "tie_word_embeddings": False},
    ),
    ("gpt_neo", {**UNGROUPED, "attention_types": [[["global"], 3]]}),
    ("gpt_neo", {**UNGROUPED, "intermediate_size": None, "attention_types": [[["global"], 3]]}),
    ("mpt", {**UNGROUPED, "d_model": 96, "n_heads": 6, "n_layers": 3}),
    ("xglm", {**UNGROUPED, "d_model": 96, "ffn_dim": 130, "num_layers": 3, "attention_heads": 6}),
    ("gpt2", {**UNGROUPED, "n_embd": 96, "n_layer": 3, "n_head": 6, "n_positions": 40}),
    ("gpt2", {**UNGROUPED, "n_inner": 100, "tie_word_embeddings": False}),
    ("gpt_bigcode", {"num_key_value_heads": 1}),
    ("gpt_bigcode", {"multi_query": False}),
    ("opt", {**UNGROUPED, "ffn_dim": 130, "word_embed_proj_dim": 96}),
    ("mixtral", {"num_local_experts": 4}),
    ("qwen2_moe", {"num_experts": 4, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80}),
    ("qwen2_moe", {"num_experts": 4, "decoder_sparse_step": 2, "qkv_bias": False}),
    ("qwen3_moe", {"num_experts": 6, "num_experts_per_tok": 2, "mlp_only_layers": [0]}),
    ("olmoe", {"num_experts": 4}),
    ("gpt_oss", {"num_local_experts": 4, "head_dim": 16}),
    ("granite_swa", {}),
    ("phimoe", {"num_local_experts": 4, "attention_bias": True}),
    ("phimoe", {"num_local_experts": 4, "lm_head_bias": True}),
    ("granitemoe", {"num_local_experts": 4}),
    ("minimax_m2", {"num_local_experts": 4}),
    ("dots1", {"n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 1}),
    ("solar_open", {"n_routed_experts": 4, "moe_intermediate_size": 48}),
    ("ernie4_5_moe", {"moe_num_experts": 4, "moe_intermediate_size": 48}),
    ("ernie4_5_moe", {"moe_num_experts": 4, "moe_layer_start_index": 2, "moe_num_shared_experts": 1, "moe_k": 2}),
    ("ernie4_5_moe", {"moe_num_experts": 4, "use_bias": True}),
    ("ernie4_5_moe", {"moe_num_experts": 4, "use_bias": True, "tie_word_embeddings": False}),
    ("ernie4_5_moe", {"moe_num_experts": 4, "moe_layer_interval": 2, "moe_layer_start_index": 0}),
    ("ernie4_5_moe", {"moe_num_experts": 4, "moe_layer_end_index": 1, "moe_num_shared_experts": 0}),
    ("glm4_moe", {"n_routed_experts": 4, "use_qk_norm": True, "head_dim": 16}),
    ("glm4_moe", {"n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 2}),
    ("deepseek_v2", {"n_routed_experts": 8, "q_lora_rank": 24, "kv_lora_rank": 16, "first_k_dense_replace": 1}),
    ("deepseek_v2", {"n_routed_experts": 8, "q_lora_rank": None, "kv_lora_rank": 16, "mlp_bias": True}),
    ("deepseek_v3", {"n_routed_experts": 8, "q_lora_rank": 24, "kv_lora_rank": 16, "first_k_dense_replace": 1}),
    ("deepseek_v3", {"n_routed_experts": 8, "q_lora_rank": None, "kv_lora_rank": 16, "v_head_dim": 12}),
]


def build_on_meta(facts):
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    settings = {key: value for key, value in facts.items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[facts["model_type"]](**settings))
    model.tie_weights()
    return model


@pytest.mark.parametrize(("model_type", "changes"), CASES)
def test_count_is_exactly_what_transformers_builds(model_type, changes, tmp_path):
    import torch

    facts = {"model_type": model_type, **SMALL, **changes}
    (tmp_path / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    shape = read_shape(tmp_path)
    model = build_on_meta(facts)
    truth = sum(parameter.numel() for parameter in model.parameters())
    assert shape.num_parameters == truth, f"{model_type} {changes}: {shape.num_parameters} against {truth}"
    assert shape.exact
    tables = [m for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    assert shape.num_embedding == sum(m.weight.numel() for m in tables)
    if shape.experts is not None:
        return  # experts are no linear layers there, but one tensor for all of them
    kinds = ("Linear", "Conv1D", "FalconLinear")
    linears = [m for m in model.modules() if type(m).__name__ in kinds and m is not model.get_output_embeddings()]
    assert shape.num_block_linear == sum(p.numel() for m in linears for p in m.parameters())


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("gpt2", {"n_embd": 96, "n_layer": 3, "n_head": 6, "vocab_size": 331}),
        ("gpt_bigcode", {"n_embd": 96, "n_layer": 3, "n_head": 6, "vocab_size": 331}),
        ("bloom", {"n_layer": 2, "n_head": 4}),  # of no family in the table: its sizes are read all the same
        ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2}),
        ("xglm", {"d_model": 64, "attention_heads": 4, "num_layers": 2}),
    ],
)
def test_sizes_are_read_under_the_names_that_transformers_maps(model_type, changes):
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type](**changes)
    shape = shape_from_config(config.to_dict())
    assert (shape.hidden_size, shape.num_heads, shape.num_layers) == (
        config.hidden_size, config.num_attention_heads, config.num_hidden_layers
    )  # fmt: skip


def test_every_family_of_the_table_is_counted_against_transformers():
    assert {name for name, _ in CASES} == set(FAMILIES)


@pytest.mark.parametrize("model_type", sorted(set(FAMILIES) - NOT_BY_DEFAULT))
def test_keys_left_out_mean_what_transformers_would_assume(model_type):
    facts = {"model_type": model_type, **SMALL}
    for key in ("num_key_value_heads", "tie_word_embeddings"):
        facts.pop(key, None)
    heads = 32  # divisible by every family's default number of key-value heads
    facts |= {"num_attention_heads": heads, "hidden_size": 128}
    truth = sum(parameter.numel() for parameter in build_on_meta(facts).parameters())
    assert shape_from_config(facts).num_parameters == truth


@pytest.mark.parametrize("targets", ["all", ("q_proj", "v_proj"), ("down_proj",), ("self_attn.o_proj",)])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma"])
def test_adapters_are_counted_as_peft_builds_them(model_type, targets):
    import peft

    facts = {"model_type": model_type, **SMALL}
    lora = LoraConfig(rank=5, targets=targets)
    names = "all-linear" if targets == "all" else list(targets)
    settings = peft.LoraConfig(task_type="CAUSAL_LM", r=5, target_modules=names)
    model = peft.get_peft_model(build_on_meta(facts), settings)
    truth = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert lora_parameters(shape_from_config(facts), lora) == truth


def test_an_adapter_target_that_no_layer_has_is_refused_with_the_known_names():
    with pytest.raises(ConfigError, match="c_attn") as caught:
        lora_parameters(demo_shape(), LoraConfig(targets=("q_proj", "c_attn")))
    assert "gate_proj" in str(caught.value)


def test_names_of_layers_are_not_guessed_for_a_type_in_no_table():
    shape, lora = replace(demo_shape(), exact=False), LoraConfig(rank=8, targets=("q_proj", "in_proj"))
    known = lora_parameters(shape, LoraConfig(rank=8, targets=("q_proj",)))
    square = 8 * 2 * shape.hidden_size * shape.num_layers
    assert lora_parameters(shape, lora) == known + square


def test_the_demo_model_has_134_515_008_parameters():
    shape = demo_shape()
    assert (shape.num_parameters, shape.num_embedding, shape.num_head) == (134_515_008, 28_311_552, 0)
    assert lora_parameters(shape, LoraConfig(rank=8)) == 2_442_240


def test_an_unknown_type_is_counted_like_a_llama_and_says_so():
    shape = shape_from_config({"model_type": "shiny", **SMALL})
    assert not shape.exact
    assert shape.num_parameters == shape_from_config({"model_type": "llama", **SMALL}).num_parameters
    mixed = shape_from_config({"model_type": "shiny_moe", **SMALL, "num_local_experts": 8})
    assert not mixed.exact and mixed.experts.num_experts == 8


@pytest.mark.parametrize("model_type", ["mamba", "falcon_mamba", "rwkv", "nemotron_h", "gemma3n_text"])
def test_states_without_heads_and_layers_of_several_widths_have_a_size_too(model_type):
    """They are trained, docs/models.md says: runs of them were refused, because their size was unknown."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type)
    shape = shape_from_config(config.to_dict())
    assert not shape.exact and shape.num_layers == config.num_hidden_layers and shape.num_heads >= 1


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        ({"model_type": "llama"}, "hidden_size"),
        ({"model_type": "llama", **SMALL, "hidden_size": "wide"}, "'wide'"),
    ],
)
def test_a_config_that_cannot_be_counted_is_refused_in_users_words(facts, word):
    with pytest.raises(ConfigError, match=word):
        shape_from_config(facts)


@pytest.mark.parametrize("text", [None, "{", "[1, 2]"])
def test_a_missing_or_damaged_config_json_is_named(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_shape(tmp_path)


def test_of_a_mixture_a_token_passes_only_its_experts():
    shape = shape_from_config(
        {
            "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
        }
    )  # fmt: skip
    assert (shape.num_parameters, shape.num_active) == (46_702_792_704, 12_879_925_248)  # published: 46.7B, 12.9B


@pytest.mark.parametrize(
    ("facts", "window", "layers"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, 4096, 32),
        ({"model_type": "mistral", "sliding_window": None}, 0, 0),
        ({"model_type": "qwen2", "sliding_window": 4096, "max_window_layers": 28}, 0, 0),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28}, 4096, 4),
        ({"model_type": "gemma2"}, 4096, 16),
        ({"model_type": "gemma3_text", "sliding_window": 512}, 512, 27),
        ({"model_type": "gpt_oss", "num_local_experts": 4, "layer_types": ["sliding_attention"] * 3}, 128, 3),
    ],
)
def test_sliding_windows_are_seen(facts, window, layers):
    shape = shape_from_config({**SMALL, "num_hidden_layers": 32, **facts})
    assert (shape.window, shape.num_window_layers) == (window, layers)


@pytest.mark.parametrize(("length", "window"), [(8, 3), (8, 8), (5, 9), (7, 1)])
def test_the_mean_span_is_that_of_counting_every_position(length, window):
    shape = shape_from_config({**SMALL, "model_type": "mistral", "sliding_window": window})
    counted = [min(place + 1, window) for place in range(length)]
    assert shape.mean_span(length) == pytest.approx(sum(counted) / length)


def test_a_model_of_a_depth_is_what_transformers_builds():
    truth = sum(parameter.numel() for parameter in build_on_meta(facts_from_depth(4, 512)).parameters())
    assert shape_from_depth(4, 512).num_parameters == truth
    assert (shape_from_depth(12).hidden_size, shape_from_depth(12).num_heads) == (768, 6)


@pytest.mark.parametrize("count", [2e7, 1e8, 1e9, 7e9, 7e10, 1e12])
def test_a_number_of_parameters_gives_a_model_of_that_size(count):
    shape = shape_from_parameters(count)
    assert shape.num_parameters == pytest.approx(count, rel=0.02)
    assert not shape.exact


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("gpt_oss", {"num_local_experts": 4, "head_dim": 16}),
        ("phimoe", {"num_local_experts": 4}),
        ("granitemoe", {"num_local_experts": 4}),
        ("mixtral", {"num_local_experts": 4}),
    ],
)
def test_adapters_of_mixtures_whose_experts_get_none_are_those_of_the_rest(model_type, changes):
    from duoka.model.lora import apply_lora

    facts = {"model_type": model_type, **SMALL, **changes}
    model = apply_lora(build_on_meta(facts), LoraConfig(rank=5))
    truth = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert lora_parameters(shape_from_config(facts), LoraConfig(rank=5)) == truth


LESS = {**UNGROUPED, "ffn_dim": 130, "word_embed_proj_dim": 96}


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("opt", {**LESS, "do_layer_norm_before": False}),
        ("opt", {**LESS, "_remove_final_layer_norm": True}),
        ("opt", {**LESS, "layer_norm_elementwise_affine": False}),
        ("gpt2", {**UNGROUPED, "add_cross_attention": True}),
    ],
)
def test_a_variant_that_is_not_counted_to_the_last_weight_is_not_called_exact(model_type, changes):
    facts = {"model_type": model_type, **SMALL, **changes}
    shape = shape_from_config(facts)
    assert shape.num_parameters != sum(parameter.numel() for parameter in build_on_meta(facts).parameters())
    assert not shape.exact


FEW = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 40}


@pytest.mark.parametrize(
    "targets",
    [("gate_proj", "up_proj", "down_proj"), ("q_proj", "down_proj"), ("experts.down_proj", "o_proj"), ("q_proj",)],
)
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 40, "mlp_only_layers": [0]}),
        ("qwen2_moe", {"num_experts": 4, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 80}),
        ("glm4_moe", {**FEW, "first_k_dense_replace": 1}),
        ("dots1", {**FEW, "first_k_dense_replace": 1}),
    ],
)
def test_adapters_of_mixtures_by_name_are_those_of_experts(model_type, changes, targets):
    """PEFT takes a feed-forward block's names for those of experts, and leaves dense blocks beside them alone."""
    from duoka.model.lora import apply_lora

    if model_type == "qwen2_moe" and "experts.down_proj" in targets:
        pytest.skip("its experts are adapted with all alone")
    facts = {"model_type": model_type, **SMALL, **changes}
    lora = LoraConfig(rank=5, targets=targets)
    model = apply_lora(build_on_meta(facts), lora)
    truth = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert lora_parameters(shape_from_config(facts), lora) == truth
