"""What `duoka.spawn` runs in tests/promises/test_spawn.py: fresh processes import it by name."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import duoka


def work(rank, folder, how):
    """Meets the others with nothing set by hand, adds one number over them, and then ends as `how` says."""
    dist.init_process_group("gloo")
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    place = f"{rank} {total.item():g} {duoka.get_dist_info()} {os.environ.get('OMP_NUM_THREADS')}"
    (Path(folder) / f"rank-{rank}").write_text(place)
    if rank == 1 and how == "raise":
        raise ValueError("three rows, not four")
    if rank == 1 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and how == "leave":
        sys.exit(0)
    if rank == 0 and how == "sleep":  # a rank that would never notice by itself
        time.sleep(600)
    if rank == 1 and how == "sleep":
        raise ValueError("nobody waits for rank 0")
    if how != "well":
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    duoka.spawn(work, args=(sys.argv[1], sys.argv[2]), nprocs=2)
    print("after")
