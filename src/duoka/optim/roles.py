"""What a parameter is for in a transformer, which decides its learning rate and, under Muon, its optimizer.

The roles: `matrix` (two dimensions, inside a layer), `embedding`, `head` (of its own), `vector` (norms, biases and all
else). Found by where a parameter hangs in the model; by its name only what is shaped like a matrix and is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

import torch

Role = Literal["matrix", "embedding", "head", "vector"]
# One vector for each expert or head, in one tensor: experts' biases, norms of heads, Mamba's A. They multiply nothing.
_ROWS_OF_VECTORS = re.compile(r"(^|[._])(bias|scale|A_log)$|(^|[._]|layer|rms)norm\d*\.\w+$", re.IGNORECASE)


def assign_roles(model: torch.nn.Module, core: torch.nn.Module, layers: Iterable[torch.nn.Module]) -> dict[str, Role]:
    """The role of every parameter of `model` by name; `core` is the transformer in it, `layers` are its blocks."""
    inside = {id(p) for layer in layers for p in layer.parameters()}
    embedding = _parameters_of(core, "get_input_embeddings")
    head = _parameters_of(core, "get_output_embeddings") - embedding
    roles: dict[str, Role] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) in embedding:
            roles[name] = "embedding"
        elif id(parameter) in head:
            roles[name] = "head" if parameter.ndim >= 2 else "vector"
        else:
            is_matrix = parameter.ndim == 2 and decays(name, parameter) and id(parameter) in inside
            roles[name] = "matrix" if is_matrix else "vector"
    return roles


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay is for it: for what multiplies, and not for norms and biases, however many lie together."""
    return parameter.ndim >= 2 and _ROWS_OF_VECTORS.search(name) is None


def _parameters_of(core: torch.nn.Module, getter: str) -> set[int]:
    find = getattr(core, getter, None)
    module = find() if callable(find) else None
    return {id(p) for p in module.parameters()} if isinstance(module, torch.nn.Module) else set()
