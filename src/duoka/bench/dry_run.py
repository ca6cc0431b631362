"""A training step of any world without the world: real model and parallelize code, fake tensors, fake process group.

`duoka plan --dry-run` calls it, to check the plan's arithmetic: peak bytes by phase, and what collectives carry, of
rank 0 of any number of ranks, on a laptop. Few layers are run, and all quantities are straight lines in their number.
DDP's reducer cannot be faked: its step is that of one process, whose gradients are views of its buckets, or add up
beside them where a step has several micro-batches. Of a pipeline, the first and the last stage are run whole.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from duoka.comm.ledger import LEDGER, Traffic
from duoka.comm.world import World
from duoka.config.schema import RunConfig
from duoka.model.attention import register_attention
from duoka.model.auto_class import config_of, language_class
from duoka.model.build import LossModel, find_core, named_part, quiet_loading
from duoka.model.dtypes import BY_PRECISION
from duoka.model.experts import use_own_experts
from duoka.model.freeze import apply_train_only, freeze_beside_text
from duoka.model.layers import find_layers
from duoka.model.lora import apply_lora
from duoka.model.split_products import Waiting
from duoka.model.storage_peak import BETWEEN, Part, StoragePeak
from duoka.optim.build import build_optimizer
from duoka.optim.clip import clip_gradients
from duoka.optim.roles import assign_roles
from duoka.parallel.apply import parallelize
from duoka.parallel.engine import Engine
from duoka.parallel.mesh import build_mesh
from duoka.parallel.pipeline import Pipeline
from duoka.parallel.precision import compute_in
from duoka.parallel.sequence import share_sequences
from duoka.plan.layout import Layout
from duoka.plan.recompute import is_share
from duoka.torch_private import FakeTensorMode, fake_store, forget_shardings
from duoka.units import parse_share_of_layers

# With prefetching and recompute, 2 layers are not yet a steady state; from 4 on everything is a straight line.
PROBED_LAYERS = (4, 8)
PHASES = ("forward", "backward", "optimizer step")


@dataclass(frozen=True)
class DryRun:
    """What one rank of the world would allocate, by phase of its second step, and send, in that step."""

    layout: str
    num_layers: int
    probed: tuple[int, ...]
    peak_bytes: int
    phases: Mapping[str, int]
    traffic: Mapping[str, Traffic]
    seconds: float
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        sent = {kind: vars(one) for kind, one in self.traffic.items()}
        return {**vars(self), "probed": list(self.probed), "phases": dict(self.phases), "traffic": sent}


def dry_run(
    config: RunConfig, facts: Mapping[str, Any], layout: Layout, sizes: Sequence[int], num_micro: int = 1
) -> DryRun:
    """Two steps on rank 0, each of micro-batches of `sizes` tokens; one of 0 is none.

    `facts` is the model's config.json. What is exchanged is that of a step's last micro-batch. Of a pipeline, the first
    and the last stage are run, with as many of `num_micro` micro-batches as are ever there at once.

    Raises ValueError for layouts that no run takes, and for packed bases.
    """
    if not layout.is_trainable:
        raise ValueError(f"{layout.name} is planned only: there is no code that would train with it")
    if config.parallel.engine != "native":
        raise ValueError("a dry run is of duoka's own engine, and parallel.engine is deepspeed")
    if config.model.quantization != "none":
        raise ValueError("packed bases are not run here; the plan above counts them")
    if layout.disk != "none" or layout.activations == "disk":
        raise ValueError("a dry run touches no disk; the plan above counts what lies there")
    started = time.perf_counter()
    layers = int(_text(facts)["num_hidden_layers"])
    # One kind of layer only: windows and experts that alternate need a whole period, as 4 and 8 have of 2 and 4.
    sizes = [size for size in sizes if size]
    if layout.pp > 1:  # a stage has few layers anyway
        probed: tuple[int, ...] = (layers,)
        ends = [_probe(config, dict(facts), layout, sizes, place, num_micro) for place in (0, layout.pp - 1)]
        runs = [max(ends, key=lambda run: max(run.peaks.values()))]
    else:
        probed = _probed_layers(layout)
        probed = probed if layers > probed[-1] else (layers,)
        runs = [_probe(config, _cut(facts, number), layout, sizes) for number in probed]
    phases = {name: _most(name, probed, runs, layers) for name in PHASES}
    kinds = dict.fromkeys(kind for run in runs for kind in run.traffic)
    carried = {
        kind: _traffic_line(probed, [run.traffic.get(kind, Traffic()) for run in runs], layers) for kind in kinds
    }
    return DryRun(
        layout=layout.name,
        num_layers=layers,
        probed=probed,
        peak_bytes=max(phases.values()),
        phases=phases,
        traffic=carried,
        seconds=time.perf_counter() - started,
        note=_note(layout),
    )


def _probed_layers(layout: Layout) -> tuple[int, ...]:
    """Of which as large a part is computed again as of the whole model."""
    least, twice = PROBED_LAYERS
    period = parse_share_of_layers(layout.recompute).denominator if is_share(layout.recompute) else 1
    times = -(-least // period) * period / least
    return round(times * least), round(times * twice)


def _note(layout: Layout) -> str:
    if layout.pp > 1:
        return "messages between stages are not sent here: the plan above counts them"
    return "DDP's exchange is not run: gradients stay here as its buckets do" if layout.strategy == "ddp" else ""


def _most(phase: str, probed: tuple[int, ...], runs: Sequence[_Probe], layers: int) -> int:
    """Of a phase's parts, each along its own line: which of them has the peak may be another of more layers."""
    parts = [part for part in runs[0].peaks if part.phase == phase and all(part in run.peaks for run in runs)]
    if len(runs) > 1:  # from one end to the other memory grows or shrinks: no peak lies between them
        parts = [part for part in parts if part.place != BETWEEN]
    return max(_line(probed, [run.peaks[part] for run in runs], layers) for part in parts)


def _line(at: tuple[int, ...], values: list[int], where: int) -> int:
    if len(at) == 1:
        return values[0]
    return round(values[0] + (values[1] - values[0]) * (where - at[0]) / (at[1] - at[0]))


def _traffic_line(at: tuple[int, ...], found: list[Traffic], where: int) -> Traffic:
    return Traffic(
        *(
            _line(at, [getattr(one, name) for one in found], where)
            for name in ("num_calls", "buffer_bytes", "sent_bytes")
        )
    )


def _text(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = facts.get("text_config")
    return inner if isinstance(inner, dict) else facts


def _cut(facts: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """The same model with fewer layers."""
    found = copy.deepcopy(dict(facts))
    inner = found["text_config"] if isinstance(found.get("text_config"), dict) else found
    inner["num_hidden_layers"] = num_layers
    if isinstance(inner.get("layer_types"), list):
        inner["layer_types"] = inner["layer_types"][:num_layers]
    return found


@dataclass(frozen=True)
class _Probe:
    peaks: Mapping[Part, int]
    traffic: Mapping[str, Traffic]


def _probe(
    config: RunConfig, facts: dict[str, Any], layout: Layout, sizes: Sequence[int], place: int = 0, num_micro: int = 1
) -> _Probe:
    """Of the first rank at a `place` of the pipeline."""
    with _fake_world(layout, place) as world:
        engine = _engine(config, facts, layout, world)
        with FakeTensorMode(allow_non_fake_inputs=True), StoragePeak() as live:
            engine.bare.to_empty(device="cpu")
            engine.bare.core.tie_weights()  # type: ignore[operator, union-attr]  # to_empty gives tied names a tensor each
            core = find_core(engine.bare)
            optimizer = build_optimizer(
                _trainable(engine),
                config.optim,
                on_host=layout.offload == "optimizer",
                share=layout.offload_share,
                roles=assign_roles(named_part(engine.bare), core, find_layers(core)),
            )
            live.hold(engine.bare)
            is_ddp = layout.strategy == "ddp" and layout.pp == 1
            adds_beside = is_ddp and config.parallel.may_be_unused and len(sizes) > 1
            beside = [torch.empty_like(one) for one in _trainable(engine).values() if adds_beside]
            run = _step
            if isinstance(engine, Pipeline):
                run = functools.partial(_step_of_stages, num_micro=num_micro)
            else:
                live.watch(find_layers(core))
            for _ in range(2):  # the optimizer's state exists from the second step on
                live.peaks.clear()
                run(engine, optimizer, layout, sizes, config.optim.clip, live)
                optimizer.zero_grad(set_to_none=not is_ddp or bool(beside))  # buckets stay, and gradients lie in them
            traffic = dict(LEDGER.traffic)
            LEDGER.traffic.clear()
    return _Probe(live.peaks, traffic)


def _trainable(engine: Engine) -> dict[str, torch.nn.Parameter]:
    # Not engine.named_trainable(), which remembers what it saw: these are other tensors after to_empty.
    return {name: p for name, p in named_part(engine.bare).named_parameters() if p.requires_grad}


def _step(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    layout: Layout,
    sizes: Sequence[int],
    clip: float,
    live: StoragePeak,
) -> None:
    device = torch.device("cpu")
    for number, tokens in enumerate(sizes, 1):
        LEDGER.traffic.clear()
        live.enter(Part("forward", number))
        ids = torch.zeros((1, tokens), dtype=torch.long)
        with engine.exchange(number == len(sizes)):
            with compute_in(layout.precision, device):
                loss, _ = engine.model(ids, ids, ids)
            live.enter(Part("backward", number))
            loss.backward()
            del loss
    engine.sum_axes()
    _update(engine, optimizer, layout, clip, live)


def _update(engine: Engine, optimizer: torch.optim.Optimizer, layout: Layout, clip: float, live: StoragePeak) -> None:
    live.enter(Part("optimizer step"))
    clip_gradients(_trainable(engine).values(), clip)
    optimizer.step()
    live.leave()


def _step_of_stages(
    engine: Pipeline,
    optimizer: torch.optim.Optimizer,
    layout: Layout,
    sizes: Sequence[int],
    clip: float,
    live: StoragePeak,
    *,
    num_micro: int,
) -> None:
    """The passes of this rank in the schedule's order; what other ranks would send arrives at once."""
    stages = engine.stages
    count = num_micro if layout.schedule == "gpipe" else min(num_micro, 2 * layout.pp * layout.virtual)
    ids = torch.zeros((1, sizes[0]), dtype=torch.long)
    shape = (*ids.shape, stages.width)
    order = engine.passes(engine.pipeline.rank, count)
    last = max((at for at, one in enumerate(order) if one.kind == "backward"), default=-1)
    held: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
    waiting: dict[tuple[int, int], Waiting] = {}
    for at, one in enumerate(order):
        live.enter(Part("forward" if one.kind == "forward" else "backward"))
        if one.kind == "forward":
            entered = torch.empty(shape, dtype=stages.dtype) if one.stage else None
            if entered is not None:
                entered.requires_grad_(stages.has_backward(one.stage - 1))
            with engine.leaving(waiting, one), compute_in(layout.precision, torch.device("cpu")):
                states, _ = engine.model(ids, ids, ids, hidden=entered, stage=one.stage)
            if stages.has_backward(one.stage):
                held[one.stage, one.micro] = entered, states
        elif one.kind == "backward":
            entered, states = held.pop((one.stage, one.micro))
            with engine.leaving(waiting, one), engine.inner.exchange(at == last):
                torch.autograd.backward(states, None if stages.is_last(one.stage) else torch.empty_like(states))
        else:
            waiting.pop((one.stage, one.micro)).finish()
        entered = states = None  # type: ignore[assignment]
    _update(engine, optimizer, layout, clip, live)


def _engine(config: RunConfig, facts: dict[str, Any], layout: Layout, world: World) -> Engine:
    """The model on the meta device, through the same code as a run's."""
    register_attention()
    dtype = BY_PRECISION[config.weights_type(layout.precision)]
    with quiet_loading(), torch.device("meta"):
        model_config = config_of(facts)
        core = language_class(model_config).from_config(model_config, dtype=dtype, attn_implementation="duoka")
        core.tie_weights()
        use_own_experts(core)
        freeze_beside_text(core)
        if config.train_only is not None:
            apply_train_only(core, config.train_only)
        lm = apply_lora(core, config.lora) if config.lora else core
    bare = LossModel(lm.train())
    if not layout.is_sharded and layout.tp * layout.pp == 1:
        # One process, whatever the number of copies; it stays on the meta device until the fake mode is entered.
        single = replace(layout, strategy="single", dp=1, shard=1, sp=1)
        if layout.sp > 1:
            share_sequences(bare, world)
        alone = replace(world, size=1, device=torch.device("meta"))
        return parallelize(bare, single, config.parallel, build_mesh(single, alone))
    return parallelize(bare, layout, config.parallel, build_mesh(layout, world))


@contextlib.contextmanager
def _fake_world(layout: Layout, place: int = 0) -> Iterator[World]:
    """The first rank at a place of the pipeline; its collectives return at once and carry nothing."""
    if dist.is_initialized():
        raise RuntimeError("a dry run makes a process group of its own, and there is one already")
    size = (layout.dp if layout.is_sharded or layout.tp * layout.pp > 1 else 1) * layout.sp * layout.tp * layout.pp
    rank = place * size // layout.pp
    dist.init_process_group("fake", rank=rank, world_size=size, store=fake_store())
    try:
        yield World(rank=rank, size=size, local_size=min(8, size), backend="fake")
    finally:
        dist.destroy_process_group()
        # What torch keeps of tensors over a mesh names groups that are gone, and the next world's mesh looks the same.
        forget_shardings()
