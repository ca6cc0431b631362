"""Every layout that a number of devices allows: what each needs, how fast it is, and why the others are left out.

A small grid, all of it by arithmetic. `search` ranks; `choose.py` decides what `auto` becomes, and takes only what
this version trains with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from duoka.plan.catalog import Cluster
from duoka.plan.layout import Layout, Recompute, Strategy
from duoka.plan.memory import FITS, Memory
from duoka.plan.shape import ModelShape
from duoka.plan.speed import Speed, estimate_speed
from duoka.plan.task import Task, load_of, memory_of
from duoka.units import Amount, format_bytes

LONG_TOKENS = 16384  # below it, cutting sequences saves nothing that cutting batches doesn't
_RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class Candidate:
    layout: Layout
    memory: Memory
    speed: Speed

    @property
    def name(self) -> str:
        notes = [] if self.layout.recompute == "none" else [f"recompute {self.layout.recompute}"]
        notes += [] if self.layout.offload == "none" else [f"offload {self.layout.offload}"]
        notes += [] if self.layout.disk == "none" else [f"{self.layout.disk} on disk"]
        return ", ".join([self.layout.name, f"{self.layout.micro.count:,} tokens", *notes])


@dataclass(frozen=True)
class Rejected:
    layout: str
    reason: str


@dataclass(frozen=True)
class Ranking:
    """Candidates from the fastest; of each layout its best micro-batch and recompute."""

    candidates: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]

    @property
    def trainable(self) -> tuple[Candidate, ...]:
        return tuple(candidate for candidate in self.candidates if candidate.layout.is_trainable)


def search(task: Task, cluster: Cluster, start: Layout, available_bytes: int) -> Ranking:
    """All layouts of `cluster`; precision, packing and compile are those of `start`."""
    candidates: list[Candidate] = []
    rejected: list[Rejected] = []
    for layout in layouts_of(cluster, start, task.max_length):
        reason = why_not(layout, task, cluster)
        if reason is None:
            best, reason = _best_of(layout, task, cluster, available_bytes)
            if best is not None:
                candidates.append(best)
                continue
        rejected.append(Rejected(layout.name, reason or ""))
    candidates.sort(key=lambda candidate: (-candidate.speed.tokens_per_s, len(candidate.layout.axes)))
    return Ranking(tuple(candidates), tuple(rejected))


def layouts_of(cluster: Cluster, start: Layout, max_length: int) -> Iterator[Layout]:
    """Strategies times axes, in the order in which an expert would try them."""
    world, per_node = cluster.num_devices, cluster.per_node
    for pp in _sizes(world, min(world, 64)):
        for tp in _sizes(world // pp, per_node):
            for sp in _sizes(world // pp // tp, per_node) if max_length >= LONG_TOKENS else (1,):
                data = world // pp // tp // sp
                axes = {"tp": tp, "pp": pp, "sp": sp, "ep": 1}
                yield from (replace(start, **how, **axes) for how in _strategies(data, cluster, tp * pp, sp))  # type: ignore[arg-type]


def _strategies(data: int, cluster: Cluster, cuts: int, sp: int) -> Iterator[dict[str, object]]:
    others = cuts * sp
    if data * sp == 1:
        yield {"dp": 1, "strategy": "single", "shard": 1}
        return
    names: tuple[Strategy, ...] = ("ddp", "zero1", "zero2", "fsdp") if others == 1 else ("ddp", "zero1", "fsdp")
    for name in names:
        yield {"dp": data, "strategy": name, "shard": 1 if name == "ddp" else data}
    inside = cluster.per_node // others
    if cluster.num_nodes > 1 and 1 < inside < data and data % inside == 0:
        yield {"dp": data, "strategy": "hsdp", "shard": inside}


def _sizes(limit: int, most: int) -> Iterator[int]:
    """1, 2, 4, ... and 3 x 2^n where they divide `limit`: pipelines of 6 and 12 stages are common."""
    yield from (size for size in range(1, most + 1) if limit % size == 0 and _is_usual(size))


def _is_usual(size: int) -> bool:
    while size % 2 == 0:
        size //= 2
    return size in (1, 3)


def why_not(layout: Layout, task: Task, cluster: Cluster) -> str | None:
    """Why a layout makes no sense for this model on these machines, memory apart; None when it does."""
    shape = task.work.shape
    return _tensor_fault(layout, shape, cluster) or _other_fault(layout, shape, task)


def _tensor_fault(layout: Layout, shape: ModelShape, cluster: Cluster) -> str | None:
    tp = layout.tp
    if tp == 1:
        return None
    for size, what in ((shape.num_heads, "heads"), (shape.num_kv_heads, "key-value heads")):
        if size % tp:
            return f"{size} {what} cannot be shared by {tp} tensor-parallel ranks"
    if shape.intermediate_size % tp:
        return f"a feed-forward width of {shape.intermediate_size} is not divisible by {tp}"
    if tp > cluster.per_node:
        return f"tensor parallelism exchanges in every layer: {tp} ranks would cross nodes of {cluster.per_node}"
    if layout.strategy == "ddp":
        return "ddp adds up gradients of whole tensors, and takes none that is cut: zero1 does the same in less memory"
    return None


def _other_fault(layout: Layout, shape: ModelShape, task: Task) -> str | None:
    if layout.pp > shape.num_layers:
        return f"{layout.pp} stages for {shape.num_layers} layers"
    if layout.pp > 1 and layout.strategy in ("fsdp", "hsdp"):
        return "a pipeline keeps its weights for many micro-batches: sharing them out would gather them for each"
    samples = max(1.0, task.tokens_per_step / task.length)
    if layout.dp > samples:
        about = "" if task.step.unit == "samples" else "about "
        few = f"a step of {about}{samples:.0f} samples is too small for {layout.dp} data ranks"
        return f"{few}: some would have nothing"
    if layout.pp > 1 and task.tokens_per_step / layout.dp / task.max_length < layout.pp:
        return f"fewer micro-batches than {layout.pp} stages: most of them would wait"
    return None


def _best_of(layout: Layout, task: Task, cluster: Cluster, available_bytes: int) -> tuple[Candidate | None, str | None]:
    """The fastest recompute and micro-batch that fit, or the least that would be needed."""
    best: Candidate | None = None
    least: Memory | None = None
    share = task.tokens_per_step / layout.dp
    for recompute in _RECOMPUTES:
        for tokens in _rungs(task.max_length, share):
            how = replace(layout, recompute=recompute, micro=Amount(tokens, "tokens"))
            load = load_of(task, how)
            memory = memory_of(task, how)
            if least is None or memory.peak_bytes < least.peak_bytes:
                least = memory
            if memory.peak_bytes > FITS * available_bytes:
                continue
            speed = estimate_speed(task.work, how, cluster, load)
            if best is None or speed.step_s < 0.995 * best.speed.step_s:
                best = Candidate(how, memory, speed)
        if best is not None:
            break  # recomputing more only costs time
    if best is not None:
        return best, None
    assert least is not None
    part, size = least.largest_parts(1)[0]
    return None, (
        f"needs at least {format_bytes(least.peak_bytes)} per rank ({part} {format_bytes(size)}), "
        f"{format_bytes(available_bytes)} is there"
    )


def _rungs(longest: int, share: float) -> list[int]:
    """Micro-batches to try: one sample, and as many as are worth it."""
    most = max(longest, int(share))
    return sorted({longest, *(min(most, max(longest, tokens)) for tokens in (4096, 16384, 65536))})
