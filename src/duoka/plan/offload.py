"""What is offloaded: how a config's words become a layout's, and the bytes, buffers and seconds of a disk."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from duoka.config.paths import given_path
from duoka.config.schema_running import OffloadConfig
from duoka.plan.catalog import Cluster
from duoka.plan.hardware import Machine
from duoka.plan.layout import Elsewhere, Layout, Offload, OnDisk
from duoka.plan.recipe import Work, static_memory
from duoka.units import format_bytes, format_seconds

# A moment is read and written in slices of so many bytes; in each of the slots lies one of both moments.
SLICE_BYTES = 8 * 2**20
READ_AHEAD = 2
NUM_SLOTS = READ_AHEAD + 2  # beside these: one that is updated, one that is being written
# Read and written together, of a disk that was not measured.
DISK_BYTES_PER_S = 1e9


# Of what layers keep, at most so many lie where the model computes: one that computes, two on their way.
LAYERS_HERE = 3


def offload_of(offloads: OffloadConfig) -> dict[str, Offload | OnDisk | Elsewhere | float]:
    """A layout's fields."""
    moved: Offload = "params" if offloads.params != "none" else "optimizer" if offloads.optimizer != "none" else "none"
    disk: OnDisk = "optimizer" if offloads.optimizer == "disk" else "none"
    disk = "params" if offloads.params == "disk" else disk
    return {
        "offload": moved, "disk": disk, "offload_share": offloads.share, "activations": offloads.activations,
    }  # fmt: skip


def offload_folder(offloads: OffloadConfig, run_folder: Path) -> Path:
    return run_folder if offloads.folder is None else given_path(offloads.folder)


def with_disk(machine: Machine, offloads: OffloadConfig, run_folder: Path) -> Machine:
    """The machine with what is free where this run offloads to; as it is for a run that does not."""
    if not offloads.uses_disk:
        return machine
    folder = offload_folder(offloads, run_folder).absolute()
    there = next(one for one in (folder, *folder.parents) if one.exists())
    try:
        return replace(machine, disk_free_bytes=shutil.disk_usage(there).free)
    except OSError:
        return machine


def buffer_bytes(on_disk: int) -> int:
    """Memory through which `on_disk` bytes of two moments pass."""
    slices = -(-on_disk // (2 * SLICE_BYTES))
    return min(slices, NUM_SLOTS) * min(2 * SLICE_BYTES, on_disk)


def moved_bytes(work: Work, layout: Layout, accumulation: float, cluster: Cluster) -> float:
    """Read and written in a step by one rank.

    The optimizer's state goes both ways once. Weights are read by each pass, and updated; gradients are written, added
    to by later micro-batches, and read for the norm and for the update: where half of the node's memory holds both
    files of its ranks, they stay in the page cache. DeepSpeed reads weights past it, and adds gradients up in memory,
    but puts them away beside the state with the last micro-batch, for the update to read.
    """
    static = static_memory(work, layout)
    moved = 2.0 * layout.offload_share * static.optimizer_bytes if layout.disk != "none" else 0.0
    if work.deepspeed is not None and layout.disk != "none":
        moved += 2.0 * static.gradients_bytes
    if layout.disk != "params":
        return moved
    times = 2 * accumulation + 2
    if work.deepspeed is not None:
        return moved + static.weights_bytes * times
    mapped = static.weights_bytes + static.gradients_bytes
    return moved + (mapped * times if mapped * cluster.per_node > cluster.host_room_bytes / 2 else 0)


def disk_seconds(moved: float, cluster: Cluster) -> float:
    """Of a step in which each rank reads and writes so much: the ranks of a node share its disk."""
    return moved * cluster.per_node / (cluster.offload_bytes_per_s or DISK_BYTES_PER_S)


def disk_sentence(moved: float, cluster: Cluster, step_s: float) -> str:
    """What the disk does in a step, and what that costs."""
    rate, basis = cluster.offload_bytes_per_s, "measured here"
    if not rate:
        rate, basis = DISK_BYTES_PER_S, "assumed; duoka bench hardware measures it"
    return (
        f"{format_bytes(round(moved * cluster.per_node))} read and written a step, at {rate / 1e9:.2g} GB/s ({basis}): "
        f"{format_seconds(disk_seconds(moved, cluster))} of the step's {format_seconds(step_s)}"
    )
