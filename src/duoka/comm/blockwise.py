"""Collectives of numbers in 8 or 4 bits: blocks of neighbors share a scale, and a block's error is its largest / 254.

(Of 4 bits, / 14.) After ZeRO++ (Wang et al., 2023). Each rank's part is packed by itself, so that the same values
travel as the same bytes whoever gathers them. What is not finite stays so: it makes its whole block NaN.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from duoka.comm.collectives import TimedWork, bytes_of, gather_into, num_ranks
from duoka.comm.ledger import LEDGER
from duoka.plan.traffic import PACKED_BLOCKS

_SCALE_BYTES = 4
_LEVELS = {8: 127, 4: 7}
_BIASED = 8  # 4-bit numbers are stored from 1 to 15


@functools.cache
def _kernels() -> ModuleType | None:
    """Of GPUs; none without Triton, where torch's own operators do it."""
    try:
        from duoka.comm import blockwise_triton
    except ImportError:
        return None
    return blockwise_triton


def packed_bytes(count: int, bits: int) -> int:
    """Of `count` numbers, the last block filled up."""
    block = PACKED_BLOCKS[bits]
    return -(-count // block) * (block * bits // 8 + _SCALE_BYTES)


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of numbers as rows of bytes: numbers in whole blocks, then the blocks' scales."""
    (rows, count), block = values.shape, PACKED_BLOCKS[bits]
    if values.is_cuda and (kernels := _kernels()) is not None:
        return kernels.pack(values, bits, block)
    whole = -(-count // block) * block
    blocks = values.new_zeros((rows, whole), dtype=torch.float32)
    blocks[:, :count] = values
    blocks = blocks.view(rows, -1, block)
    scales = blocks.abs().amax(-1, keepdim=True).div_(_LEVELS[bits])
    # A block of zeros has scale 0, and 0 / 0 is no number.
    numbers = blocks.div_(torch.where(scales == 0, 1.0, scales)).round_().nan_to_num_(0.0).to(torch.int8)
    if bits == 4:
        pairs = (numbers + _BIASED).view(torch.uint8).view(rows, -1, 2)
        numbers = pairs[..., 0] | (pairs[..., 1] << 4)
    return torch.cat((numbers.reshape(rows, -1).view(torch.uint8), scales.view(rows, -1).view(torch.uint8)), dim=1)


def unpack(packed: torch.Tensor, out: torch.Tensor, bits: int) -> torch.Tensor:
    """The numbers of `pack`, into rows of any type."""
    (rows, count), block = out.shape, PACKED_BLOCKS[bits]
    if out.is_cuda and (kernels := _kernels()) is not None:
        return kernels.unpack(packed, out, bits, block)
    num_blocks = -(-count // block)
    size = num_blocks * block * bits // 8
    numbers, scales = packed[:, :size], packed[:, size:].contiguous().view(torch.float32)
    if bits == 4:
        pairs = torch.stack((numbers & 15, numbers >> 4), dim=-1)
        signed = pairs.view(rows, num_blocks, block).float() - _BIASED
    else:
        signed = numbers.view(torch.int8).reshape(rows, num_blocks, block).float()
    return out.copy_(signed.mul_(scales.unsqueeze(-1)).view(rows, -1)[:, :count])


class PackedGather(dist.Work):
    """Shards under way as bytes; `wait` fills `whole`, this rank's own part too, so that all ranks have the same."""

    def __init__(self, work: dist.Work | None, packed: torch.Tensor, whole: torch.Tensor, bits: int) -> None:
        super().__init__()
        self._work, self._packed, self._whole, self._bits = work, packed, whole, bits

    def wait(self, timeout: Any = None) -> bool:  # type: ignore[override]
        if self._work is not None:
            self._work.wait()
        for own, part in zip(self._packed, self._whole.view(len(self._packed), -1), strict=True):
            unpack(own[None], part[None], self._bits)
        return True

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()


def start_packed_gather(
    whole: torch.Tensor, shard: torch.Tensor, bits: int, group: dist.ProcessGroup | None, *, may_overlap: bool
) -> PackedGather:
    """Begin to fill `whole` with every rank's `shard`; without overlap, all of it is on the current stream."""
    own = pack(shard.reshape(1, -1), bits)
    packed = own.new_empty((num_ranks(group), own.shape[1]))
    LEDGER.note("all-gather", bytes_of(packed), num_ranks(group))
    done = LEDGER.begin() if may_overlap else None
    work = gather_into(packed.view(-1), own.view(-1), group=group, async_op=may_overlap)
    return PackedGather(TimedWork(work, done) if may_overlap else None, packed, whole, bits)


@dataclass(frozen=True)
class Nodes:
    """Ranks by node, neighbors together: the group inside this rank's node, and that of its likes on the others."""

    inside: dist.ProcessGroup | None
    across: dist.ProcessGroup | None
    num_inside: int
    num_nodes: int


def reduce_scatter_packed(
    shard: torch.Tensor, whole: torch.Tensor, bits: int, group: dist.ProcessGroup | None, nodes: Nodes | None = None
) -> torch.Tensor:
    """Fill `shard` with this rank's part of the sum of every rank's `whole`, sent packed and added in fp32.

    With `nodes`, sums are made inside each node first: between nodes travels one packed part per rank and node.
    """
    if nodes is None:
        return shard.copy_(_sum_parts(whole.view(num_ranks(group), -1), bits, group))
    # By node and place in it; a rank adds up, for its place on every node, what its own node has.
    parts = whole.view(nodes.num_nodes, nodes.num_inside, -1).transpose(0, 1)
    inside = _sum_parts(parts.reshape(nodes.num_inside, -1), bits, nodes.inside, num_rows=nodes.num_nodes)
    return shard.copy_(_sum_parts(inside.view(nodes.num_nodes, -1), bits, nodes.across))


def _sum_parts(parts: torch.Tensor, bits: int, group: dist.ProcessGroup | None, num_rows: int = 1) -> torch.Tensor:
    """Row i goes to rank i of the group, as `num_rows` that are packed apart; returns the sum of what came, in fp32.

    A rank's own row is added as it is: it does not travel.
    """
    size, rank = num_ranks(group), dist.get_rank(group)
    length = parts.shape[1] // num_rows
    packed = pack(parts.reshape(size * num_rows, length), bits)
    received = torch.empty_like(packed)
    LEDGER.note("reduce-scatter", bytes_of(packed), size)
    with LEDGER.waiting():
        dist.all_to_all_single(received, packed, group=group)
    total, buffer = parts.new_zeros(parts.shape[1], dtype=torch.float32), torch.empty(0)
    for place, rows in enumerate(received.view(size, num_rows, -1)):  # in the order of ranks: the same sum always
        if place == rank:
            total += parts[place]
            continue
        buffer = total.new_empty((num_rows, length)) if not buffer.numel() else buffer
        total += unpack(rows, buffer, bits).view(-1)
    return total


def error_bound(values: torch.Tensor, bits: int) -> torch.Tensor:
    """How far each number may come out from what went in: half a step of its block's scale."""
    count, block = values.numel(), PACKED_BLOCKS[bits]
    blocks = torch.nn.functional.pad(values.reshape(-1).float(), (0, -count % block)).view(-1, block)
    steps = blocks.abs().amax(-1, keepdim=True) / _LEVELS[bits]
    return (0.5 * steps * (1 + math.ldexp(1, -20))).expand_as(blocks).reshape(-1)[:count]
