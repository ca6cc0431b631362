"""Tensor, pipeline and sequence axes as a config asks for them: whether they make a layout of this world.

Asked before any process starts, of the world and of the model's shape. What a layout that is only planned would need:
`why_not` in search.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

from duoka.config.layout_name import read_layout_name
from duoka.config.schema import ParallelConfig, RunConfig
from duoka.errors import Fault
from duoka.plan import deepspeed
from duoka.plan.layout import AXES, TRAINABLE_AXES, Layout
from duoka.plan.pipeline import ADDS_ONCE
from duoka.plan.sizes import ModelShape

KEYS = {"tp": "parallel.tensor", "pp": "parallel.pipeline", "sp": "parallel.sequence", "ep": "parallel.expert"}


def axes_of(parallel: ParallelConfig) -> dict[str, int]:
    """The size of each axis beside data parallelism, by the name that layouts have for it."""
    return {"tp": parallel.tensor, "pp": parallel.pipeline, "sp": parallel.sequence}


def stages_per_rank(parallel: ParallelConfig) -> int:
    """How many stages of a pipeline each of its ranks has."""
    if parallel.pipeline == 1 or parallel.schedule not in ("interleaved", "zbv"):
        return 1
    return parallel.virtual_stages or 2


def data_ranks(parallel: ParallelConfig, world_size: int) -> int:
    """How many ranks read different samples, in a world that the axes divide."""
    return world_size // math.prod(axes_of(parallel).values())


def deals_heads(num_heads: int, num_ranks: int) -> bool:
    """Whether ranks of a sequence exchange heads for tokens; else they gather keys and values, for any number of heads.

    Heads travel once each way, and keys and values stay as small as they were: preferred wherever heads divide.
    """
    return num_heads % num_ranks == 0


def key_value_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> list[int]:
    """Which key-value heads go out, rank after rank: those of a rank's query heads, equally many query heads to each.

    A head goes to each rank that asks for it, and twice to one whose query heads use their heads unequally.
    """
    own, group = num_heads // num_ranks, num_heads // num_kv_heads
    each = math.gcd(own, group)
    return [(rank * own + at) // group for rank in range(num_ranks) for at in range(0, own, each)]


def why_exchange(num_heads: int, num_ranks: int) -> str:
    """How attention works over a sequence that is cut, in words."""
    if deals_heads(num_heads, num_ranks):
        return f"all-to-all: each rank attends with {num_heads // num_ranks} of {num_heads} heads to whole rows"
    return f"all-gather: {num_heads} heads do not divide by {num_ranks}, so each gathers keys and values of whole rows"


def check_axes(parallel: ParallelConfig, world_size: int, shape: ModelShape | None = None) -> list[Fault]:
    """Axes that this version does not train with, or that do not divide the world.

    Others are advised as far as `shape` allows them, where it is known already.
    """
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
    fits = partial(_fits, parallel, shape)
    if fault := _check_name(parallel, used, world_size, fits):
        return [fault]
    inner = math.prod(used.values())
    if world_size % inner == 0:
        return _check_schedule(parallel, world_size) or _check_expert_ranks(parallel, world_size)
    words = " x ".join(f"{KEYS[axis]} {size}" for axis, size in used.items())
    how = f"{words} is {inner} processes" if len(used) > 1 else f"{words} takes {inner} processes"
    layouts = _nearest_layouts(used, world_size, fits)
    fixes = [f"share {world_size} as {layouts}{_schedule_too(parallel, layouts)}"] if layouts else []
    if shape is None and "tensor: " in layouts:
        fixes[0] += "   (where tensor divides the model's heads)"
    if fits(used) or not layouts:  # else other axes are what the model needs
        fixes.insert(0, f"start another number, such as --nproc {_nearest_multiples(world_size, inner)}")
    what = f"{how} for one copy of the model, and {world_size} are asked for, which is no multiple of it"
    return [Fault(what, key=KEYS[next(iter(used))], fix="; or ".join(fixes))]


def _schedule_too(parallel: ParallelConfig, words: str) -> str:
    """What goes with a pipeline that goes."""
    named = [f"schedule: {parallel.schedule}"] if parallel.schedule != "1f1b" else []
    named += ["virtual_stages"] if parallel.virtual_stages is not None else []
    return f"   (with pipeline: 1 delete {' and '.join(named)})" if named and "pipeline: 1" in words else ""


def _check_expert_ranks(parallel: ParallelConfig, world_size: int) -> list[Fault]:
    """Experts are shared by some of the ranks that share state or layers, those of a sequence among them."""
    ranks, what = world_size // parallel.pipeline, "ranks that add their gradients"
    what = what if parallel.tensor == 1 else "ranks that have the same layers"
    if parallel.strategy == "hsdp" and parallel.shard_ranks:
        ranks = parallel.shard_ranks * parallel.sequence * parallel.tensor
        what = "ranks that share a copy of the model"
    if ranks % parallel.expert == 0:
        return []
    return [
        Fault(
            f"parallel.expert is {parallel.expert}, and it shares experts among the {ranks} {what}: no multiple of it",
            key=KEYS["ep"],
            fix=f"write:   {_nearest_sizes('expert', parallel.expert, ranks)}",
        )
    ]


def _fits(parallel: ParallelConfig, shape: ModelShape | None, sizes: Mapping[str, int]) -> bool:
    """Whether the model's sizes allow these axes, as check_shape asks; of a model that is not known yet, any."""
    tensor = sizes.get("tp", 1)
    if shape is None:
        return True
    is_mixture = shape.experts is not None and parallel.expert == 1
    if tensor > 1 and (is_mixture or any(size % tensor for size in _cut_sizes(shape).values())):
        return False
    return sizes.get("pp", 1) * stages_per_rank(parallel) <= max(shape.num_layers, stages_per_rank(parallel))


def _check_name(
    parallel: ParallelConfig, used: dict[str, int], world_size: int, fits: Callable[[Mapping[str, int]], bool]
) -> Fault | None:
    """A layout that names its data ranks is of one number of processes."""
    name = None if parallel.layout is None else read_layout_name(parallel.layout)
    if name is None or name.dp is None or name.world_size == world_size:
        return None
    strategy = {"single": "zero1", "hsdp": "fsdp"}.get(name.strategy or "", name.strategy or "")
    layouts = _nearest_layouts({"dp": name.dp, **used}, world_size, fits, strategy)
    return Fault(
        f"parallel.layout {parallel.layout} is {name.world_size} processes, and {world_size} are asked for",
        key="parallel.layout",
        fix=f"start   --nproc {name.world_size}"
        + (f"   , or write one of {world_size}:   {layouts}" if layouts else ""),
    )


def _check_schedule(parallel: ParallelConfig, world_size: int) -> list[Fault]:
    """Ranks whose gradients are there at the end only add them then (ddp), and whole tensors, not cut ones."""
    data, tensor = data_ranks(parallel, world_size), parallel.tensor
    is_at_once = parallel.pipeline == 1 or parallel.schedule not in ADDS_ONCE
    if is_at_once or tensor == 1 or data * parallel.sequence == 1:
        return []
    return [
        Fault(
            f"parallel.schedule is {parallel.schedule}, whose data ranks add gradients of whole tensors, and tensor "
            f"{tensor} cuts them, beside {data * parallel.sequence} ranks that have gradients to add",
            key="parallel.schedule",
            fix=f"write:   schedule: 1f1b   (the state is shared: zero1), or start --nproc {tensor * parallel.pipeline}"
            + (" without sequence:" if parallel.sequence > 1 else ""),
        )
    ]


def _nearest_sizes(key: str, asked: int, common: int, least: int = 1) -> str:
    """Up to three divisors of `common`, the nearest first."""
    fitting = [size for size in range(least, common + 1) if common % size == 0]
    fitting.sort(key=lambda size: abs(math.log2(size / asked)))
    return "   or   ".join(f"{key}: {size}" for size in fitting[:3])


def _check_experts(parallel: ParallelConfig, shape: ModelShape, world_size: int) -> list[Fault]:
    size = parallel.expert
    if size == 1 and (parallel.tensor == 1 or shape.experts is None):
        return []
    if shape.experts is None:
        what = f"parallel.expert is {size}, and {shape.model_type} is no mixture of experts"
        return [Fault(what, key=KEYS["ep"], fix="delete expert")]
    count = shape.experts.num_experts
    if size == 1:
        what = f"parallel.tensor is {parallel.tensor}, and the model's {count} experts are shared out by expert: only"
        fix = _nearest_sizes("expert", parallel.tensor, math.gcd(count, world_size // parallel.pipeline), least=2)
        fix += "   and   engine: native" if fix and parallel.engine == "deepspeed" else ""
        return [Fault(what, key="parallel.tensor", fix=f"write beside it:   {fix}" if fix else "write:   tensor: 1")]
    if count % size == 0:
        return []
    fix = _nearest_sizes("expert", size, math.gcd(count, world_size))
    what = f"parallel.expert is {size}, and the model has {count} experts: no multiple of it"
    return [Fault(what, key=KEYS["ep"], fix=f"write:   {fix}")]


def check_shape(parallel: ParallelConfig, shape: ModelShape, world_size: int) -> list[Fault]:
    """Axes, and weights in 8 bits, that this model's sizes do not allow, with up to three axes that they do."""
    faults = _check_tensor(parallel, shape, world_size) + _check_experts(parallel, shape, world_size)
    faults += deepspeed.check_parts(parallel, shape, data_ranks(parallel, world_size))
    return faults + _check_layers(parallel, shape, world_size)


def _cut_sizes(shape: ModelShape) -> dict[str, int]:
    """What a tensor axis has to divide."""
    return {
        "heads": shape.num_heads,
        "key-value heads": shape.num_kv_heads,
        "units of a feed-forward block": shape.intermediate_size,
    }


def _check_tensor(parallel: ParallelConfig, shape: ModelShape, world_size: int) -> list[Fault]:
    tensor, sizes = parallel.tensor, _cut_sizes(shape)
    bad = next((f"{size} {what}" for what, size in sizes.items() if size % tensor), None)
    if bad is None:
        return []
    common = math.gcd(*sizes.values())
    fitting = [size for size in range(1, common + 1) if common % size == 0]
    fitting.sort(key=lambda size: abs(math.log2(size / tensor)))
    words, others = [], math.prod(axes_of(parallel).values()) // tensor
    for size in fitting[:3]:
        inner = size * others
        nproc = "" if world_size % inner == 0 else f" with --nproc {_nearest_multiples(world_size, inner)}"
        words.append(f"tensor: {size}{nproc}")
    return [
        Fault(
            f"parallel.tensor is {tensor}, and each rank would have a part of the model's {bad}: no multiple of it",
            key="parallel.tensor",
            fix=f"write:   {'   or   '.join(words)}",
        )
    ]


def _check_layers(parallel: ParallelConfig, shape: ModelShape, world_size: int) -> list[Fault]:
    """A stage has a layer at least."""
    size, each, num_layers = parallel.pipeline, stages_per_rank(parallel), shape.num_layers
    if size == 1 or size * each <= num_layers:
        return []
    words = "" if each == 1 else f", of {each} stages each, is {size * each} stages"
    fixes = ["schedule: 1f1b"] if each > 1 and size <= num_layers else []
    fixes = [f"write:   {_nearest_pipelines(parallel, size, num_layers // each, world_size)}", *fixes]
    what = f"parallel.pipeline {size}{words}, and the model has {num_layers} layers: a stage has at least one"
    return [Fault(what, key=KEYS["pp"], fix="   or   ".join(fixes))]


def _nearest_pipelines(
    parallel: ParallelConfig, asked: int, most: int, world_size: int, num_micro: int | None = None
) -> str:
    """`num_micro`: that feed the pipeline that was asked for; with fewer stages more data ranks share the batch."""
    ranks = world_size // (parallel.tensor * parallel.sequence)
    fitting = [size for size in range(1, max(2, min(asked, most + 1))) if ranks % size == 0]
    if num_micro is not None:
        fitting = [size for size in fitting if size == 1 or -(-num_micro * size // asked) >= size]
    fitting.sort(key=lambda size: abs(math.log2(size / asked)))
    words = "   or   ".join(f"pipeline: {size}" for size in fitting[:3])
    return words + _schedule_too(parallel, words)


def check_pipeline(config: RunConfig, layout: Layout, num_micro: int, world_size: int) -> list[Fault]:
    """A pipeline that a step's `num_micro` micro-batches cannot fill."""
    if num_micro >= layout.pp:
        return []
    less = "" if config.train.micro_batch == "auto" else "a smaller train.micro_batch (or auto), "
    return [
        Fault(
            f"parallel.pipeline {layout.pp} is fed with {num_micro} micro-batch{'es' * (num_micro > 1)} a step "
            f"({config.train.global_batch} over {layout.dp} data rank{'s' * (layout.dp > 1)}, up to {layout.micro} in "
            "each): most stages would always wait",
            key=KEYS["pp"],
            fix=f"write {less}a larger train.global_batch, or   "
            + _nearest_pipelines(config.parallel, layout.pp, num_micro, world_size, num_micro),
        )
    ]


def _nearest_multiples(world_size: int, inner: int) -> str:
    below, above = world_size // inner * inner, -(-world_size // inner) * inner
    return " or ".join(str(size) for size in (below, above) if size)


def _nearest_layouts(
    used: dict[str, int], world_size: int, fits: Callable[[Mapping[str, int]], bool], strategy: str = ""
) -> str:
    """Up to three ways to share this world whose axes are the nearest to those that were asked for.

    With a `strategy` they are names of layouts that use all of it; else keys, and data ranks are the rest.
    """
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    found: list[tuple[float, dict[str, int]]] = [(0.0, {})]
    for axis, size in used.items():
        found = [
            (far + abs(math.log2(other / size)), {**sizes, axis: other}) for far, sizes in found for other in divisors
        ]
    fitting = []
    for far, sizes in found:
        inner = math.prod(sizes.values())
        if fits(sizes) and (inner == world_size or (not strategy and world_size % inner == 0)):
            fitting.append((far, sizes))
    fitting.sort(key=lambda one: one[0])
    return " / ".join(_words_of(sizes, strategy) for _, sizes in fitting[:3])


def _words_of(sizes: dict[str, int], strategy: str) -> str:
    axes = {axis: sizes[axis] for axis in AXES if axis in sizes}
    if not strategy:
        return ", ".join(f"{KEYS[axis].removeprefix('parallel.')}: {size}" for axis, size in axes.items())
    first = f"{strategy}{'x' if strategy[-1].isdigit() else ''}{sizes['dp']}"
    return ".".join([first, *(f"{axis}{size}" for axis, size in axes.items() if size > 1)])
