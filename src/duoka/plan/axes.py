"""Tensor, pipeline and sequence axes as a config asks for them: whether they make a layout of this world.

Asked before any process starts. What a model's shape allows is `why_not` in search.py.
"""

from __future__ import annotations

import math

from duoka.config.schema import ParallelConfig
from duoka.errors import Fault
from duoka.plan.layout import AXES, TRAINABLE_AXES

KEYS = {"tp": "parallel.tensor", "pp": "parallel.pipeline", "sp": "parallel.sequence"}


def axes_of(parallel: ParallelConfig) -> dict[str, int]:
    """The size of each axis beside data parallelism, by the name that layouts have for it."""
    return {"tp": parallel.tensor, "pp": parallel.pipeline, "sp": parallel.sequence}


def stages_per_rank(parallel: ParallelConfig) -> int:
    """How many stages of a pipeline each of its ranks has."""
    if parallel.pipeline == 1 or parallel.schedule != "interleaved":
        return 1
    return parallel.virtual_stages or 2


def data_ranks(parallel: ParallelConfig, world_size: int) -> int:
    """How many ranks read different samples, in a world that the axes divide."""
    return world_size // math.prod(axes_of(parallel).values())


def check_axes(parallel: ParallelConfig, world_size: int) -> list[Fault]:
    """Axes that this version does not train with, or that do not divide the world."""
    used = {axis: size for axis, size in axes_of(parallel).items() if size > 1}
    for axis in used:
        if axis not in TRAINABLE_AXES:
            return [
                Fault(
                    f"{KEYS[axis]} is {used[axis]}, and this version plans with that axis, but does not train with it",
                    key=KEYS[axis],
                    fix=f"delete it; what it would give:   duoka plan CONFIG --layout {axis}{used[axis]}",
                )
            ]
    inner = math.prod(used.values())
    if not used or world_size % inner == 0:
        return []
    words = " x ".join(f"{KEYS[axis]} {size}" for axis, size in used.items())
    how = f"{words} is {inner} processes" if len(used) > 1 else f"{words} takes {inner} processes"
    return [
        Fault(
            f"{how} for one copy of the model, and {world_size} are asked for, which is no multiple of it",
            key=KEYS[next(iter(used))],
            fix=f"start another number, such as --nproc {_nearest_multiples(world_size, inner)}"
            + (f"; or share {world_size} as {layouts}" if (layouts := _nearest_layouts(used, world_size)) else ""),
        )
    ]


def _nearest_multiples(world_size: int, inner: int) -> str:
    below, above = world_size // inner * inner, -(-world_size // inner) * inner
    return " or ".join(str(size) for size in (below, above) if size)


def _nearest_layouts(used: dict[str, int], world_size: int) -> str:
    """Up to three ways to share this world whose axes are the nearest to those that were asked for."""
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    found: list[tuple[float, dict[str, int]]] = [(0.0, {})]
    for axis, size in used.items():
        found = [
            (far + abs(math.log2(other / size)), {**sizes, axis: other}) for far, sizes in found for other in divisors
        ]
    fitting = [(far, sizes) for far, sizes in found if world_size % math.prod(sizes.values()) == 0]
    fitting.sort(key=lambda one: one[0])
    names = [
        ", ".join(f"{KEYS[axis].removeprefix('parallel.')}: {sizes[axis]}" for axis in AXES if axis in sizes)
        for _, sizes in fitting[:3]
    ]
    return " / ".join(names)
