"""What a run takes in days, device-hours and money, and what its checkpoints take in time and room: stated rates.

Every rate is one that was measured on the machine (`duoka bench hardware`) or an assumption, and the lines say which.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from duoka.config.schema import CheckpointConfig
from duoka.plan.catalog import Cluster
from duoka.plan.layout import Layout
from duoka.plan.recipe import Work
from duoka.plan.speed import Speed
from duoka.units import format_bytes, format_seconds, parse_every

# How fast a node writes to storage that was not measured. Shared storage: more than a few nodes write no faster.
DISK_BYTES_PER_S, MOST_WRITING_NODES = 1e9, 4
# How fast one rank copies to host memory: over PCIe 4 from pageable memory; on a CPU at a share of memory's speed.
COPY_BYTES_PER_S = 12e9
# Between failures: 7.9 hours at 1,024 GPUs, as published for a large research cluster; a machine of CPUs like one of 8.
GPU_HOURS_BETWEEN_FAILURES = 7.9 * 1024
GPUS_PER_MACHINE = 8


@dataclass(frozen=True)
class Costs:
    num_steps: int | None
    total_s: float | None
    device_hours: float | None
    price_per_hour: float | None
    price: float | None
    checkpoint_bytes: int
    checkpoint_s: float  # to write one
    blocked_s: float  # of these, how long training waits
    disk_bytes_per_s: float
    is_disk_measured: bool
    between_failures_s: float
    interval_s: float
    disk_bytes: int | None  # of all checkpoints that are there at once, and the result
    step_s: float
    billion_tokens_s: float
    billion_tokens_hours: float  # of all devices

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        out = []
        if self.total_s is not None and self.device_hours is not None:
            money = "" if self.price is None else f", {self.price:,.2f} at the price given"
            out.append(f"{self.num_steps:,} steps take {format_seconds(self.total_s)}: "
                       f"{self.device_hours:,.1f} device-hours{money}")  # fmt: skip
        else:
            money = (
                ""
                if self.price_per_hour is None
                else (f", {self.price_per_hour * self.billion_tokens_hours:,.2f} at the price given")
            )
            out.append(f"a billion tokens take {format_seconds(self.billion_tokens_s)}: "
                       f"{self.billion_tokens_hours:,.1f} device-hours{money}")  # fmt: skip
        basis = "measured here" if self.is_disk_measured else "assumed"
        out.append(
            f"a checkpoint is {format_bytes(self.checkpoint_bytes)}: {format_seconds(self.checkpoint_s)} to write at "
            f"{self.disk_bytes_per_s / 1e9:.2g} GB/s ({basis}), training waits {format_seconds(self.blocked_s)} of it"
        )
        if self.disk_bytes is not None:
            out.append(f"disk: up to {format_bytes(self.disk_bytes)} for all that is there at once, the result too")
        steps = max(1, round(self.interval_s / self.step_s))
        out.append(
            f"save about every {format_seconds(self.interval_s)} ({steps:,} steps), by Young: sqrt(2 x "
            f"{format_seconds(self.blocked_s)} waited x {format_seconds(self.between_failures_s)} between failures)"
        )
        return out


def most_checkpoints(config: CheckpointConfig, steps_left: int, num_there: int = 0) -> int:
    """How many are on the disk at once: the newest, the one being written, and those that stay for good."""
    number = config.keep + 1 + (steps_left // config.keep_every if config.keep_every else 0) + config.keep_best
    every = parse_every(config.every)
    if every.unit == "steps" and not config.keep_best:
        number = min(number, num_there + 1 + int(steps_left // every.count))
    return number


def estimate_costs(
    work: Work,
    layout: Layout,
    cluster: Cluster,
    speed: Speed,
    num_steps: int | None,
    config: CheckpointConfig,
    price_per_hour: float | None = None,
) -> Costs:
    """`price_per_hour` is of one device."""
    size = int((work.trained_size + work.state_bytes) * work.num_trainable)  # trained weights and the optimizer's state
    if work.thin_gradients and layout.strategy == "ddp":  # each rank's own residuals
        size += 4 * work.num_trainable * layout.dp * layout.sp
    measured = cluster.disk_bytes_per_s
    rate = (measured or DISK_BYTES_PER_S) * min(cluster.num_nodes, MOST_WRITING_NODES)
    is_cpu = cluster.device.kind == "cpu"
    write_s = size / rate
    # Ranks copy their parts at the same time; those of a CPU share its memory, and copy only what is not written before
    # the optimizer steps: there it is an upper bound.
    copy = cluster.device.memory_bytes_per_s / 2 / cluster.per_node if is_cpu else COPY_BYTES_PER_S
    blocked_s = min(write_s, size / layout.world_size / copy) if config.is_async else write_s
    machines = cluster.num_nodes * GPUS_PER_MACHINE if is_cpu else cluster.num_devices
    between_s = GPU_HOURS_BETWEEN_FAILURES / machines * 3600
    total = None if num_steps is None else num_steps * speed.step_s
    devices = cluster.num_nodes if is_cpu else cluster.num_devices
    hours = None if total is None else total / 3600 * devices
    billion_s = 1e9 / speed.tokens_per_s
    kept = None if num_steps is None else most_checkpoints(config, num_steps)
    return Costs(
        num_steps=num_steps,
        total_s=total,
        device_hours=hours,
        price_per_hour=price_per_hour,
        price=None if hours is None or price_per_hour is None else hours * price_per_hour,
        checkpoint_bytes=size,
        checkpoint_s=write_s,
        blocked_s=blocked_s,
        disk_bytes_per_s=rate,
        is_disk_measured=bool(measured),
        between_failures_s=between_s,
        # One is written at a time.
        interval_s=max(write_s, speed.step_s, math.sqrt(2 * blocked_s * between_s)),
        disk_bytes=None if kept is None else kept * size + work.trained_size * work.num_trainable,
        step_s=speed.step_s,
        billion_tokens_s=billion_s,
        billion_tokens_hours=billion_s / 3600 * devices,
    )
