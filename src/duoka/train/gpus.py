"""The GPUs that this run's ranks have, as torch sees them, where the plan's own look at the machine saw others.

nvidia-smi may be missing in a container, slow, or speak of whole cards where a rank has a slice of one; each rank may
see one card of eight. A plan made for what is not there would train on GPUs as if they were a CPU.
"""

from __future__ import annotations

from dataclasses import replace

import psutil
import torch

from duoka.comm.world import World
from duoka.plan.hardware import Gpu, Machine


def as_torch_sees(machine: Machine, world: World) -> Machine:
    """The same machine, with as many GPUs as the world has ranks there, or none where the world has none."""
    if world.device.type != "cuda":
        # What this process holds already is part of what the plan counts for it.
        free = min(machine.memory_bytes, machine.available_bytes + world.local_size * _held_bytes())
        machine = replace(machine, available_bytes=free)
        if not machine.gpus:
            return machine
        note = f"{len(machine.gpus)} GPUs found, and CUDA does not start here: planned for the CPU"
        return replace(machine, gpus=(), notes=(*machine.notes, note))
    if len(machine.gpus) >= world.local_size:
        return machine
    return replace(machine, gpus=(_read_gpu(world.device),) * world.local_size)


def _held_bytes() -> int:
    """Of this process, without pages of files."""
    held = psutil.Process().memory_info()
    return max(0, held.rss - getattr(held, "shared", 0))


def _read_gpu(device: torch.device) -> Gpu:
    facts = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return Gpu(facts.name, int(total), int(free), facts.major + facts.minor / 10)
