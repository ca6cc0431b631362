"""What is offloaded: how a config's words become a layout's, and the bytes, buffers and seconds of a disk."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from duoka.config.paths import given_path
from duoka.config.schema_running import OffloadConfig
from duoka.plan.catalog import Cluster
from duoka.plan.hardware import Machine
from duoka.plan.layout import Offload, OnDisk
from duoka.units import format_bytes, format_seconds

# A moment is read and written in slices of so many bytes; in each of the slots lies one of both moments.
SLICE_BYTES = 8 * 2**20
READ_AHEAD = 2
NUM_SLOTS = READ_AHEAD + 2  # beside these: one that is updated, one that is being written
# Read and written together, of a disk that was not measured.
DISK_BYTES_PER_S = 1e9


def offload_of(offloads: OffloadConfig) -> dict[str, Offload | OnDisk]:
    """A layout's fields."""
    moved: Offload = "params" if offloads.params != "none" else "optimizer" if offloads.optimizer != "none" else "none"
    return {"offload": moved, "disk": "optimizer" if offloads.optimizer == "disk" else "none"}


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


def disk_seconds(on_disk: int, cluster: Cluster) -> float:
    """Of a step: all of it is read and written once, and the ranks of a node share its disk."""
    return 2 * on_disk * cluster.per_node / (cluster.offload_bytes_per_s or DISK_BYTES_PER_S)


def disk_sentence(on_disk: int, cluster: Cluster, step_s: float) -> str:
    """What the disk does in a step, and what that costs."""
    rate, basis = cluster.offload_bytes_per_s, "measured here"
    if not rate:
        rate, basis = DISK_BYTES_PER_S, "assumed; duoka bench hardware measures it"
    return (
        f"{format_bytes(2 * on_disk * cluster.per_node)} read and written a step, at {rate / 1e9:.2g} GB/s ({basis}): "
        f"{format_seconds(disk_seconds(on_disk, cluster))} of the step's {format_seconds(step_s)}"
    )
