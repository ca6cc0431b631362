"""Notes that correct common claims of guides, for the plans that they apply to."""

from __future__ import annotations

from dataclasses import replace

from duoka.plan.catalog import Cluster
from duoka.plan.heap import INSTALL
from duoka.plan.layout import Layout
from duoka.plan.recipe import Work, static_memory
from duoka.plan.traffic import Exchange, dp_root_bytes
from duoka.units import format_bytes


def advice(
    work: Work, layout: Layout, cluster: Cluster, exchanges: tuple[Exchange, ...], accumulation: int
) -> tuple[str, ...]:
    """Notes for the end of a plan, the most surprising first."""
    found: list[str] = []
    if layout.strategy == "ddp" and layout.dp > 1:
        shared = static_memory(work, replace(layout, strategy="fsdp", shard=layout.dp)).total_bytes
        whole = static_memory(work, layout).total_bytes
        found.append(
            f"DDP keeps {format_bytes(whole)} of weights, gradients and state in every rank, on 2 cards as on "
            f"{max(layout.dp, 4)}: more cards don't lower it. Sharing would: fsdp{layout.dp} {format_bytes(shared)}"
        )
    sums = [one for one in exchanges if one.kind == "all-reduce" and one.group.size > 1]
    if sums and layout.strategy == "ddp":
        one = sums[0]
        size = one.group.size
        found.append(
            f"an all-reduce of {_mb(one.payload_bytes)} among {size} sends {_mb(one.sent_bytes)} from each rank, "
            f"2(N-1)/N of it: a reduce-scatter and an all-gather of {_mb(one.sent_bytes / 2)} each"
        )
        taken, given = dp_root_bytes(work, size)
        found.append(
            f"under DataParallel the first of {size} cards would carry N-1 times as much, in every micro-batch: "
            f"{_mb(taken)} of gradients in and {_mb(given)} of weights out"
        )
    if layout.strategy in ("zero2", "fsdp", "hsdp") and accumulation > 1:
        times = {"zero2": f"{accumulation} + 1", "fsdp": f"3 x {accumulation}", "hsdp": f"3 x {accumulation}"}
        found.append(
            f"with {accumulation} micro-batches a step {layout.strategy} exchanges {times[layout.strategy]} times the "
            "parameters, against 2 of DDP; the known 1 : 1 : 1.5 holds for one micro-batch only"
        )
    if work.device == "cpu" and not work.has_allocator:
        found += _about_the_heap(layout)
    if layout.axes:
        one_copy = layout.tp * layout.pp * layout.sp
        nodes = -(-one_copy // cluster.per_node)
        product = " x ".join(f"{axis} {size}" for axis, size in {"dp": layout.dp, **layout.axes}.items())
        spans = f", {nodes} nodes" if nodes > 1 else ""
        found.append(f"{layout.world_size} devices = {product}: one copy of the model spans {one_copy}{spans}")
    return tuple(found)


def _about_the_heap(layout: Layout) -> list[str]:
    """The C library's: what it keeps, and what giving it back costs."""
    if layout.disk != "none" or layout.activations == "disk":
        return [
            "the C library's heap is told to give freed memory back at once, which costs a run with files up to a "
            f"third of its speed; tcmalloc needs no more memory, and is used where it is installed: {INSTALL}"
        ]
    if layout.is_sharded or layout.recompute not in ("none", "selective"):
        return [
            "on a CPU freed tensors below 32 MiB may stay resident: MALLOC_MMAP_THRESHOLD_=1048576 "
            "THP_MEM_ALLOC_ENABLE=1 gives them back at once, for 4 to 9% more CPU time"
        ]
    return []


def _mb(count: float) -> str:
    return f"{count / 1e6:,.0f} MB" if count < 1e10 else f"{count / 1e9:,.1f} GB"
