"""Worlds of processes for tests: started once, several runs inside, ended whatever happens."""

import os
import socket
import time
import traceback
from pathlib import Path

import torch.multiprocessing as mp

WORLD_TIMEOUT_S = 240


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def train_all(jobs, size):
    """Train every (yaml, overrides, run folder) in turn on a world of `size` gloo processes."""
    if size == 1:
        _train_jobs(jobs)
        return
    port = free_port()
    context = mp.start_processes(_enter_world, args=(size, port, jobs), nprocs=size, join=False, start_method="spawn")
    deadline = time.monotonic() + WORLD_TIMEOUT_S
    try:
        # join() comes back after each process that ends; it raises the first one's traceback.
        while not context.join(timeout=1):
            if time.monotonic() > deadline:
                raise TimeoutError(f"a world of {size} did not end within {WORLD_TIMEOUT_S} s")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()


def _enter_world(rank, size, port, jobs):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1",
    )  # fmt: skip
    import torch

    torch.set_num_threads(1)
    try:
        _train_jobs(jobs)
    except BaseException:
        traceback.print_exc()
        raise


def _train_jobs(jobs):
    from duoka.config.load import load_config

    from duoka.parallel.world import end_world, start_world
    from duoka.runs.folder import RunFolder
    from duoka.train.main import read_inputs, run_in_world

    world = None
    try:
        for yaml, overrides, folder in jobs:
            run = RunFolder(Path(folder))
            run.make()
            loaded = load_config(yaml, overrides)
            inputs = read_inputs(loaded, run, lambda text: None)
            world = world or start_world(loaded.config.parallel)
            run_in_world(inputs, world)
    finally:
        if world is not None:
            end_world(world)
