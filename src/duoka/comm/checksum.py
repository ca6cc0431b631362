"""One number per tensor that its bits decide, computed where the tensor lies: what compares replicas.

A GPU's memory is read at a GPU's speed, and 8 bytes per tensor come to the host. Values are compared as bits: -0.0 is
not 0.0, and a NaN equals itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

# Elements at a time: what it takes beside the tensors stays small, for it runs where memory is full.
CHUNK_LENGTH = 1 << 20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Each tensor's number; of sharded ones, that of this rank's part."""
    weights: dict[torch.device, torch.Tensor] = {}
    sums: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        local = tensor.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        if local.device not in weights:
            weights[local.device] = torch.arange(CHUNK_LENGTH, device=local.device).mul_(2).add_(1)
        sums[name] = _sum_bits(local, weights[local.device])
    # All of a device at once: each number asked for alone would wait for the one before it.
    numbers: dict[str, int] = {}
    for device in weights:
        there = {name: value for name, value in sums.items() if value.device == device}
        numbers |= zip(there, torch.stack(list(there.values())).tolist(), strict=True)
    return numbers


def _sum_bits(tensor: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sum of all elements' bits, each times 2 x its place + 1, modulo 2**64.

    A flipped bit changes it by a power of two below 2**32 times an odd number. Two elements that change places change
    it by 2 x their distance x their difference, of which fewer than 64 low bits can be zero: neither goes unseen.
    """
    flat = tensor.reshape(-1)
    bits = flat.contiguous().view(_BITS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(bits), CHUNK_LENGTH):
        chunk = bits[start : start + CHUNK_LENGTH].long()
        total += chunk.sum() * (2 * start)
        total += chunk.mul_(weights[: len(chunk)]).sum()
    return total


def checksum(tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, int] | None = None) -> str:
    """One digest over names, shapes, types and `checksums`, or these `numbers` of theirs."""
    numbers = checksums(tensors) if numbers is None else numbers
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        digest.update(f"{name}{tuple(local.shape)}{local.dtype}{numbers[name]};".encode())
    return digest.hexdigest()
