"""Every layout that a number of devices allows: what each needs, how fast it is, and why the others are left out.

A small grid, all of it by arithmetic. `search` ranks; each row is filled in as a run of that layout would be, so that
what `auto` takes (choose.py) is a row, and the fastest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from duoka.config.schema import TrainConfig
from duoka.plan.catalog import Cluster
from duoka.plan.fill_in import fill_in
from duoka.plan.layout import AXES, Layout, Strategy
from duoka.plan.memory import FITS, Memory
from duoka.plan.sizes import ModelShape
from duoka.plan.speed import Speed, estimate_speed
from duoka.plan.task import Task, load_of, memory_of
from duoka.units import format_bytes

ALL_SIZES = 32  # ranks of which every divisor is looked at
LONG_TOKENS = 16384  # below it, cutting sequences saves nothing that cutting batches doesn't
# Of two layouts the simpler is taken unless the other is faster by this. Nothing measured here tells less apart: on
# CPUs ranks share cores and memory, and what an exchange costs there is mostly waiting for one another.
WORTH_IT = {"cuda": 1.2, "cpu": 3.0}
# Of what is equally fast, what comes earlier here. On GPUs, whose memory is what is short, fsdp is before zero1, but
# for cut matrices, beside which there is no ddp; on CPUs what exchanges least is before all that gathers.
_SIMPLE: dict[str, tuple[Strategy, ...]] = {
    "cuda": ("single", "dp", "ddp", "hsdp", "fsdp", "zero1", "zero2"),
    "cpu": ("single", "dp", "ddp", "zero1", "zero2", "hsdp", "fsdp"),
}


@dataclass(frozen=True)
class Candidate:
    layout: Layout
    memory: Memory
    speed: Speed
    mark: str = ""  # why auto does not take it

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
    """Candidates from the fastest; of each layout what it would be filled in with."""

    candidates: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]
    device: str = "cuda"

    @property
    def trainable(self) -> tuple[Candidate, ...]:
        return tuple(candidate for candidate in self.candidates if not candidate.mark)

    def best(self, axes: Mapping[str, int] | None = None) -> Candidate | None:
        """The fastest that this version trains with, or a simpler one that is as fast; of these axes, when given."""
        rows = [one for one in self.trainable if axes is None or one.layout.axes == axes]
        if not rows:
            return None
        near = [one for one in rows if WORTH_IT[self.device] * one.speed.tokens_per_s >= rows[0].speed.tokens_per_s]
        return min(near, key=lambda one: (math.prod(one.layout.axes.values()), self._place_of(one.layout)))

    def _place_of(self, layout: Layout) -> int:
        return _SIMPLE[self.device].index("ddp" if layout.strategy == "zero1" and layout.tp > 1 else layout.strategy)


def search(
    task: Task,
    cluster: Cluster,
    start: Layout,
    available_bytes: int,
    *,
    train: TrainConfig | None = None,
    asked: Mapping[str, int] | None = None,
    refused: Callable[[Layout], str | None] = lambda _: None,
    mark: Callable[[Layout], str] = lambda one: "" if one.is_trainable else NOT_TRAINED,
) -> Ranking:
    """All layouts of `cluster`; precision, packing and compile are those of `start`.

    `train` says what is left to auto, `asked` which axes a config names,
    `refused` why its other keys do not go with a layout, and `mark` why auto leaves one alone that it may be asked for.
    """
    candidates: list[Candidate] = []
    rejected: list[Rejected] = []
    for layout in layouts_of(cluster, start, task.max_length, asked):
        reason = why_not(layout, task, cluster) or refused(layout)
        if reason is None:
            filled = fill_in(train or TrainConfig(), task, layout, cluster, available_bytes).layout
            memory = memory_of(task, filled)
            if memory.peak_bytes <= FITS * available_bytes:
                speed = estimate_speed(task.work, filled, cluster, load_of(task, filled))
                candidates.append(Candidate(filled, memory, speed, mark(filled)))
                continue
            reason = _too_much(memory, available_bytes)
        rejected.append(Rejected(layout.name, reason))
    candidates.sort(key=lambda candidate: (-candidate.speed.tokens_per_s, len(candidate.layout.axes)))
    return Ranking(tuple(candidates), tuple(rejected), task.work.device)


NOT_TRAINED = "planned only: this version does not train with it"


def _too_much(memory: Memory, available_bytes: int) -> str:
    part, size = memory.largest_parts(1)[0]
    return (
        f"needs at least {format_bytes(memory.peak_bytes)} per rank ({part} {format_bytes(size)}), "
        f"{format_bytes(available_bytes)} is there"
    )


def layouts_of(
    cluster: Cluster, start: Layout, max_length: int, asked: Mapping[str, int] | None = None
) -> Iterator[Layout]:
    """Strategies times axes, in the order in which an expert would try them; those with the `asked` axes first."""
    world, per_node = cluster.num_devices, cluster.per_node
    if asked:
        tp, pp, sp = (asked.get(axis, 1) for axis in AXES)
        data = world // (tp * pp * sp)
        axes = {"tp": tp, "pp": pp, "sp": sp, "ep": 1}
        yield from (replace(start, **how, **axes) for how in _strategies(data, cluster, tp * pp, sp, start))  # type: ignore[arg-type]
    for pp in _sizes(world, min(world, 64)):
        for tp in _sizes(world // pp, per_node):
            for sp in _sizes(world // pp // tp, per_node) if max_length >= LONG_TOKENS else (1,):
                data = world // pp // tp // sp
                axes = {"tp": tp, "pp": pp, "sp": sp, "ep": 1}
                if asked and asked == {axis: size for axis, size in axes.items() if size > 1}:
                    continue
                yield from (replace(start, **how, **axes) for how in _strategies(data, cluster, tp * pp, sp, start))  # type: ignore[arg-type]


def _strategies(data: int, cluster: Cluster, cuts: int, sp: int, start: Layout) -> Iterator[dict[str, object]]:
    others = cuts * sp
    if data * sp == 1:
        yield {"dp": 1, "strategy": alone(start), "shard": 1}
        return
    names: tuple[Strategy, ...] = ("ddp", "zero1", "zero2", "fsdp") if others == 1 else ("ddp", "zero1", "fsdp")
    for name in names:
        yield {"dp": data, "strategy": name, "shard": 1 if name == "ddp" else data}
    inside = cluster.per_node // others
    if cluster.num_nodes > 1 and 1 < inside < data and data % inside == 0:
        yield {"dp": data, "strategy": "hsdp", "shard": inside}


def alone(layout: Layout) -> Strategy:
    """How one process trains: weights that lie elsewhere are gathered by fsdp, with nobody beside it."""
    return "fsdp" if layout.offload == "params" else "single"


def _sizes(limit: int, most: int) -> Iterator[int]:
    """What divides `limit`; of many ranks, powers of two and three, five and seven times those: of hundreds of ranks
    every divisor would be a long table, and no model is cut in 9 or 11."""
    yield from (size for size in range(1, most + 1) if limit % size == 0 and (limit <= ALL_SIZES or _is_usual(size)))


def _is_usual(size: int) -> bool:
    while size % 2 == 0:
        size //= 2
    return size in (1, 3, 5, 7)


def why_not(layout: Layout, task: Task, cluster: Cluster) -> str | None:
    """Why a layout makes no sense for this model on these machines, memory apart; None when it does."""
    shape = task.work.shape
    return _tensor_fault(layout, shape, cluster) or _other_fault(layout, shape, task)


def _tensor_fault(layout: Layout, shape: ModelShape, cluster: Cluster) -> str | None:
    tp = layout.tp
    if tp == 1:
        return None
    if layout.precision == "fp8":
        return "8-bit products have one scale for a whole matrix, of which tensor-parallel ranks have parts"
    for size, what in ((shape.num_heads, "heads"), (shape.num_kv_heads, "key-value heads")):
        if size % tp:
            return f"{size} {what} cannot be shared by {tp} tensor-parallel ranks"
    if shape.intermediate_size % tp:
        return f"a feed-forward width of {shape.intermediate_size} is not divisible by {tp}"
    if shape.experts is not None and layout.ep == 1:
        return "a tensor axis leaves a mixture's experts whole on each rank: parallel.expert shares them out"
    if tp > cluster.per_node:
        return f"tensor parallelism exchanges in every layer: {tp} ranks would cross nodes of {cluster.per_node}"
    if layout.strategy == "ddp":
        return "ddp adds up gradients of whole tensors, and takes none that is cut: zero1 does the same in less memory"
    return None


def _other_fault(layout: Layout, shape: ModelShape, task: Task) -> str | None:
    if layout.precision == "fp8" and layout.ep > 1:
        return "shared experts and 8-bit products have not been tried together"
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
