"""Whose model a config.json tells of: its row of the table in families.py, or a guess, and what its keys mean there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from duoka.plan.families import EXPERT_COUNTS, FAMILIES, OTHER_NAMES, UNKNOWN, ExpertKeys, Family
from duoka.plan.sizes import LayerParts

_LATENT = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
_EXPERT_SIZES = ("moe_intermediate_size", "expert_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size")
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")


# Their positions stand in a table that ends where config.json says: a longer text is an index out of range.
_POSITIONS = "max_position_embeddings"
_TABLES_OF_POSITIONS = {
    "bart", "bigbird_pegasus", "biogpt", "blenderbot", "blenderbot-small", "codegen", "ctrl", "git", "gpt2",
    "gpt_bigcode", "gpt_neo", "gptj", "marian", "mbart", "mpt", "mvp", "openai-gpt", "opt", "pegasus", "plbart",
    "trocr",
}  # fmt: skip


def longest_text(facts: Mapping[str, Any]) -> int | None:
    """Tokens that a model can read at all; None where positions are computed, however many there are."""
    family, named = find_family(facts), with_usual_names(facts)
    if named.get("model_type") not in _TABLES_OF_POSITIONS:
        return None
    found = named.get(_POSITIONS, None if family is None else family.defaults.get(_POSITIONS))
    return found if isinstance(found, int) else None


_ACTS = ("hidden_activation", "hidden_act", "activation_function", "activation")


def parts_of(family: Family, facts: Mapping[str, Any]) -> LayerParts:
    """How a layer of that family is computed."""
    read = {**family.defaults, **facts}
    named = next((str(read[key]) for key in _ACTS if read.get(key)), family.act)
    return LayerParts(
        norm="layer" if family.norm_terms > 1 and family.norm != "narrow" else family.norm,
        post_norms=family.post_norms,
        parallel=bool(read.get(family.parallel) if isinstance(family.parallel, str) else family.parallel),
        joined_gate=family.mlp == "fused",
        joins_heads=family.joins_heads or (family.qk_norm == "full"),
        conv1d=family.conv1d,
        act=named,
        own_rotation=family.own_rotation,
        bends_scores=family.num_sinks > 0 or bool(read.get("attn_logit_softcapping")),
    )


def find_family(facts: Mapping[str, Any]) -> Family | None:
    """The row of a config's model type, if it has one."""
    found = FAMILIES.get(str(facts.get("model_type", "")))
    return _falcon(found, facts) if found is not None and facts["model_type"] == "falcon" else found


def _falcon(family: Family, facts: Mapping[str, Any]) -> Family:
    """Its norms are those of its generation."""
    if facts.get("new_decoder_architecture"):
        return replace(family, block_norms=1 if facts.get("num_ln_in_parallel_attn") == 1 else 2)
    return replace(family, block_norms=1 if facts.get("parallel_attn", True) else 2)


def with_usual_names(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What GPT-2 calls n_embd, as hidden_size, and so on."""
    named = dict(facts)
    for usual, others in OTHER_NAMES.items():
        found = [facts[name] for name in others if facts.get(name) is not None]
        if found and facts.get(usual) is None:
            named[usual] = found[0]
    heads = named.get("num_attention_heads")
    is_new = bool(facts.get("new_decoder_architecture"))
    if facts.get("model_type") == "falcon":  # all heads share one key and value, and in newer ones a group does
        named["num_key_value_heads"] = (facts.get("num_kv_heads") or heads) if is_new else 1
    if facts.get("multi_query") is False and not is_new:
        named["num_key_value_heads"] = heads
    if isinstance(kinds := facts.get("layers_block_type"), list):  # all that transformers writes of Nemotron-H's
        named.setdefault("num_hidden_layers", len(kinds))
    if isinstance(widths := named.get("intermediate_size"), list):  # of each layer (Gemma 3n)
        named["intermediate_size"] = max(widths, default=0)
    return named


def guess_family(facts: Mapping[str, Any]) -> Family:
    """A type without a row: a Llama, with experts and latent attention where its config has the keys for them."""

    def first(names: tuple[str, ...], otherwise: str) -> str:
        found = (name for name in names if isinstance(facts.get(name), int) and facts[name] > 0)
        return next(found, otherwise)

    # Layers with states in place of attention (Mamba, RWKV) have no heads.
    guess = replace(UNKNOWN, latent=all(facts.get(name) for name in _LATENT), defaults={"num_attention_heads": 1})
    count = first(EXPERT_COUNTS, "")
    if not count:
        return guess
    step = facts.get("decoder_sparse_step") or facts.get("mlp_only_layers")
    keys = ExpertKeys(
        count,
        first(_EXPERT_SIZES, guess.ffn),
        shared="size" if facts.get("shared_expert_intermediate_size") else "count",
        dense="first" if facts.get("first_k_dense_replace") else "step" if step else "none",
    )
    active = {"num_experts_per_tok": facts.get(first(_ACTIVE, ""), 2)}
    return replace(guess, experts=keys, defaults={**guess.defaults, **active})


def is_usual(facts: Mapping[str, Any], hidden: int) -> bool:
    """Whether a config has nothing that the counts leave out: projections around OPT's smallest layers and its norms
    that are none, Phi's norms of queries and keys, GPT-2's second attention."""
    more = any(facts.get(key) for key in ("qk_layernorm", "add_cross_attention", "_remove_final_layer_norm"))
    less = any(facts.get(key) is False for key in ("do_layer_norm_before", "layer_norm_elementwise_affine"))
    return not more and not less and facts.get("word_embed_proj_dim") in (None, hidden)
