"""The denominator of MFU: floating-point operations per token, and the peak of all devices."""

from __future__ import annotations

from dataclasses import dataclass

from duoka.plan.catalog import Cluster
from duoka.plan.flops import OWN_FORMULA, model_flops_per_token
from duoka.plan.layout import Layout
from duoka.plan.task import Task


@dataclass(frozen=True)
class Yardstick:
    """`peak_flops` is None where it is unknown: on a CPU that `duoka bench hardware` has not measured."""

    flops_per_token: float
    peak_flops: float | None
    formula: str = OWN_FORMULA

    def mfu(self, tokens_per_s: float) -> float | None:
        """The share of the peak that goes into what the model needs."""
        return tokens_per_s * self.flops_per_token / self.peak_flops if self.peak_flops else None


def yardstick_of(task: Task, layout: Layout, cluster: Cluster) -> Yardstick:
    device = cluster.device
    # Ranks of a node share its CPU: that is one device, however many ranks there are.
    count = cluster.num_nodes if device.kind == "cpu" else cluster.num_devices
    is_known = device.kind != "cpu" or device.measured
    flops = model_flops_per_token(task.work, round(task.seen))
    return Yardstick(flops, device.peak_flops(layout.precision) * count if is_known else None)
