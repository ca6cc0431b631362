"""How many weights a run with `train_only` trains, from the model's shape; model/freeze.py freezes by the same rule."""

from __future__ import annotations

from duoka.config.schema import TrainOnlyConfig
from duoka.errors import ConfigError
from duoka.plan.shape import ModelShape


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
    return bool(_extra_names(chosen) & {"lm_head", *(("embed_tokens",) if shape.tied else ())})


def layers_passed(shape: ModelShape, chosen: TrainOnlyConfig) -> int:
    """How many layers the backward pass goes through: from the last one down to the first that has something to learn.

    What lies below it gets no gradients, keeps no activations, and is computed forward only.
    """
    if "embed_tokens" in _extra_names(chosen) or (shape.tied and trains_head(shape, chosen)):
        return shape.num_layers
    return shape.num_layers - min(layer_numbers(chosen, shape.num_layers), default=shape.num_layers)


def trained_parameters(shape: ModelShape, chosen: TrainOnlyConfig) -> int:
    """Parameters of the chosen layers and modules. Norms inside layers count only when whole layers are trained."""
    per_layer = shape.num_per_layer
    if isinstance(chosen.modules, tuple):
        per_layer = sum(
            linear.num_parameters for linear in shape.linears if set(linear.name.split(".")) & set(chosen.modules)
        )
    outside = {
        "embed_tokens": shape.num_embedding,
        "lm_head": shape.num_embedding,
        "norm": shape.num_final_norm_parameters,
    }
    names = _extra_names(chosen)
    if shape.tied and {"embed_tokens", "lm_head"} <= names:
        names.discard("lm_head")  # one tensor under two names
    extra = sum(outside.get(name, 0) for name in names)
    return len(layer_numbers(chosen, shape.num_layers)) * per_layer + extra
