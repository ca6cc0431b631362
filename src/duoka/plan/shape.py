"""What a model is made of, counted from its config.json alone: exactly what transformers would build.

`ModelShape` is what all estimates start from. One row of FAMILIES per model type; a type that is not in the table
is counted like a Llama and marked `exact=False`. Reads one small JSON file, and never builds a model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from duoka.config.schema import LoraConfig
from duoka.errors import ConfigError

_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


@dataclass(frozen=True)
class Family:
    """How one model type differs from a Llama. A bias given as text is the config key that switches it."""

    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: Literal["none", "head", "full"] = "none"  # RMSNorm over one head, or over all of a projection
    block_norms: int = 2  # norms of width hidden_size in each layer
    norm_terms: int = 1  # 1: a scale; 2: a scale and a shift
    mlp: Literal["gated", "fused", "plain"] = "gated"
    mlp_names: tuple[str, str] = ("up_proj", "down_proj")  # of a plain one
    fused_qkv: bool = False
    # What transformers' config class assumes for keys that a config.json leaves out.
    defaults: Mapping[str, Any] = field(default_factory=dict)


_LLAMA_BIASES: dict[str, Any] = {"qkv_bias": "attention_bias", "out_bias": "attention_bias", "mlp_bias": "mlp_bias"}
_GEMMA = {"tie_word_embeddings": True, "head_dim": 256}

FAMILIES: dict[str, Family] = {
    "llama": Family(**_LLAMA_BIASES),
    "mistral": Family(defaults={"num_key_value_heads": 8}),
    "qwen2": Family(qkv_bias=True, defaults={"num_key_value_heads": 32}),
    "qwen3": Family(
        qkv_bias="attention_bias", out_bias="attention_bias", qk_norm="head",
        defaults={"num_key_value_heads": 32, "head_dim": 128},
    ),
    "gemma": Family(
        qkv_bias="attention_bias", out_bias="attention_bias", defaults={**_GEMMA, "num_key_value_heads": 16}
    ),
    "gemma2": Family(
        qkv_bias="attention_bias", out_bias="attention_bias", block_norms=4,
        defaults={**_GEMMA, "num_key_value_heads": 4},
    ),
    "gemma3_text": Family(
        qkv_bias="attention_bias", out_bias="attention_bias", block_norms=4, qk_norm="head",
        defaults={**_GEMMA, "num_key_value_heads": 4},
    ),
    "smollm3": Family(**_LLAMA_BIASES, defaults={"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "granite": Family(**_LLAMA_BIASES),
    "seed_oss": Family(
        qkv_bias="attention_bias", out_bias="attention_out_bias", mlp_bias="mlp_bias",
        defaults={"attention_bias": True, "num_key_value_heads": 8, "head_dim": 128},
    ),
    "olmo2": Family(qkv_bias="attention_bias", out_bias="attention_bias", qk_norm="full"),
    "phi3": Family(mlp="fused", fused_qkv=True),
    "glm": Family(
        qkv_bias="attention_bias", mlp="fused",
        defaults={"attention_bias": True, "num_key_value_heads": 2, "head_dim": 128},
    ),
    "starcoder2": Family(
        qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias", norm_terms=2, mlp="plain",
        mlp_names=("c_fc", "c_proj"),
        defaults={"use_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 2},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Linear:
    """One linear layer of a transformer block, by its name inside the block."""

    name: str
    num_in: int
    num_out: int
    bias: bool = False

    @property
    def num_parameters(self) -> int:
        return self.num_in * self.num_out + (self.num_out if self.bias else 0)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only language model. `exact` is False when its type is not in the table."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    linears: tuple[Linear, ...]  # of one block
    num_norm_parameters_per_layer: int
    num_final_norm_parameters: int
    block_norms: int = 2
    qk_norm: bool = False
    bent_logits: bool = False  # scaled or soft-capped: the loss then needs all logits at once
    exact: bool = True

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_embedding(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def num_head(self) -> int:
        """Parameters of the output head that are its own."""
        return 0 if self.tied else self.num_embedding

    @property
    def num_per_layer(self) -> int:
        return sum(linear.num_parameters for linear in self.linears) + self.num_norm_parameters_per_layer

    @property
    def num_block_linear(self) -> int:
        """Weights of linear layers in all blocks: what autocast keeps a half-precision copy of."""
        return self.num_layers * sum(linear.num_parameters for linear in self.linears)

    @property
    def num_parameters(self) -> int:
        return (
            self.num_embedding + self.num_head + self.num_layers * self.num_per_layer + self.num_final_norm_parameters
        )


def read_shape(folder: Path) -> ModelShape:
    """The shape of the model in a transformers folder."""
    path = folder / "config.json"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}", fix="copy the model again") from None
    if not isinstance(facts, dict):
        raise ConfigError(f"{path} holds no object", fix="copy the model again")
    return shape_from_config(facts, where=str(path))


def shape_from_config(facts: Mapping[str, Any], where: str = "config.json") -> ModelShape:
    """The shape that a transformers config describes; a missing key means the config class's default."""
    if isinstance(facts.get("text_config"), dict):
        facts = {"model_type": f"{facts.get('model_type', '')}_text", **facts["text_config"]}
    model_type = str(facts.get("model_type", ""))
    family = FAMILIES.get(model_type)
    read = _Reader(facts, (family or FAMILIES["llama"]).defaults, where)
    if any(facts.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ConfigError(
            f"{model_type} is a mixture of experts, which duoka cannot plan yet", where=where, fix="use a dense model"
        )
    family = family or Family(**_LLAMA_BIASES)
    hidden, num_heads = read.whole("hidden_size"), read.whole("num_attention_heads")
    num_kv_heads = read.whole("num_key_value_heads", num_heads)
    head_dim = read.whole("head_dim", max(1, hidden // num_heads))
    sizes = _Sizes(hidden, read.whole("intermediate_size"), num_heads * head_dim, num_kv_heads * head_dim)
    norms = family.norm_terms * family.block_norms * hidden
    if family.qk_norm != "none":
        norms += 2 * head_dim if family.qk_norm == "head" else sizes.query + sizes.key_value
    scaled = ("final_logit_softcapping", "logit_scale", "logits_scaling")
    return ModelShape(
        model_type=model_type or "unknown",
        hidden_size=hidden,
        intermediate_size=sizes.ffn,
        num_layers=read.whole("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=read.whole("vocab_size"),
        tied=read.switch("tie_word_embeddings"),
        linears=_attention_linears(family, read, sizes) + _mlp_linears(family, read, sizes),
        num_norm_parameters_per_layer=norms,
        num_final_norm_parameters=family.norm_terms * hidden,
        block_norms=family.block_norms,
        qk_norm=family.qk_norm != "none",
        bent_logits=any(facts.get(key) not in (None, 1, 1.0) for key in scaled),
        exact=model_type in FAMILIES,
    )


@dataclass(frozen=True)
class _Sizes:
    hidden: int
    ffn: int
    query: int
    key_value: int


def _attention_linears(family: Family, read: _Reader, sizes: _Sizes) -> tuple[Linear, ...]:
    out = Linear("self_attn.o_proj", sizes.query, sizes.hidden, read.bias(family.out_bias))
    bias = read.bias(family.qkv_bias)
    if family.fused_qkv:
        return (Linear("self_attn.qkv_proj", sizes.hidden, sizes.query + 2 * sizes.key_value, bias), out)
    widths = (sizes.query, sizes.key_value, sizes.key_value)
    return (
        *(Linear(name, sizes.hidden, width, bias) for name, width in zip(_PROJECTIONS, widths, strict=True)),
        out,
    )


def _mlp_linears(family: Family, read: _Reader, sizes: _Sizes) -> tuple[Linear, ...]:
    hidden, ffn, bias = sizes.hidden, sizes.ffn, read.bias(family.mlp_bias)
    down = Linear("mlp.down_proj", ffn, hidden, bias)
    if family.mlp == "fused":
        return (Linear("mlp.gate_up_proj", hidden, 2 * ffn, bias), down)
    if family.mlp == "plain":
        up_name, down_name = family.mlp_names
        return (Linear(f"mlp.{up_name}", hidden, ffn, bias), Linear(f"mlp.{down_name}", ffn, hidden, bias))
    return (Linear("mlp.gate_proj", hidden, ffn, bias), Linear("mlp.up_proj", hidden, ffn, bias), down)


@dataclass(frozen=True)
class _Reader:
    """Reads keys of a config.json with their class's defaults, and refuses what is no size."""

    facts: Mapping[str, Any]
    defaults: Mapping[str, Any]
    where: str

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.facts[key] if key in self.facts else self.defaults.get(key)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(
                f"the model's config does not say {key}, so its size is unknown",
                where=self.where,
                fix="use a decoder-only language model in transformers' format",
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            what = f"{key} of the model must be a whole number of at least 1, got {value!r}"
            raise ConfigError(what, where=self.where)
        return value

    def switch(self, key: str) -> bool:
        return bool(self.facts.get(key, self.defaults.get(key, False)))

    def bias(self, rule: bool | str) -> bool:
        return self.switch(rule) if isinstance(rule, str) else rule


def adapted_linears(shape: ModelShape, lora: LoraConfig) -> tuple[Linear, ...]:
    """The linear layers of one block that get an adapter; raises ConfigError for a name that no layer has."""
    if lora.targets == "all":
        return shape.linears
    known = {linear.name.rsplit(".", 1)[-1] for linear in shape.linears} | {"lm_head"}
    unknown = [name for name in lora.targets if name.rsplit(".", 1)[-1] not in known]
    if unknown:
        raise ConfigError(
            f"lora.targets names {', '.join(unknown)}, and {shape.model_type} has no linear layer of that name",
            fix=f"choose from {', '.join(sorted(known))}, or write targets: all",
        )
    return tuple(linear for linear in shape.linears if any(_is_named(linear.name, name) for name in lora.targets))


def lora_parameters(shape: ModelShape, lora: LoraConfig) -> int:
    """Trainable parameters of the adapters: rank x (in + out) for every adapted layer."""
    per_layer = sum(lora.rank * (linear.num_in + linear.num_out) for linear in adapted_linears(shape, lora))
    on_head = lora.targets != "all" and "lm_head" in lora.targets
    return shape.num_layers * per_layer + (lora.rank * (shape.hidden_size + shape.vocab_size) if on_head else 0)


def _is_named(path: str, target: str) -> bool:
    """PEFT's rule: a target is a module's whole name, or its end after a dot."""
    return path == target or path.endswith(f".{target}") or target.endswith(f".{path}")


def demo_shape() -> ModelShape:
    """SmolLM2-135M-Instruct, known without unpacking its wheel."""
    return shape_from_config(
        {
            "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
            "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
        }
    )  # fmt: skip
