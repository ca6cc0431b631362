"""A model's parameters, counted from its config.json alone: exactly what transformers would build.

`ModelShape` (sizes.py) is what all estimates start from. A model type that is not in the table of families is counted
like a Llama and marked `exact=False`. Reads one small JSON file, and never builds a model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from duoka.config.derive import derive
from duoka.config.schema import DataConfig, DataSource, LoraConfig, ModelConfig, RunConfig
from duoka.errors import ConfigError
from duoka.plan.families import EXPERT_COUNTS, ExpertKeys, Family
from duoka.plan.find_family import find_family, guess_family, is_usual, parts_of, with_usual_names
from duoka.plan.in_files import as_in_files
from duoka.plan.sizes import Experts, Linear, ModelShape

__all__ = [
    "ASSUMED",
    "DEMO_FACTS",
    "Linear",
    "ModelShape",
    "adapted_linears",
    "demo_shape",
    "facts_from_depth",
    "facts_from_parameters",
    "facts_of_new",
    "lora_parameters",
    "read_facts",
    "read_shape",
    "shape_from_config",
    "shape_from_depth",
    "shape_from_parameters",
]

PACKERS = ("bitsandbytes", "gptq", "awq")  # transformers keeps such weights packed, and others can be laid out
_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def read_shape(folder: Path) -> ModelShape:
    """The shape of the model in a transformers folder."""
    facts = read_facts(folder)
    return as_in_files(shape_from_config(facts, where=str(folder / "config.json")), folder, facts)


def read_facts(folder: Path) -> dict[str, Any]:
    """The config.json of a transformers folder."""
    path = folder / "config.json"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}", fix="copy the model again") from None
    if not isinstance(facts, dict):
        raise ConfigError(f"{path} holds no object", fix="copy the model again")
    return facts


def shape_from_config(facts: Mapping[str, Any], where: str = "config.json") -> ModelShape:
    """The shape that a transformers config describes; a missing key means the config class's default."""
    how = facts.get("quantization_config")
    packing = how if isinstance(how, dict) and how.get("quant_method") in PACKERS else None
    if isinstance(facts.get("text_config"), dict):
        tied = {key: facts[key] for key in ("tie_word_embeddings",) if key in facts}  # what it says is for the whole
        facts = {"model_type": f"{facts.get('model_type', '')}_text", **facts["text_config"], **tied}
    facts = with_usual_names(facts)
    model_type = str(facts.get("model_type", ""))
    known = find_family(facts)
    family = known or guess_family(facts)
    read = _Reader(facts, family.defaults, where)
    sizes = _read_sizes(family, read)
    layers = read.whole("num_hidden_layers")
    scaled = ("final_logit_softcapping", "logit_scale", "logits_scaling")
    attention, more = _attention_linears(family, read, sizes), family.more_positions
    window, num_window_layers = _windows(family, read, layers)
    shape = ModelShape(
        model_type=model_type or "unknown",
        hidden_size=sizes.hidden,
        intermediate_size=sizes.ffn,
        num_layers=layers,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        vocab_size=read.whole("vocab_size"),
        tied=read.switch("tie_word_embeddings"),
        linears=attention + _mlp_linears(family, read, sizes.hidden, sizes.ffn),
        num_norm_parameters_per_layer=_layer_norms(family, read, sizes),
        num_final_norm_parameters=family.norm_terms * sizes.hidden * (1 + family.entry_norm),
        block_norms=family.block_norms,
        qk_norm=_qk_norm(family, read) != "none",
        gated=family.mlp != "plain",
        bent_logits=any(facts.get(key) not in (None, 1, 1.0) for key in scaled),
        exact=known is not None and is_usual(facts, sizes.hidden),
        num_positions=0 if more is None else read.whole("max_position_embeddings") + more,
        num_head_bias=read.whole("vocab_size") if read.bias(family.head_bias) else 0,
        window=window,
        num_window_layers=num_window_layers,
        packed_by="" if packing is None else str(packing["quant_method"]),
        parts=parts_of(family, facts),
        packed_bits=0 if packing is None else 8 if packing.get("load_in_8bit") or packing.get("bits") == 8 else 4,
    )
    return shape if family.experts is None else _with_experts(shape, family, read, attention)


@dataclass(frozen=True)
class _Sizes:
    hidden: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def query(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def key_value(self) -> int:
        return self.num_kv_heads * self.head_dim


def _read_sizes(family: Family, read: _Reader) -> _Sizes:
    hidden, num_heads = read.whole("hidden_size"), read.whole("num_attention_heads")
    head_dim = read.whole("v_head_dim" if family.latent else "head_dim", max(1, hidden // num_heads))
    num_kv_heads = num_heads if family.latent else read.whole("num_key_value_heads", num_heads)
    ffn = read.whole(family.ffn, family.ffn_times * hidden or None)
    return _Sizes(hidden, ffn, num_heads, num_kv_heads, head_dim)


def _qk_norm(family: Family, read: _Reader) -> str:
    if family.qk_norm == "asked":
        return "head" if read.switch("use_qk_norm") else "none"
    return family.qk_norm


def _layer_norms(family: Family, read: _Reader, sizes: _Sizes) -> int:
    """Parameters of one layer that belong to no matrix: norms, and what sits beside the scores."""
    total = family.norm_terms * family.block_norms * sizes.hidden + family.num_sinks * sizes.num_heads
    kind = _qk_norm(family, read)
    if kind != "none":
        total += 2 * sizes.head_dim if kind == "head" else sizes.query + sizes.key_value
    if family.latent:
        total += read.whole("kv_lora_rank") + (read.whole("q_lora_rank") if read.has("q_lora_rank") else 0)
    return total


def _windows(family: Family, read: _Reader, layers: int) -> tuple[int, int]:
    """(how far back, in how many layers); (0, 0) where every layer sees everything."""
    rule = family.windows
    if rule == "asked" and not read.switch("use_sliding_window"):
        return 0, 0
    if rule == "none" or not read.has("sliding_window"):
        return 0, 0
    window, types = read.whole("sliding_window"), read.facts.get("layer_types")
    if isinstance(types, list):
        return window, sum(kind == "sliding_attention" for kind in types)
    if rule == "asked":
        first = read.facts.get("max_window_layers", read.defaults.get("max_window_layers", 0))
        return window, max(0, layers - int(first))
    if rule == "all":
        return window, layers
    every = int(read.facts.get("sliding_window_pattern") or rule)
    return window, layers - layers // every


def _attention_linears(family: Family, read: _Reader, sizes: _Sizes) -> tuple[Linear, ...]:
    fused_name, out_name = family.attention_names
    out = Linear(out_name, sizes.query, sizes.hidden, read.bias(family.out_bias))
    bias = read.bias(family.qkv_bias)
    if family.latent:
        return (*_latent_linears(read, sizes, bias), out)
    if family.fused_qkv:
        return (Linear(fused_name, sizes.hidden, sizes.query + 2 * sizes.key_value, bias), out)
    widths = (sizes.query, sizes.key_value, sizes.key_value)
    return (
        *(Linear(name, sizes.hidden, width, bias) for name, width in zip(_PROJECTIONS, widths, strict=True)),
        out,
    )


def _latent_linears(read: _Reader, sizes: _Sizes, bias: bool) -> tuple[Linear, ...]:
    """Queries, keys and values through a narrow middle; part of each key carries the position."""
    rotary, plain, rank = read.whole("qk_rope_head_dim"), read.whole("qk_nope_head_dim"), read.whole("kv_lora_rank")
    queries = sizes.num_heads * (rotary + plain)
    down = Linear("self_attn.kv_a_proj_with_mqa", sizes.hidden, rank + rotary, bias)
    up = Linear("self_attn.kv_b_proj", rank, sizes.num_heads * (plain + sizes.head_dim))
    if not read.has("q_lora_rank"):
        return (Linear("self_attn.q_proj", sizes.hidden, queries), down, up)
    narrow = read.whole("q_lora_rank")
    first = Linear("self_attn.q_a_proj", sizes.hidden, narrow, bias)
    return (first, Linear("self_attn.q_b_proj", narrow, queries), down, up)


def _mlp_linears(family: Family, read: _Reader, hidden: int, ffn: int, prefix: str = "mlp") -> tuple[Linear, ...]:
    bias = read.bias(family.mlp_bias)
    down = Linear(f"{prefix}.down_proj", ffn, hidden, bias)
    if family.mlp == "fused":
        return (Linear(f"{prefix}.gate_up_proj", hidden, 2 * ffn, bias), down)
    if family.mlp == "plain":
        up_name, down_name = family.mlp_names
        return (Linear(f"{prefix}.{up_name}", hidden, ffn, bias), Linear(f"{prefix}.{down_name}", ffn, hidden, bias))
    return (Linear(f"{prefix}.gate_proj", hidden, ffn, bias), Linear(f"{prefix}.up_proj", hidden, ffn, bias), down)


def _with_experts(shape: ModelShape, family: Family, read: _Reader, attention: tuple[Linear, ...]) -> ModelShape:
    """`shape` is as if every layer were dense."""
    keys = family.experts
    assert keys is not None
    hidden, size, active = shape.hidden_size, read.whole(keys.size), read.whole("num_experts_per_tok")
    # transformers maps the names of each family to one, and writes that one for some.
    named = next((key for key in (keys.count, *EXPERT_COUNTS) if read.facts.get(key)), keys.count)
    count, numbers = read.whole(named), _expert_layers(keys, read, shape.num_layers)
    shared = 0
    if keys.shared == "size":
        shared = read.whole("shared_expert_intermediate_size")
    elif keys.shared == "count":
        shared = size * read.count("n_shared_experts")
    prefix = "mlp.shared_expert" + ("s" if keys.shared == "count" else "")
    linears = attention + (_mlp_linears(family, read, hidden, shared, prefix) if shared else ())
    linears += (Linear("mlp.shared_expert_gate", hidden, 1),) if keys.shared_gate else ()
    each = 3 * hidden * size + (2 * size + hidden if keys.bias else 0)
    router = count * (hidden + keys.bias + keys.correction)
    experts = Experts(
        count, min(active, count), len(numbers), each, router, tuple(numbers), keys.adapted, keys.wide_router
    )
    return replace(
        shape,
        linears=linears,
        intermediate_size=experts.num_active * size + shared,
        experts=experts,
        dense_linears=shape.linears if len(numbers) < shape.num_layers else (),
    )


def _expert_layers(keys: ExpertKeys, read: _Reader, layers: int) -> list[int]:
    """The numbers of the layers that have experts."""
    if keys.dense == "first":
        return list(range(layers))[read.count("first_k_dense_replace") :]
    if keys.dense == "interval":
        last = read.facts.get("moe_layer_end_index", -1)
        inside = range(read.count("moe_layer_start_index"), layers if last == -1 else min(layers, last + 1))
        return [index for index in inside if (index + 1) % int(read.facts.get("moe_layer_interval") or 1) == 0]
    if keys.dense == "step":
        step, plain = read.facts.get("decoder_sparse_step") or 1, read.facts.get("mlp_only_layers") or ()
        return [index for index in range(layers) if index not in plain and (index + 1) % int(step) == 0]
    return list(range(layers))


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

    def has(self, key: str) -> bool:
        return self.facts.get(key, self.defaults.get(key)) is not None

    def count(self, key: str) -> int:
        """A number that may be 0."""
        value = self.facts.get(key, self.defaults.get(key)) or 0
        return self.whole(key) if value else 0

    def switch(self, key: str) -> bool:
        return bool(self.facts.get(key, self.defaults.get(key, False)))

    def bias(self, rule: bool | str) -> bool:
        return self.switch(rule) if isinstance(rule, str) else rule


def adapted_linears(shape: ModelShape, lora: LoraConfig) -> tuple[Linear, ...]:
    """The linear layers of one block that get an adapter; raises ConfigError for a name that no layer has."""
    everything = shape.linears + shape.dense_linears
    if lora.targets == "all":
        return shape.linears
    known = {linear.name.rsplit(".", 1)[-1] for linear in everything} | {"lm_head"}
    unknown = [name for name in lora.targets if name.rsplit(".", 1)[-1] not in known]
    if unknown and not shape.exact:  # in no table: the model itself tells whether it has them
        return _named(shape.linears, lora) + tuple(Linear(one, shape.hidden_size, shape.hidden_size) for one in unknown)
    if unknown:
        raise ConfigError(
            f"lora.targets names {', '.join(unknown)}, and {shape.model_type} has no linear layer of that name",
            fix=f"choose from {', '.join(sorted(known))}, or write targets: all",
        )
    return _named(shape.linears, lora)


def _named(linears: tuple[Linear, ...], lora: LoraConfig) -> tuple[Linear, ...]:
    if lora.targets == "all":
        return linears
    return tuple(linear for linear in linears if any(_is_named(linear.name, name) for name in lora.targets))


def lora_parameters(shape: ModelShape, lora: LoraConfig) -> int:
    """Trainable parameters of the adapters: rank x (in + out) for every adapted layer."""

    def per_layer(linears: tuple[Linear, ...]) -> int:
        return sum(lora.rank * (linear.num_in + linear.num_out) for linear in linears)

    linears = adapted_linears(shape, lora)
    on_head = lora.targets != "all" and "lm_head" in lora.targets
    head = lora.rank * (shape.hidden_size + shape.vocab_size) if on_head else 0
    if (experts := shape.num_expert_adapters(lora.targets)) is not None:
        attention = tuple(one for one in linears if not one.name.startswith("mlp."))
        return shape.num_layers * per_layer(attention) + lora.rank * experts + head
    num_dense = shape.num_dense_layers if shape.dense_linears else 0
    total = (shape.num_layers - num_dense) * per_layer(linears)
    return total + num_dense * per_layer(_named(shape.dense_linears, lora)) + head


def _is_named(path: str, target: str) -> bool:
    """PEFT's rule: a target is a module's whole name, or its end after a dot."""
    return path == target or path.endswith(f".{target}") or target.endswith(f".{path}")


# SmolLM2-135M-Instruct, known without unpacking its wheel.
DEMO_FACTS: Mapping[str, Any] = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip


def demo_shape() -> ModelShape:
    return shape_from_config(DEMO_FACTS)


ASSUMED = "a Llama of about that size"  # the type of a model of which only the number of parameters is known


def facts_of_new(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """The config.json of a new model: Qwen3-shaped, in the sizes that follow from `model.depth` or were written."""
    width, head_dim = model.width or 0, model.head_dim or 1
    return {
        "model_type": "qwen3", "hidden_size": width, "intermediate_size": model.mlp_width,
        "num_hidden_layers": model.depth, "num_attention_heads": width // head_dim,
        "num_key_value_heads": model.kv_heads, "head_dim": head_dim, "vocab_size": vocab_size,
        "tie_word_embeddings": False,
    }  # fmt: skip


def facts_from_depth(depth: int, vocab_size: int) -> dict[str, Any]:
    """The config.json of a new model of which only the depth is said."""
    asked = RunConfig(model=ModelConfig(depth=depth), data=DataConfig(train=(DataSource(name="identity"),)))
    return facts_of_new(derive(asked, ())[0].model, vocab_size)


def shape_from_depth(depth: int, vocab_size: int = 65536) -> ModelShape:
    return shape_from_config(facts_from_depth(depth, vocab_size), where=f"depth {depth}")


def facts_from_parameters(count: float, vocab_size: int = 32000) -> dict[str, Any]:
    """The config.json of a Llama of about that many parameters: for a first question, before there is a model.

    Layers are as many as width / 128, which is how public models from 1B to 70B are cut; the feed-forward width is
    what is left of the count.
    """
    grain = 1024 if count > 5e8 else 128  # heads that 2, 4 or 8 can share
    hidden = max(grain, grain * round((count * 128 / 12) ** (1 / 3) / grain))
    layers = max(1, round((count - 2 * vocab_size * hidden) / (12 * hidden**2)))
    tied = 2 * vocab_size * hidden > count / 3
    rest = count - (1 if tied else 2) * vocab_size * hidden - layers * 4 * hidden**2
    if rest < layers * 3 * hidden:
        hidden, tied = max(64, hidden // 2), True
        rest = count - vocab_size * hidden - layers * 4 * hidden**2
    return {
        "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers,
        "intermediate_size": max(1, round(rest / (3 * hidden * layers))),
        "num_attention_heads": max(1, hidden // 128), "vocab_size": vocab_size, "tie_word_embeddings": tied,
    }  # fmt: skip


def shape_from_parameters(count: float, vocab_size: int = 32000) -> ModelShape:
    """Never exact: only its number of parameters is known."""
    shape = shape_from_config(facts_from_parameters(count, vocab_size))
    return replace(shape, exact=False, model_type=ASSUMED)
