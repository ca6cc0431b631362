"""What of a model is not trained. Called when it has been built, on the meta device too.

Which weights are trained follows from the model's structure and `train_only` alone, so that every rank agrees.
"""

from __future__ import annotations

import torch

from duoka.config.schema import TrainOnlyConfig
from duoka.errors import ConfigError
from duoka.model.layers import skipped_layers, text_decoder, text_modules
from duoka.plan.trained_weights import layer_numbers


def freeze_beside_text(model: torch.nn.Module) -> None:
    """Towers for images and sound: a text has no gradient for them, and they go into the result as they came."""
    if (reads_text := text_modules(model)) is None:
        return
    trained = {id(parameter) for module in reads_text for parameter in module.parameters()}
    for parameter in model.base_model.parameters():  # type: ignore[union-attr, operator]
        if id(parameter) not in trained:
            parameter.requires_grad_(False)
    _freeze_skipped(model)


def _freeze_skipped(model: torch.nn.Module) -> None:
    for layer in skipped_layers(model).values():
        layer.requires_grad_(False)


def apply_train_only(model: torch.nn.Module, chosen: TrainOnlyConfig) -> None:
    """Freeze all of `model` but the layers and modules that `chosen` names."""
    path, layers = find_layers(model)
    numbers = layer_numbers(chosen, len(layers))
    trained = [module for number in numbers for module in _parts_of(layers[number], chosen.modules)]
    outside = {name: module for name, module in model.named_modules() if name and not f"{name}.".startswith(f"{path}.")}
    trained += [module for name in chosen.extra for module in _named(name, outside)]
    model.requires_grad_(False)
    for module in trained:
        module.requires_grad_(True)
    _freeze_skipped(model)


def find_layers(model: torch.nn.Module) -> tuple[str, torch.nn.ModuleList]:
    """The transformer's blocks: the longest list of modules in what reads text, and its name."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)]
    inside = {id(module) for module in (text_decoder(model) or model).modules()}  # a tower may have more layers
    lists = [one for one in lists if id(one[1]) in inside]
    if not lists:
        raise ConfigError(
            "the model has no list of layers, so train_only cannot choose from it", fix="delete train_only"
        )
    return max(lists, key=lambda item: len(item[1]))


def _parts_of(layer: torch.nn.Module, names: str | tuple[str, ...]) -> list[torch.nn.Module]:
    if isinstance(names, str):
        return [layer]
    inside = {name: module for name, module in layer.named_modules() if name}
    return [module for name in names for module in _named(name, inside)]


def _named(wanted: str, modules: dict[str, torch.nn.Module]) -> list[torch.nn.Module]:
    """The modules of that name, or whose name ends in it, that have weights; refused when there is none."""
    found = [
        module
        for name, module in modules.items()
        if (name == wanted or name.endswith(f".{wanted}")) and any(True for _ in module.parameters())
    ]
    if not found:
        known = {name.rsplit(".", 1)[-1] for name, module in modules.items() if any(True for _ in module.parameters())}
        raise ConfigError(
            f"train_only names {wanted}, and there is no such module",
            fix=f"choose from {', '.join(sorted(name for name in known if not name.isdecimal()))}",
        )
    return found
