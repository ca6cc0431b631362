"""Where a new model begins: each tensor from the seed and its name alone, in blocks of rows.

So any rank can draw just the rows that it keeps, and the model is the same at every world size under every strategy.
`shards.py` reads these weights as it reads those of files.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

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


def _std_of(name: str, shape: torch.Size) -> float:
    if name.endswith("embed_tokens.weight"):
        return _EMBEDDING_STD
    if name.endswith("lm_head.weight"):
        return _HEAD_STD
    if name.endswith((".o_proj.weight", ".down_proj.weight")):
        return 0.0
    return float(shape[-1]) ** -0.5


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed} {name} {block}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))
