"""The package deepspeed, begun as duoka wants it: quiet, nothing compiled, exchanges counted, groups those of this run.

For deepspeed.py and deepspeed_tensor.py.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import SAC_IGNORED_OPS

from duoka.parallel.deepspeed_traffic import count_exchanges


def load_deepspeed(device: torch.device) -> Any:
    """The package, told which device it is on: it looks for one otherwise, and says so on every rank."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    with _without("mlflow"):  # of its autotuner, which nobody here asks: three quarters of what it imports
        import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    # With a C++ compiler it would build this at its first start, for minutes, without a word, and for inference;
    # a build that was killed leaves a lock that the next start waits for.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


@contextmanager
def _without(module: str) -> Iterator[None]:
    """Not installed, for who looks meanwhile; but what is imported already stays what it is."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]


def begin_deepspeed(device: torch.device, tensor_ranks: int = 1) -> Any:
    """The same, with its process groups: data ranks, and neighbors that share matrices. All ranks call it.

    It keeps the groups of a process's first engine for all that come after it: others are made where those differ.
    """
    package = load_deepspeed(device)
    package.init_distributed(dist_backend=None, auto_mpi_discovery=False, verbose=False)
    count_exchanges()
    # It empties weights that it lets go of, where layers are computed again (`recompute: selective`) elsewhere than in
    # the first pass: torch takes that for another computation.
    SAC_IGNORED_OPS.add(torch.ops.aten.empty.memory_format)
    from deepspeed.utils import groups

    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # of an engine before this one: it would not make another
    known = groups._TENSOR_MODEL_PARALLEL_GROUP
    if (1 if known is None else dist.get_world_size(known)) != tensor_ranks:
        groups._TENSOR_MODEL_PARALLEL_GROUP = groups._MODEL_PARALLEL_GROUP = groups._DATA_PARALLEL_GROUP = None
        groups.mpu = None
        if tensor_ranks > 1:
            groups._init_tp_mesh_device(tensor_model_parallel_size=tensor_ranks)
    return package


def data_group() -> Any:
    """DeepSpeed's group of ranks that have the same part of every matrix."""
    from deepspeed.utils import groups

    return groups.get_data_parallel_group()
