"""ZeRO++'s gradients in 4 bits: DeepSpeed's kernel reads any tensor's bytes as fp16, whatever they are.

Under duoka gradients are fp32, or bf16: between nodes, where it packs them, they would become noise without a word. So
it is given fp16 ones, and what comes back has the type that was there. Seen in its source; no GPU has run this yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Reduce = Callable[[list[torch.Tensor], Any], list[torch.Tensor]]

# Gradients of small numbers keep their bits in fp16, whose smallest is 6e-8; one of 256 would be too large.
SCALE = 256.0


def pack_as_half() -> None:
    """From now on, once for this process."""
    from deepspeed.runtime.zero import stage3

    if not isinstance(stage3.all_to_all_quant_reduce, AsHalf):
        stage3.all_to_all_quant_reduce = AsHalf(stage3.all_to_all_quant_reduce)


class AsHalf:
    """DeepSpeed's exchange around which tensors are fp16. Vectors it sends as they are, and they stay as they are."""

    def __init__(self, reduce: Reduce) -> None:
        self._reduce = reduce

    def __call__(self, tensors: list[torch.Tensor], groups: Any) -> list[torch.Tensor]:
        given = [one.mul(SCALE).half() if one.dim() > 1 else one for one in tensors]
        answers = self._reduce(given, groups)
        return [
            answer.to(one.dtype).div_(SCALE) if one.dim() > 1 else answer
            for one, answer in zip(tensors, answers, strict=True)
        ]
