"""What a run takes in days, device-hours and money, and what its checkpoints weigh: arithmetic with stated rates."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from duoka.plan.catalogue import Cluster
from duoka.plan.recipe import Work
from duoka.units import format_bytes, format_seconds

# How fast a node writes to shared storage, and how long devices run between failures: 7.9 hours at 1,024 GPUs, as
# published for a large research cluster.
WRITE_BYTES_PER_S = 1e9
GPU_HOURS_BETWEEN_FAILURES = 7.9 * 1024


@dataclass(frozen=True)
class Costs:
    num_steps: int | None
    total_s: float | None
    device_hours: float | None
    price: float | None
    checkpoint_bytes: int
    checkpoint_s: float
    interval_s: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        out = []
        if self.total_s is not None and self.device_hours is not None:
            money = "" if self.price is None else f", {self.price:,.2f} at the price given"
            out.append(f"{self.num_steps:,} steps take {format_seconds(self.total_s)}: "
                       f"{self.device_hours:,.1f} device-hours{money}")  # fmt: skip
        saved = f"a checkpoint is {format_bytes(self.checkpoint_bytes)}, {format_seconds(self.checkpoint_s)} to write"
        if self.interval_s is not None:
            saved += f"; save about every {format_seconds(self.interval_s)}"
        out.append(saved)
        return out


def estimate_costs(
    work: Work, cluster: Cluster, step_s: float, num_steps: int | None, price_per_hour: float | None = None
) -> Costs:
    """`price_per_hour` is of one device. The interval is sqrt(2 x time to save x time between failures)."""
    size = int((4 + work.state_bytes) * work.num_trainable)  # trained weights and the optimizer's state
    nodes_writing = min(cluster.num_nodes, 4)  # storage is shared: more nodes do not write faster for ever
    save_s = size / (WRITE_BYTES_PER_S * nodes_writing)
    between_s = GPU_HOURS_BETWEEN_FAILURES / cluster.num_devices * 3600
    total = None if num_steps is None else num_steps * step_s
    devices = cluster.num_nodes if cluster.device.kind == "cpu" else cluster.num_devices
    hours = None if total is None else total / 3600 * devices
    return Costs(
        num_steps=num_steps,
        total_s=total,
        device_hours=hours,
        price=None if hours is None or price_per_hour is None else hours * price_per_hour,
        checkpoint_bytes=size,
        checkpoint_s=save_s,
        interval_s=math.sqrt(2 * save_s * between_s) if cluster.device.kind == "cuda" else None,
    )
