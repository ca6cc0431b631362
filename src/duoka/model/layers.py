"""The layers that a model is a stack of: what is sharded, recomputed and compiled one by one."""

from __future__ import annotations

from typing import Any

import torch

from duoka.errors import ConfigError


class Absent(torch.nn.Module):
    """Stands where another rank of a pipeline has a module: without weights, it hands on what it is given."""

    def __init__(self, replaced: torch.nn.Module) -> None:
        super().__init__()
        # A model reads plain facts of its layers, such as which kind of attention each has.
        known = vars(self).keys()
        facts = {name: value for name, value in vars(replaced).items() if isinstance(value, (str, int, float))}
        vars(self).update({name: value for name, value in facts.items() if name not in known})

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states


def is_transformer(core: torch.nn.Module) -> bool:
    """True for models of the transformers library that are a stack of layers, or have one that reads text."""
    config: Any = getattr(core, "config", None)
    if not hasattr(core, "get_input_embeddings"):
        return False
    return hasattr(config, "num_hidden_layers") or text_decoder(core) is not None


def text_decoder(core: torch.nn.Module) -> torch.nn.Module | None:
    """What reads text in a model that has more, such as a tower for images; None where there is nothing else, where an
    encoder reads the text, and where no one embedding does (CLIP's two towers)."""
    config: Any = getattr(core, "config", None)
    find_config, find = getattr(config, "get_text_config", None), getattr(core, "get_decoder", None)
    if not callable(find_config) or find_config() is config or not callable(find) or config.is_encoder_decoder:
        return None
    try:
        words, decoder = core.get_input_embeddings(), find()  # type: ignore[operator]
    except (RuntimeError, AttributeError):  # transformers does not know which, or there are two
        return None
    is_part = isinstance(decoder, torch.nn.Module) and decoder is not core
    return decoder if is_part and any(module is words for module in decoder.modules()) else None


def text_modules(core: torch.nn.Module) -> list[torch.nn.Module] | None:
    """That, the embedding and the head."""
    if (decoder := text_decoder(core)) is None:
        return None
    ends = (core.get_input_embeddings(), core.get_output_embeddings())  # type: ignore[operator]
    return [part for part in (decoder, *ends) if part is not None]


def beside_text(core: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The outermost modules with weights that no text reaches: towers for images and sound, and what leads from them
    to the words. They stand beside the decoder; heads stand above both."""
    if (reads_text := text_modules(core)) is None:
        return {}
    read = {id(module) for part in reads_text for module in part.modules()}
    base = core.base_model
    assert isinstance(base, torch.nn.Module)
    found: dict[str, torch.nn.Module] = {}

    def look(module: torch.nn.Module, path: str) -> None:
        for name, child in module.named_children():
            inside = {id(one) for one in child.modules()}
            if inside.isdisjoint(read):
                found.update({f"{path}{name}": child} if any(True for _ in child.parameters()) else {})
            elif id(child) not in read:
                look(child, f"{path}{name}.")

    look(base, next(f"{name}." if name else "" for name, module in core.named_modules() if module is base))
    return found


def skipped_layers(core: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Layers of the decoder that look at images alone, and are left out where a text has none (Llama 3.2 Vision)."""
    if (decoder := text_decoder(core)) is None:
        return {}
    config: Any = core.config
    numbers = getattr(config.get_text_config(), "cross_attention_layers", None) or ()
    (prefix,) = (f"{name}." for name, module in core.named_modules() if module is decoder)
    layers = {f"layers.{number}" for number in numbers}
    return {prefix + name: module for name, module in decoder.named_modules() if name in layers}


def unrecorded(core: torch.nn.Module) -> dict[str, bool]:
    """For a call of a mixture whose config says output_router_logits: without them, and without the loss made of them.

    Nothing here reads either (train/balance.py watches routers itself). Beside the memory they took, transformers hooks
    the routers that a model has at its first call: of a pipeline's later stages none, and that loss fails without any.
    """
    config = core.config.get_text_config()  # type: ignore[union-attr, operator]
    return {"output_router_logits": False} if getattr(config, "output_router_logits", False) else {}


def find_blocks(core: torch.nn.Module) -> list[torch.nn.Module]:
    """The members of lists and sequences of modules, the outermost ones: what a user's own model is a stack of."""
    blocks: list[torch.nn.Module] = []
    for child in core.children():
        is_stack = isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential)) and len(child) > 1
        blocks += [m for m in child if any(True for _ in m.parameters())] if is_stack else find_blocks(child)
    return blocks


def find_layers(core: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks of a transformer that this rank has: of as many modules as the config says there are layers."""
    count = core.config.get_text_config().num_hidden_layers  # type: ignore[union-attr, operator]
    for module in (text_decoder(core) or core).modules():  # a tower for images may have as many
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return [layer for layer in module if not isinstance(layer, Absent)]
    raise ConfigError(
        f"{type(core).__name__} has no list of {count} layers, by which duoka shards a model",
        fix="write:   strategy: ddp",
    )
