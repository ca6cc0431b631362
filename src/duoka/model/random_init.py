"""Where a new model begins: each tensor from the seed and its name alone.

So any rank can draw just what it keeps, and the model is the same at every world size under every strategy.
`shards.py` reads these weights as it reads those of files. A model of `model.depth` is drawn in blocks of rows, by
rules of our own; one of `model.from_scratch` a layer at a time, as its architecture's class in transformers does it.
"""

from __future__ import annotations

import copy
import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from duoka.errors import ConfigError
from duoka.hub.new_model import is_of_depth
from duoka.model.box import Box

_BLOCK_NUMBERS = 1 << 16
_EMBEDDING_STD, _HEAD_STD = 1.0, 0.001


@dataclass(frozen=True)
class DrawnWeights:
    """The beginning of a Qwen3-shaped model, for `shards.build_without_memory`.

    Embeddings as wide as a norm would make them; matrices that keep the size of what goes through; what is added to
    the residual stream begins at zero, so that every layer begins as none; a head that thinks all tokens about equal.
    """

    seed: int

    def knows(self, name: str, shape: torch.Size) -> bool:
        return name.endswith((".weight", ".bias"))

    def read(self, name: str, shape: torch.Size, box: Box | None = None) -> torch.Tensor:
        """What lies in `box` of the tensor `name`, by default all of it."""
        box = box or Box.whole(shape)
        std = _std_of(name, shape)
        if len(shape) == 1 or std == 0:
            return torch.zeros(box.sizes) if len(shape) > 1 or name.endswith(".bias") else torch.ones(box.sizes)
        start, stop = box.rows.start, box.rows.stop
        per_block = max(1, _BLOCK_NUMBERS // shape[1])
        out = torch.empty(box.sizes)
        for block in range(start // per_block, -(-stop // per_block)):
            first = block * per_block
            drawn = torch.randn(per_block, shape[1], generator=_generator(self.seed, name, block))
            low, high = max(start, first), min(stop, first + per_block)
            out[low - start : high - start] = drawn[low - first : high - first, box.columns]
        return out.mul_(std)

    def close(self) -> None:
        pass


class InitializedWeights:
    """The beginning that transformers gives a model of this config, for `shards.build_without_memory`.

    What lies in a list of layers is drawn a layer at a time, other modules one by one; the last one stays in memory.
    """

    def __init__(self, config: Any, seed: int) -> None:
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            self._model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self._seed = seed
        first: dict[int, str] = {}
        named = list(self._model.named_parameters(remove_duplicate=False))
        self._names = {name: first.setdefault(id(parameter), name) for name, parameter in named}  # tied ones: the first
        self._drawn: tuple[str, dict[str, torch.Tensor]] = ("", {})

    def knows(self, name: str, shape: torch.Size) -> bool:
        return name in self._names and self._model.get_parameter(name).shape == shape

    def read(self, name: str, shape: torch.Size, box: Box | None = None) -> torch.Tensor:
        """What lies in `box` of the tensor `name`, by default all of it."""
        name = self._names[name]
        owner = _owner_of(name)
        if self._drawn[0] != owner:
            self._drawn = (owner, self._draw(owner))
        whole = self._drawn[1][name.removeprefix(f"{owner}.")]
        return (whole if box is None else whole[box.slices]).clone()

    def _draw(self, owner: str) -> dict[str, torch.Tensor]:
        unit = copy.deepcopy(self._model.get_submodule(owner)).to_empty(device="cpu")
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(_number(f"{self._seed} {owner}"))
            for parameter in unit.parameters():
                parameter.fill_(math.nan)
            unit.apply(self._drawer(owner)._init_weights)
        drawn = dict(unit.named_parameters())
        if unknown := [name for name, parameter in drawn.items() if parameter.isnan().any()]:
            kind = type(self._model).__name__
            raise ConfigError(
                f"model.from_scratch: {kind} does not say how {owner}.{unknown[0]} begins",
                fix="write a model of it yourself, with save_pretrained, and name its folder; or another architecture",
            )
        return drawn

    def _drawer(self, owner: str) -> Any:
        """The model of transformers that `owner` is a part of: the innermost, where one is inside another."""
        parts = owner.split(".")
        around = (self._model.get_submodule(".".join(parts[:count])) for count in range(len(parts), -1, -1))
        return next(module for module in around if hasattr(module, "_init_weights"))

    def close(self) -> None:
        self._drawn = ("", {})


RandomWeights: TypeAlias = DrawnWeights | InitializedWeights


def random_weights(folder: Path, config: Any, seed: int) -> RandomWeights:
    """Of a folder that `hub.new_model` made."""
    return DrawnWeights(seed) if is_of_depth(folder) else InitializedWeights(config, seed)


def _owner_of(name: str) -> str:
    """The layer that a parameter is a part of, `model.layers.3`, or its own module."""
    parts = name.split(".")
    place = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    return ".".join(parts[:-1] if place is None else parts[: place + 1])


def _std_of(name: str, shape: torch.Size) -> float:
    if name.endswith("embed_tokens.weight"):
        return _EMBEDDING_STD
    if name.endswith("lm_head.weight"):
        return _HEAD_STD
    if name.endswith((".o_proj.weight", ".down_proj.weight")):
        return 0.0
    return float(shape[-1]) ** -0.5


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    return torch.Generator().manual_seed(_number(f"{seed} {name} {block}"))


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
