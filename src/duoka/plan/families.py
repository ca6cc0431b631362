"""How one model type differs from a Llama: the table that `shape.py` counts by. One row per transformers model type.

A new family is a row here and a case of the test that counts it against transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

# What configs call the number of experts.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class ExpertKeys:
    """Where a mixture of experts keeps its sizes in config.json, and what lies beside the experts."""

    count: str = "num_experts"
    size: str = "moe_intermediate_size"
    shared: Literal["none", "size", "count"] = "none"  # a width of its own, or a number of experts of the same width
    shared_gate: bool = False
    bias: bool = False  # of experts and router
    wide_router: bool = False  # which computes in fp32 whatever it reads
    correction: bool = False  # a learned number beside each expert's score
    adapted: Literal["all", "none"] = "all"  # of these and the router, what gets adapters where targets are all
    # Layers without them: by decoder_sparse_step and mlp_only_layers, the first_k_dense_replace first ones, or those
    # outside of ERNIE's moe_layer_interval, _start_index and _end_index.
    dense: Literal["none", "step", "first", "interval"] = "none"


@dataclass(frozen=True)
class Family:
    """How one model type differs from a Llama. A bias given as text is the config key that switches it."""

    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    head_bias: bool | str = False
    qk_norm: Literal["none", "head", "full", "asked"] = "none"  # over one head, over a projection, or use_qk_norm
    block_norms: int = 2  # norms of width hidden_size in each layer
    norm_terms: int = 1  # 1: a scale; 2: a scale and a shift
    # Of one term; shifted: 1 + scale; wide: multiplied in fp32. Of two, narrow: a GPU's autocast narrows its input.
    norm: Literal["rms", "wide", "shifted", "narrow"] = "rms"
    post_norms: int = 0  # of the block's norms, those behind attention and MLP
    parallel: bool | str = False  # attention and MLP read the same
    act: str = "silu"  # where config.json names none
    own_rotation: bool = False  # by code that no kernel takes the place of
    entry_norm: bool = False  # of the embedding, before the first layer
    mlp: Literal["gated", "fused", "plain"] = "gated"
    mlp_names: tuple[str, str] = ("up_proj", "down_proj")  # of a plain one
    fused_qkv: bool = False
    conv1d: bool = False  # in place of linear layers
    joins_heads: bool = False  # on a tensor axis, as all do whose norms of queries and keys are over a projection
    attention_names: tuple[str, str] = ("self_attn.qkv_proj", "self_attn.o_proj")  # of a fused one; else the second
    ffn: str = "intermediate_size"  # where config.json keeps the feed-forward width
    ffn_times: int = 0  # how many times the hidden size it is where nothing says so
    # Rows of a learned table of positions beside those that the config names; None where positions are not learned.
    more_positions: int | None = None
    # Which layers look back only so far, when the config has sliding_window but no layer_types: all of them, those
    # after max_window_layers where use_sliding_window says so, or all but every n-th.
    windows: Literal["none", "all", "asked"] | int = "none"
    experts: ExpertKeys | None = None
    latent: bool = False  # queries, keys and values through low-rank projections (DeepSeek)
    num_sinks: int = 0  # learned numbers per head beside the scores
    # What transformers' config class assumes for keys that a config.json leaves out.
    defaults: Mapping[str, Any] = field(default_factory=dict)


# What else config.json calls the sizes that every family has: transformers' attribute maps.
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "d_model", "emb_dim"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "decoder_layers"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len", "model_max_length", "context_length"),
    "head_dim": ("kv_channels", "attention_head_dim"),
    "vocab_size": ("n_words",),
    "num_experts_per_tok": ("moe_k", "moe_topk"),
    "n_shared_experts": ("moe_num_shared_experts",),
}

_LLAMA_BIASES: dict[str, Any] = {"qkv_bias": "attention_bias", "out_bias": "attention_bias", "mlp_bias": "mlp_bias"}
_QWEN_WINDOW = {"sliding_window": 4096, "max_window_layers": 28}
_GEMMA = {"tie_word_embeddings": True, "head_dim": 256}
_GEMMAS: dict[str, Any] = {
    "qkv_bias": "attention_bias", "out_bias": "attention_bias", "norm": "shifted", "act": "gelu_pytorch_tanh",
}  # fmt: skip

LLAMA = Family(**_LLAMA_BIASES)
UNKNOWN = replace(LLAMA, ffn_times=4)  # counted like a Llama; most that name no feed-forward width have this one
_GPT2 = Family(
    qkv_bias=True, out_bias=True, mlp_bias=True, norm_terms=2, mlp="plain", mlp_names=("c_fc", "c_proj"),
    fused_qkv=True, attention_names=("attn.c_attn", "attn.c_proj"), ffn="n_inner", ffn_times=4, more_positions=0,
    act="gelu_new",
    conv1d=True, defaults={"tie_word_embeddings": True, "max_position_embeddings": 1024},
)  # fmt: skip
_GLM = Family(
    qkv_bias="attention_bias",
    mlp="fused",
    own_rotation=True,
    defaults={"attention_bias": True, "num_key_value_heads": 2, "head_dim": 128},
)
_OLMO2 = Family(qkv_bias="attention_bias", out_bias="attention_bias", norm="wide", post_norms=2, qk_norm="full")
_OF_FOUR = ("dense_h_to_4h", "dense_4h_to_h")
FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": Family(windows="all", defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen2": Family(qkv_bias=True, windows="asked", defaults={"num_key_value_heads": 32, **_QWEN_WINDOW}),
    "qwen3": Family(
        qkv_bias="attention_bias", out_bias="attention_bias", qk_norm="head", windows="asked",
        defaults={"num_key_value_heads": 32, "head_dim": 128, **_QWEN_WINDOW},
    ),
    "gemma": Family(**_GEMMAS, defaults={**_GEMMA, "num_key_value_heads": 16}),
    "gemma2": Family(
        **_GEMMAS, block_norms=4, post_norms=2, windows=2,
        defaults={**_GEMMA, "num_key_value_heads": 4, "sliding_window": 4096, "attn_logit_softcapping": 50.0},
    ),
    "gemma3_text": Family(
        **_GEMMAS, block_norms=4, post_norms=2, qk_norm="head", windows=6,
        defaults={**_GEMMA, "num_key_value_heads": 4, "sliding_window": 4096},
    ),
    "smollm3": Family(**_LLAMA_BIASES, defaults={"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "granite": Family(**_LLAMA_BIASES),
    "granite_swa": Family(
        **_LLAMA_BIASES, windows="all", num_sinks=1,
        defaults={"tie_word_embeddings": True, "num_key_value_heads": 4, "sliding_window": 128},
    ),
    "seed_oss": Family(
        qkv_bias="attention_bias", out_bias="attention_out_bias", mlp_bias="mlp_bias",
        defaults={"attention_bias": True, "num_key_value_heads": 8, "head_dim": 128},
    ),
    "olmo2": _OLMO2,
    "olmo3": replace(_OLMO2, windows=4, defaults={"sliding_window": 4096}),
    "phi3": Family(mlp="fused", fused_qkv=True, joins_heads=True, windows="all"),
    "phi": Family(
        qkv_bias=True, out_bias=True, mlp_bias=True, head_bias=True, norm_terms=2, block_norms=1, mlp="plain",
        mlp_names=("fc1", "fc2"), attention_names=("", "self_attn.dense"), act="gelu_new",
    ),
    "ernie4_5": Family(
        qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias",
        defaults={"tie_word_embeddings": True, "num_key_value_heads": 2, "head_dim": 128},
    ),
    "glm": _GLM,
    "glm4": replace(_GLM, block_norms=4, post_norms=2),
    "ministral3": Family(windows="all", defaults={"num_key_value_heads": 8, "head_dim": 128}),
    "cwm": Family(mlp_bias="mlp_bias", windows=4, defaults={"num_key_value_heads": 8, "head_dim": 128}),
    "arcee": Family(**_LLAMA_BIASES, mlp="plain", act="relu2"),
    "nemotron": Family(**_LLAMA_BIASES, norm_terms=2, norm="narrow", mlp="plain", act="relu2"),
    "stablelm": Family(qkv_bias="use_qkv_bias", norm_terms=2),
    "exaone4": Family(post_norms=2, qk_norm="head", windows=4, defaults={"num_key_value_heads": 32}),
    "starcoder2": Family(
        qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias", norm_terms=2, mlp="plain", windows="all",
        mlp_names=("c_fc", "c_proj"), act="gelu_pytorch_tanh",
        defaults={"use_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 2},
    ),
    "gpt_neox": Family(
        qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias=True, norm_terms=2, mlp="plain", fused_qkv=True,
        mlp_names=_OF_FOUR, attention_names=("attention.query_key_value", "attention.dense"), act="gelu",
        parallel="use_parallel_residual", defaults={"attention_bias": True, "use_parallel_residual": True},
    ),
    "bloom": Family(
        qkv_bias=True, out_bias=True, mlp_bias=True, norm_terms=2, entry_norm=True, mlp="plain", fused_qkv=True,
        mlp_names=_OF_FOUR, attention_names=("self_attention.query_key_value", "self_attention.dense"),
        ffn="n_inner", ffn_times=4, act="gelu", defaults={"tie_word_embeddings": True},
    ),
    "falcon": Family(
        qkv_bias="bias", out_bias="bias", mlp_bias="bias", norm_terms=2, block_norms=1, mlp="plain", fused_qkv=True,
        mlp_names=_OF_FOUR, attention_names=("self_attention.query_key_value", "self_attention.dense"),
        ffn="ffn_hidden_size", ffn_times=4, act="gelu", parallel=True, defaults={"tie_word_embeddings": True},
    ),
    "gptj": Family(
        mlp_bias=True, head_bias=True, norm_terms=2, block_norms=1, mlp="plain", mlp_names=("fc_in", "fc_out"),
        attention_names=("", "attn.out_proj"), ffn="n_inner", ffn_times=4, act="gelu_new",
    ),
    "codegen": Family(
        mlp_bias=True, head_bias=True, norm_terms=2, block_norms=1, mlp="plain", mlp_names=("fc_in", "fc_out"),
        fused_qkv=True, attention_names=("attn.qkv_proj", "attn.out_proj"), ffn="n_inner", ffn_times=4, act="gelu_new",
    ),
    "gpt_neo": Family(
        out_bias=True, mlp_bias=True, norm_terms=2, mlp="plain", mlp_names=("c_fc", "c_proj"),
        attention_names=("", "attention.out_proj"), ffn_times=4, more_positions=0, act="gelu_new",
        defaults={"tie_word_embeddings": True, "max_position_embeddings": 2048},
    ),
    "mpt": Family(
        mlp="plain", fused_qkv=True, attention_names=("attn.Wqkv", "attn.out_proj"), ffn="", ffn_times=4, act="gelu",
        defaults={"tie_word_embeddings": True},
    ),
    "xglm": Family(
        qkv_bias=True, out_bias=True, mlp_bias=True, norm_terms=2, mlp="plain", mlp_names=("fc1", "fc2"),
        attention_names=("", "self_attn.out_proj"), ffn="ffn_dim", act="gelu",
        defaults={"tie_word_embeddings": True, "ffn_dim": 4096},
    ),
    "gpt2": _GPT2,
    "gpt_bigcode": replace(_GPT2, conv1d=False, defaults={**_GPT2.defaults, "num_key_value_heads": 1}),
    "opt": Family(
        qkv_bias="enable_bias", out_bias="enable_bias", mlp_bias="enable_bias", norm_terms=2, mlp="plain",
        mlp_names=("fc1", "fc2"), attention_names=("", "self_attn.out_proj"), ffn="ffn_dim", more_positions=2,
        act="relu",
        defaults={
            "tie_word_embeddings": True, "enable_bias": True, "max_position_embeddings": 2048, "ffn_dim": 3072,
        },
    ),
    "mixtral": Family(
        windows="all", experts=ExpertKeys("num_local_experts", "intermediate_size"),
        defaults={"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen2_moe": Family(
        qkv_bias="qkv_bias", windows="asked",
        experts=ExpertKeys(shared="size", shared_gate=True, dense="step"),
        defaults={
            "qkv_bias": True, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, **_QWEN_WINDOW,
        },
    ),
    "qwen3_moe": Family(
        qkv_bias="attention_bias", out_bias="attention_bias", qk_norm="head", windows="asked",
        experts=ExpertKeys(dense="step"),
        defaults={
            "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
            "sliding_window": 4096, "max_window_layers": 28,
        },
    ),
    "olmoe": Family(
        qkv_bias="attention_bias", out_bias="attention_bias", qk_norm="full",
        experts=ExpertKeys("num_experts", "intermediate_size"),
        defaults={"num_experts": 64, "num_experts_per_tok": 8},
    ),
    "gpt_oss": Family(
        qkv_bias="attention_bias", out_bias="attention_bias", windows=2, num_sinks=1, norm="wide", own_rotation=True,
        experts=ExpertKeys("num_local_experts", "intermediate_size", bias=True, adapted="none"),
        defaults={
            "attention_bias": True, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128,
            "num_experts_per_tok": 4, "sliding_window": 128,
        },
    ),
    "phimoe": Family(
        qkv_bias="attention_bias", out_bias="attention_bias", head_bias="lm_head_bias", norm_terms=2, windows="all",
        experts=ExpertKeys("num_local_experts", "intermediate_size", adapted="none"),
        defaults={"num_key_value_heads": 8, "num_local_experts": 16, "num_experts_per_tok": 2},
    ),
    "granitemoe": Family(
        qkv_bias="attention_bias", out_bias="attention_bias",
        experts=ExpertKeys("num_local_experts", "intermediate_size", adapted="none"),
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "minimax_m2": Family(
        qk_norm="full", experts=ExpertKeys("num_local_experts", "intermediate_size"),
        defaults={"num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8},
    ),
    "dots1": Family(
        qkv_bias="attention_bias", out_bias="attention_bias", qk_norm="head",
        experts=ExpertKeys("n_routed_experts", wide_router=True, shared="count", dense="first"),
        defaults={"num_key_value_heads": 32, "moe_intermediate_size": 1408},
    ),
    "solar_open": Family(
        qkv_bias="attention_bias", ffn="moe_intermediate_size",
        experts=ExpertKeys("n_routed_experts", wide_router=True, shared="count"),
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "n_routed_experts": 128, "n_shared_experts": 1,
            "num_experts_per_tok": 8, "moe_intermediate_size": 1280,
        },
    ),
    "ernie4_5_moe": Family(
        qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias", head_bias="use_bias",
        experts=ExpertKeys("moe_num_experts", wide_router=True, shared="count", dense="interval", correction=True),
        defaults={
            "tie_word_embeddings": True, "num_key_value_heads": 4, "moe_num_experts": 64, "num_experts_per_tok": 6,
            "n_shared_experts": 2, "moe_intermediate_size": 1536, "moe_layer_start_index": 1,
        },
    ),
    "glm4_moe": Family(
        qkv_bias="attention_bias", qk_norm="asked",
        experts=ExpertKeys("n_routed_experts", wide_router=True, shared="count", dense="first"),
        defaults={
            "num_key_value_heads": 8, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
        },
    ),
    "deepseek_v2": Family(
        qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias", latent=True,
        experts=ExpertKeys("n_routed_experts", wide_router=True, shared="count", dense="first"),
        defaults={
            "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1407,
            "first_k_dense_replace": 0, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128, "v_head_dim": 128,
        },
    ),
    "deepseek_v3": Family(
        qkv_bias="attention_bias", out_bias="attention_bias", latent=True,
        experts=ExpertKeys("n_routed_experts", wide_router=True, shared="count", dense="first"),
        defaults={
            "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128, "v_head_dim": 128, "num_key_value_heads": 128,
        },
    ),
}  # fmt: skip
