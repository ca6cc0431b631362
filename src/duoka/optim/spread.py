"""Over which ranks a parameter is sharded (DTensor placements), and sums over them: for norms of sharded tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from duoka.comm.collectives import all_reduce
from duoka.optim.host import local_part
from duoka.torch_private import foreach_norm

Groups = tuple[dist.ProcessGroup | None, ...]  # None: all ranks
Spread = Callable[[torch.Tensor], Groups]


def spread_of(tensor: torch.Tensor) -> Groups:
    """The groups whose ranks hold different parts of the tensor; () when this rank has all of it."""
    if not isinstance(tensor, DTensor):
        return ()
    if any(place.is_partial() for place in tensor.placements):
        raise RuntimeError(f"a gradient is not summed over its ranks yet: {tensor.placements}")
    mesh = tensor.device_mesh
    # Not is_shard(): what FSDP makes of a dim that another axis shards already answers False there.
    return tuple(mesh.get_group(axis) for axis, place in enumerate(tensor.placements) if not place.is_replicate())


def add_over(values: torch.Tensor, groups: Groups, kind: str) -> torch.Tensor:
    """The sum over the groups' ranks; on the device that the groups can reach."""
    values = values.to(kind) if groups else values
    for group in groups:
        all_reduce(values, group)
    return values


def device_type(tensors: Iterable[torch.Tensor]) -> str:
    """Where collectives about these tensors happen: the mesh's device, which offloaded values do not lie on."""
    for tensor in tensors:
        return str(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else tensor.device.type
    return "cpu"


def norms_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm of each tensor, whole; all ranks call it with the same list. One collective for all of one spread."""
    squares = torch.zeros(len(tensors))
    by_groups: dict[Groups, list[int]] = {}
    for place, tensor in enumerate(tensors):
        by_groups.setdefault(spread_of(tensor), []).append(place)
    for groups, places in by_groups.items():
        local = [local_part(tensors[place]) for place in places]
        own = torch.stack(foreach_norm(local)).float().square()
        squares = squares.to(own.device)
        squares[places] = add_over(own, groups, device_type([tensors[places[0]]])).to(own.device)
    return squares.sqrt()
