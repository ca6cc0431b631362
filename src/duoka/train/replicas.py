"""Replicas must stay equal: a checksum of all trained tensors, compared over the ranks that hold the same of them."""

from __future__ import annotations

from duoka.comm.world import World, checksum
from duoka.errors import WorkerFailed
from duoka.parallel.powersgd import is_ranks_own
from duoka.store.contents import Contents


def check_replicas(contents: Contents, world: World) -> None:
    """End the run when a rank's weights are not rank 0's; all tensors count, not a sum of one."""
    num_sharing = contents.engine.num_sharing
    if world.size == num_sharing:
        return  # one copy over all ranks: there is nothing to compare it with
    tensors = {name: tensor for name, tensor in contents.tensors().items() if not is_ranks_own(name)}
    sums = world.gather(checksum(tensors))
    # Ranks num_sharing apart hold the same part; the first that has it is the one to compare with.
    strangers = [rank for rank, value in enumerate(sums) if value != sums[rank % num_sharing]]
    if not strangers:
        return
    # Only now, when it matters, find out which tensor it is.
    each = world.gather({name: checksum({name: tensor}) for name, tensor in tensors.items()})
    rank = strangers[0]
    first = rank % num_sharing
    names = [name for name in tensors if each[rank][name] != each[first][name]]
    raise WorkerFailed(
        f"the replicas differ after step {contents.state.step}: rank {rank} has other values than rank {first} in "
        f"{names[0]} (and {len(names) - 1} more tensors)",
        where=f"ranks that differ from their model's first copy: {', '.join(map(str, strangers))}",
        fix="a machine or its memory may be faulty: run `duoka doctor` there; the last checkpoint is older than this",
    )
