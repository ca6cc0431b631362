"""Replicas must stay equal: a checksum of all trained tensors, compared over the ranks that hold the same of them."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from duoka.comm.checksum import checksum, checksums
from duoka.comm.world import World
from duoka.errors import WorkerFailed
from duoka.parallel.expert import is_shared_expert
from duoka.parallel.flat_shard import FlatShard
from duoka.parallel.powersgd import is_ranks_own
from duoka.store.contents import Contents
from duoka.train.moments import Concern, StepEnd


class ReplicaCheck(Concern):
    """`parallel.check_replicas`: every so many steps; 0: never."""

    def __init__(self, contents: Contents, world: World, every: int) -> None:
        self._contents, self._world, self._every = contents, world, every

    def after_step(self, end: StepEnd) -> None:
        if self._every and end.step % self._every == 0:
            check_replicas(self._contents, self._world)


def check_replicas(contents: Contents, world: World) -> None:
    """End the run when a rank's weights are not rank 0's; all tensors count, not a sum of one."""
    mesh = contents.engine.mesh
    _check_ends(contents)
    if mesh.copies.size == mesh.tensor.size == mesh.expert_copies.size == 1:
        return  # nothing is there twice; asking for tensors would read a state on disk
    tensors = {name: tensor for name, tensor in contents.tensors().items() if not is_ranks_own(name)}
    if mesh.copies.size > 1:
        _compare(tensors, mesh.first_copy, contents.state.step, world)
    if mesh.tensor.size > 1:
        # What tensor-parallel ranks do not cut each of them has whole, and moves by the same gradient.
        whole = {name: one for name, one in tensors.items() if not (_is_cut(one) or is_shared_expert(one))}
        _compare(whole, world.rank - mesh.tensor.rank, contents.state.step, world)

    if mesh.expert_copies.size > 1:
        shared = {name: tensor for name, tensor in tensors.items() if is_shared_expert(tensor)}
        first = mesh.place["pp"] * (world.size // mesh.sizes["pp"]) + mesh.experts.rank
        _compare(shared, first, contents.state.step, world)


def _is_cut(tensor: torch.Tensor) -> bool:
    if isinstance(tensor, FlatShard):
        return tensor.within is not None
    return isinstance(tensor, DTensor) and "tp" in (tensor.device_mesh.mesh_dim_names or ())


def _compare(tensors: dict[str, torch.Tensor], first: int, step: int, world: World) -> None:
    """Each rank's tensors are those of rank `first`; one copy over all ranks has nothing to be compared with."""
    tensors = {name: one.live if isinstance(one, FlatShard) else one for name, one in tensors.items()}
    # All ranks learn of all, and decide alike.
    numbers = checksums(tensors)
    sums = world.gather((first, checksum(tensors, numbers)))
    mismatched = [rank for rank, (first, value) in enumerate(sums) if value != sums[first][1]]
    if not mismatched:
        return
    # Only now, when it matters, find out which tensor it is.
    each = world.gather({name: checksum({name: tensor}, numbers) for name, tensor in tensors.items()})
    rank = mismatched[0]
    first = sums[rank][0]
    names = [name for name, value in each[rank].items() if value != each[first][name]]
    raise WorkerFailed(
        f"the replicas differ after step {step}: rank {rank} has other values than rank {first} in "
        f"{names[0]} (and {len(names) - 1} more tensors)",
        where=f"ranks that differ from their model's first copy: {', '.join(map(str, mismatched))}",
        fix="a machine or its memory may be faulty: run `duoka doctor` there; the last checkpoint is older than this",
    )


def _check_ends(contents: Contents) -> None:
    """What two stages of a pipeline both have (a tied embedding and head) must stay equal too."""
    pipeline, held = contents.engine.mesh.pipeline, contents.engine.held_twice()
    if pipeline.size == 1:
        return
    numbers = checksums(held)
    found: dict[str, tuple[int, object]] = {}
    for rank, part in enumerate(pipeline.gather({name: checksum({name: held[name]}, numbers) for name in held})):
        for name, value in part.items():
            first, known = found.setdefault(name, (rank, value))
            if value != known:
                raise WorkerFailed(
                    f"two stages of a pipeline differ in {name} after step {contents.state.step}",
                    where=f"it is on ranks {first} and {rank} of the pipeline, and their gradients are added",
                    fix="a machine or its memory may be faulty: run `duoka doctor` there",
                )
