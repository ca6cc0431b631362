"""The Accelerator that was made last: what functions and states without one of their own speak of."""

from __future__ import annotations

import atexit
import weakref
from typing import Any

import torch

from duoka.comm.world import World, end_world, join_world
from duoka.config.schema import ParallelConfig

_made: list[weakref.ref[Any]] = []
_joined: list[World] = []  # by this process, without an Accelerator


def remember(accelerator: Any) -> None:
    _made[:] = [weakref.ref(accelerator)]


def newest_accelerator() -> Any:
    """None where there is none."""
    return _made[0]() if _made else None


def current_world() -> World:
    """That of the newest Accelerator, or the one that this process was started in."""
    accelerator = newest_accelerator()
    if accelerator is not None:
        world: World = accelerator.world
        return world
    if _joined and (_joined[0].size == 1 or torch.distributed.is_initialized()):
        return _joined[0]
    world, started = join_world(ParallelConfig())
    if started:
        atexit.register(end_world, world)
    _joined[:] = [world]
    return world
