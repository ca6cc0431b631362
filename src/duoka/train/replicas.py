"""Replicas must stay equal: a checksum of all trained tensors, compared over ranks."""

from __future__ import annotations

from duoka.errors import WorkerFailed
from duoka.parallel.world import World, checksum
from duoka.train.checkpoint import Contents


def check_replicas(contents: Contents, world: World) -> None:
    """End the run when a rank's weights are not rank 0's; all tensors count, not a sum of one."""
    if world.size == 1:
        return
    tensors = contents.tensors()
    sums = world.gather(checksum(tensors))
    strangers = [rank for rank, value in enumerate(sums) if value != sums[0]]
    if not strangers:
        return
    # Only now, when it matters, find out which tensor it is.
    each = world.gather({name: checksum({name: tensor}) for name, tensor in tensors.items()})
    rank = strangers[0]
    names = [name for name in tensors if each[rank][name] != each[0][name]]
    raise WorkerFailed(
        f"the replicas differ after step {contents.state.step}: rank {rank} has other values than rank 0 in "
        f"{names[0]} (and {len(names) - 1} more tensors)",
        where=f"ranks that differ from rank 0: {', '.join(map(str, strangers))}",
        fix="a machine or its memory may be faulty: run `duoka doctor` there; the last checkpoint is older than this",
    )
