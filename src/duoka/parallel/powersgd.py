"""Gradients exchanged as two thin matrices (PowerSGD, torch's hook), counted; what they leave out, to save it.

What a rank's matrices leave out of its gradient is added to its next one: without that error a resumed run would
learn something else. It belongs to one number of processes and one size of buckets; with others it begins anew.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from duoka.parallel.collectives import is_gloo
from duoka.parallel.ledger import LEDGER

# Two thin matrices of this rank instead of each gradient, once the first wild steps are over.
RANK, FROM_STEP = 4, 10
_KINDS = {"error": "error_dict", "p": "p_memory_dict", "q": "q_memory_dict"}


def build_power() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=FROM_STEP)


def sum_by_thin_matrices(
    power: powerSGD_hook.PowerSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Add a bucket of gradients over all ranks, nearly."""
    begins, before = power.iter < power.start_powerSGD_iter, power.total_numel_after_compression
    mean = powerSGD_hook.powerSGD_hook(power, bucket)
    if is_gloo(None, bucket.buffer().device):
        # Its later exchanges begin in gloo's threads when the earlier end: with several buckets under way, ranks would
        # begin them in different orders, and abort.
        mean.wait()
    # Torch's hook sends by itself and tells how much: before it begins to compress, the whole bucket.
    buffer = bucket.buffer()
    numel = buffer.numel() if begins else power.total_numel_after_compression - before
    LEDGER.note("all-reduce", numel * buffer.element_size(), dist.get_world_size())

    def scaled(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        LEDGER.came_back = time.perf_counter()
        return future.value().mul_(dist.get_world_size())

    return mean.then(scaled)


def read_owed(power: powerSGD_hook.PowerSGDState, bucket_bytes: int) -> dict[str, torch.Tensor]:
    """This rank's errors and matrices by bucket, and how many steps there were."""
    facts = [power.iter, dist.get_world_size(), bucket_bytes]
    owed = {"facts": torch.tensor(facts, dtype=torch.int64)}
    for kind, name in _KINDS.items():
        for bucket, values in getattr(power, name).items():
            owed[f"{kind}.{bucket}"] = values.detach().cpu().contiguous()
    return owed


def give_back(
    power: powerSGD_hook.PowerSGDState, owed: Mapping[str, torch.Tensor], bucket_bytes: int, device: torch.device
) -> None:
    """Go on as `read_owed` found it; of another world or other buckets only the number of steps counts."""
    steps, num_ranks, their_bytes = owed["facts"].tolist()
    power.iter = steps
    for name in _KINDS.values():
        getattr(power, name).clear()
    if (num_ranks, their_bytes) != (dist.get_world_size(), bucket_bytes):
        return
    for key, values in owed.items():
        kind, _, bucket = key.partition(".")
        if kind in _KINDS:
            getattr(power, _KINDS[kind])[int(bucket)] = values.to(device)
