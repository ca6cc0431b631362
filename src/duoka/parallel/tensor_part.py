"""What a rank has of a parameter that DeepSpeed's AutoTP cut over ranks: a plain tensor with a note on it.

duoka's own tensor axis makes DTensors, which say this themselves. Written by deepspeed_tensor.py; read by whoever asks
for whole shapes: filling, checkpoints, the final folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from duoka.comm.collectives import all_gather, num_ranks
from duoka.model.box import Box

_NOTE = "tensor_part"


@dataclass(frozen=True)
class TensorPart:
    """Equal parts of a tensor of `shape`, cut along `dim` over `group`: this rank's begins at `first`."""

    shape: torch.Size
    dim: int
    first: int
    group: dist.ProcessGroup | None

    @property
    def offset(self) -> tuple[int, ...]:
        return tuple(self.first if dim == self.dim else 0 for dim in range(len(self.shape)))

    @property
    def box(self) -> Box:
        """In the whole tensor."""
        sizes = list(self.shape)
        sizes[self.dim] //= num_ranks(self.group)
        return Box(self.offset, tuple(sizes))


def note_part(parameter: torch.nn.Parameter, part: TensorPart) -> None:
    setattr(parameter, _NOTE, part)


def part_of(tensor: torch.Tensor) -> TensorPart | None:
    """None: ranks have all of it."""
    found: TensorPart | None = getattr(tensor, _NOTE, None)
    return found


def whole_shape(tensor: Any) -> torch.Size:
    """Before any rank cut it: AutoTP, and DeepSpeed's stage 3 after it."""
    part = part_of(tensor)
    return torch.Size(getattr(tensor, "ds_shape", tensor.shape)) if part is None else part.shape


def join_parts(local: torch.Tensor, part: TensorPart) -> torch.Tensor:
    """The whole of what ranks have parts of; all of them call it."""
    sent = local.detach().contiguous()
    parts = all_gather(sent.new_empty(num_ranks(part.group) * sent.numel()), sent.view(-1), part.group)
    return torch.cat(parts.view(-1, *sent.shape).unbind(), part.dim)
