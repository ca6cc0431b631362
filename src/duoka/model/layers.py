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
    """True for models of the transformers library that are a stack of layers."""
    config = getattr(core, "config", None)
    return hasattr(core, "get_input_embeddings") and hasattr(config, "num_hidden_layers")


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
    for module in core.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return [layer for layer in module if not isinstance(layer, Absent)]
    raise ConfigError(
        f"{type(core).__name__} has no list of {count} layers, by which duoka shards a model",
        fix="write:   strategy: ddp",
    )
