"""The Accelerator that was made last: what functions and states without one of their own speak of."""

from __future__ import annotations

import weakref
from typing import Any

from duoka.comm.world import World, join_world
from duoka.config.schema import ParallelConfig

_made: list[weakref.ref[Any]] = []


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
    return join_world(ParallelConfig())[0]
