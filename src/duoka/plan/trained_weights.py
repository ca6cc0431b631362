"""How many weights a run with `train_only` trains, from the model's shape; model/freeze.py freezes by the same rule."""

from __future__ import annotations

from collections.abc import Iterable

from duoka.config.schema import TrainOnlyConfig
from duoka.errors import ConfigError
from duoka.plan.shape import ModelShape

# What the families of the plan's table call what lies outside their layers, and the norms inside.
_TOKENS = {"embed_tokens", "wte"}
_POSITIONS = {"embed_positions", "wpe"}
_HEAD = {"lm_head"}
_LAST_NORM = {"norm", "ln_f", "final_layer_norm", "final_layernorm"}
_STREAM_NORMS = {
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    "ln_1", "ln_2", "self_attn_layer_norm", "final_layer_norm",
}  # fmt: skip


def layer_numbers(chosen: TrainOnlyConfig, num_layers: int) -> list[int]:
    """The numbers, from 0, of the layers that are trained in a model of `num_layers`."""
    asked = chosen.layers
    if isinstance(asked, tuple):
        too_high = [number for number in asked if number >= num_layers]
        if too_high:
            raise ConfigError(
                f"train_only.layers names layer {too_high[0]}, and the model has layers 0 to {num_layers - 1}",
                fix=f"write for example:   layers: [{num_layers - 1}]",
            )
        return sorted(set(asked))
    if abs(asked) > num_layers:
        raise ConfigError(
            f"train_only.layers is {asked}, and the model has {num_layers} layers", fix=f"write:   layers: {num_layers}"
        )
    if chosen.spread and asked:
        if num_layers % asked:
            raise ConfigError(
                f"train_only.layers is {asked}, which does not divide the model's {num_layers} layers evenly",
                fix="name them:   layers: [3, 7]   without spread",
            )
        every = num_layers // asked
        return list(range(every - 1, num_layers, every))
    return list(range(num_layers - asked, num_layers)) if asked > 0 else list(range(-asked))


def _extra_names(chosen: TrainOnlyConfig) -> set[str]:
    return {name.rsplit(".", 1)[-1] for name in chosen.extra}


def trains_head(shape: ModelShape, chosen: TrainOnlyConfig) -> bool:
    """Under its own name, or under the embedding's that it is tied to."""
    return bool(_extra_names(chosen) & (_HEAD | (_TOKENS if shape.tied else set())))


def trains_embedding(shape: ModelShape, chosen: TrainOnlyConfig) -> bool:
    """Under its own name, or under the head's that is tied to it."""
    return bool(_extra_names(chosen) & (_TOKENS | (_HEAD if shape.tied else set())))


def layers_passed(shape: ModelShape, chosen: TrainOnlyConfig) -> int:
    """How many layers the backward pass goes through: from the last one down to the first that has something to learn.

    What lies below it gets no gradients, keeps no activations, and is computed forward only.
    """
    if _extra_names(chosen) & (_TOKENS | _POSITIONS) or (shape.tied and trains_head(shape, chosen)):
        return shape.num_layers
    return shape.num_layers - min(layer_numbers(chosen, shape.num_layers), default=shape.num_layers)


def is_trained(name: str, chosen: TrainOnlyConfig) -> bool:
    """Whether a trained layer's module of that name learns: under its own name, or under that of one around it."""
    if chosen.modules == "all":
        return True
    parts = name.split(".")
    around = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return any(one == wanted or one.endswith(f".{wanted}") for one in around for wanted in chosen.modules)


def trained_parameters(shape: ModelShape, chosen: TrainOnlyConfig) -> int:
    """Parameters of the chosen layers and modules."""
    inside = trained_in_layers(shape, chosen, range(shape.num_layers))
    return inside + trained_at_ends(shape, chosen, has_input=True, has_output=True)


def trained_in_layers(shape: ModelShape, chosen: TrainOnlyConfig, numbers: Iterable[int]) -> int:
    """Parameters of those layers that are trained."""
    trained = set(layer_numbers(chosen, shape.num_layers)).intersection(numbers)
    mixed = sum(shape.has_experts(number) for number in trained)
    return mixed * _of_layer(shape, chosen, True) + (len(trained) - mixed) * _of_layer(shape, chosen, False)


def _of_layer(shape: ModelShape, chosen: TrainOnlyConfig, mixed: bool) -> int:
    if isinstance(chosen.modules, str):
        return shape.num_per_layer if mixed else shape.num_per_dense_layer
    linears = shape.linears if mixed else shape.dense_linears or shape.linears
    total = sum(one.num_parameters for one in linears if is_trained(one.name, chosen))
    if mixed and shape.experts is not None:
        own = shape.experts.num_experts * shape.experts.num_parameters_each
        total += own if is_trained("mlp.experts", chosen) else 0
        total += shape.experts.num_router if is_trained("mlp.gate", chosen) else 0
    return total + _of_norms(shape, chosen)


def _of_norms(shape: ModelShape, chosen: TrainOnlyConfig) -> int:
    """What belongs to no matrix: norms of the stream by their names, those of queries and keys with attention."""
    names = {name.rsplit(".", 1)[-1] for name in chosen.modules}
    one = shape.num_final_norm_parameters
    beside = shape.num_norm_parameters_per_layer - shape.block_norms * one
    around = shape.linears[0].name.split(".")[0]
    if names & {around}:
        return beside + one * len(names & _STREAM_NORMS)
    # As many of each: a norm over one head, or over a projection.
    widths = {"q_norm": shape.num_heads, "k_norm": shape.num_kv_heads}
    whole = shape.qk_norm and beside == shape.q_size + shape.kv_size
    own = {name: size * shape.head_dim if whole else beside // 2 for name, size in widths.items() if shape.qk_norm}
    return one * len(names & _STREAM_NORMS) + sum(own.get(name, 0) for name in names)


def trained_at_ends(shape: ModelShape, chosen: TrainOnlyConfig, *, has_input: bool, has_output: bool) -> int:
    """Parameters outside the layers that are trained, of a rank that has the embedding, the head, or both."""
    names = _extra_names(chosen)
    total = 0
    words = bool(names & _TOKENS)
    if has_input:
        total += shape.vocab_size * shape.hidden_size * (words or (shape.tied and bool(names & _HEAD)))
        total += shape.num_positions * shape.hidden_size * bool(names & _POSITIONS)
    if has_output:
        # A tied head is the embedding, or a copy of it where that lies elsewhere.
        own = not (shape.tied and has_input) and trains_head(shape, chosen)
        total += shape.vocab_size * shape.hidden_size * own + shape.num_head_bias * bool(names & _HEAD)
        total += shape.num_final_norm_parameters * bool(names & _LAST_NORM)
    return total


def trains_words(shape: ModelShape, chosen: TrainOnlyConfig) -> bool:
    """Whether the embedding learns."""
    return trained_at_ends(shape, chosen, has_input=True, has_output=False) >= shape.vocab_size * shape.hidden_size
