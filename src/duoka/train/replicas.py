"""Replicas must begin and stay equal: checksums, compared over the ranks that hold the same tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from duoka.comm.checksum import checksum, checksums
from duoka.comm.world import World
from duoka.errors import ConfigError, WorkerFailed
from duoka.model.build import named_part, named_weights
from duoka.parallel.engine import Engine
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


def check_start(engine: Engine) -> None:
    """Refuse ranks that begin with other weights, frozen ones too, or other tables: files differ, or what is drawn.

    DDP would send rank 0's to all. What ranks share out each of them has once, DeepSpeed's (on meta) too.
    """
    mesh = engine.mesh
    if mesh.loss.size == 1:
        return
    held = {**named_weights(engine.bare), **dict(named_part(engine.bare).named_buffers())}
    whole = {name: one for name, one in held.items() if not (isinstance(one, DTensor | FlatShard) or one.is_meta)}
    if (found := _find_mismatch(whole, mesh.first_of_loss, mesh.everyone)) is None:
        return
    raise ConfigError(
        f"the weights are not the same on all ranks: rank {found.rank} begins with other values than rank "
        f"{found.first} in {found.names}",
        where=f"ranks that differ from the first that should have the same: {found.ranks}",
        fix="bring the same files to all machines (compare them whole: sha256sum *.safetensors); where they are "
        "equal, run `duoka doctor` there: a disk or memory may be faulty",
    )


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
    tensors = {name: one.live if isinstance(one, FlatShard) else one for name, one in tensors.items()}
    if (found := _find_mismatch(tensors, first, world)) is None:
        return
    raise WorkerFailed(
        f"the replicas differ after step {step}: rank {found.rank} has other values than rank {found.first} in "
        f"{found.names}",
        where=f"ranks that differ from their model's first copy: {found.ranks}",
        fix="a machine or its memory may be faulty: run `duoka doctor` there; the last checkpoint is older than this",
    )


class Mismatch(NamedTuple):
    """`rank`, the first of `ranks`, has other values than `first` in `names`."""

    rank: int
    first: int
    names: str
    ranks: str


def _find_mismatch(tensors: dict[str, torch.Tensor], first: int, world: World) -> Mismatch | None:
    """Each rank's tensors are those of rank `first`; one copy over all ranks has nothing to be compared with."""
    # All ranks learn of all, and decide alike.
    numbers = checksums(tensors)
    sums = world.gather((first, checksum(tensors, numbers)))
    mismatched = [rank for rank, (first, value) in enumerate(sums) if value != sums[first][1]]
    if not mismatched:
        return None
    # Only now, when it matters, find out which tensor it is.
    each = world.gather({name: checksum({name: tensor}, numbers) for name, tensor in tensors.items()})
    rank = mismatched[0]
    first = sums[rank][0]
    names = [name for name, value in each[rank].items() if value != each[first].get(name)]
    more = f" (and {len(names) - 1} more tensors)" if len(names) > 1 else ""
    shown = f"{names[0]}{more}" if names else "which tensors there are"
    return Mismatch(rank, first, shown, ", ".join(map(str, mismatched)))


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
