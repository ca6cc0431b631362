"""The one fixed order of making a model parallel: pipeline, tensor, expert, sequence, fp8, fused, recompute,
activations, compile, data.

For `duoka train`, whose model is a LossModel, and for any module that people's own loops bring (duoka.Accelerator).
What is in brackets arrives with later parts, at its place in STEPS. A new way to share the work is an engine in a file
of its own, and its name in ENGINES.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from duoka.config.schema import GRAPHS, ParallelConfig
from duoka.errors import ConfigError
from duoka.model.build import LossModel, find_core, named_part
from duoka.model.fp8 import apply_fp8
from duoka.model.fused import apply_fused
from duoka.model.kernels import why_no_launch
from duoka.model.layers import find_layers
from duoka.model.pipeline_stages import cut_model
from duoka.model.shards import Weights
from duoka.model.steady import Steady
from duoka.parallel.activations import ActivationsElsewhere
from duoka.parallel.ddp import Ddp
from duoka.parallel.deepspeed import DeepSpeed
from duoka.parallel.deepspeed_tensor import cut_by_autotp
from duoka.parallel.dp import DataParallel
from duoka.parallel.engine import Engine, EngineSpec
from duoka.parallel.expert import share_experts
from duoka.parallel.mesh import Mesh
from duoka.parallel.pipeline import Pipeline
from duoka.parallel.recompute import apply_recompute
from duoka.parallel.sequence import share_sequences
from duoka.parallel.sharded import Sharded
from duoka.parallel.single import Single
from duoka.parallel.tensor import cut_matrices
from duoka.plan.layout import Layout


class Step(NamedTuple):
    """One change of the model's modules, in place."""

    name: str
    applies: Callable[[EngineSpec], bool]
    apply: Callable[[EngineSpec], None]


def _cut_stages(spec: EngineSpec) -> None:
    assert isinstance(spec.bare, LossModel)
    layout = spec.layout
    spec.bare.stages = cut_model(spec.bare.core, spec.mesh.place["pp"], layout.pp, layout.virtual, layout.schedule)


def _share_sequences(spec: EngineSpec) -> None:
    share_sequences(spec.bare, spec.mesh.sequence)


def _use_fp8(spec: EngineSpec) -> None:
    apply_fp8(find_core(spec.bare), again=spec.layout.is_sharded or spec.layout.activations != "none")


def _fuse(spec: EngineSpec) -> None:
    apply_fused(named_part(spec.bare), keeps_products=spec.layout.recompute == "selective")


def _recompute(spec: EngineSpec) -> None:
    drops = spec.bare.drops if isinstance(spec.bare, LossModel) else None
    apply_recompute(named_part(spec.bare), spec.layout.recompute, drops, compiled=bool(spec.layout.compile))


def _move_activations(spec: EngineSpec) -> None:
    folder = spec.folder if spec.layout.activations == "disk" else None
    spec.moved.activations = ActivationsElsewhere(spec.bare, spec.mesh.everyone.device, folder)


def _check_compiles(bare: LossModel) -> None:
    core: Any = bare.core
    if bare.drops is not None and bare.drops.own:
        raise ConfigError(
            "train.compile: true, and the model's config.json asks for dropout inside its layers",
            where="this dropout is counted call by call, which compiled layers cannot do",
            fix="set the dropout in config.json to 0, or write   compile: false",
        )
    if core.config._attn_implementation == "sdpa":
        raise ConfigError(
            f"train.compile: true, and model type {core.config.model_type} is computed by its own attention",
            where="compiled for two threads of a CPU, Falcon's gave gradients that were off by half of their size",
            fix="write   compile: false",
        )


def _compile(spec: EngineSpec) -> None:
    if isinstance(spec.bare, LossModel):
        _check_compiles(spec.bare)
    core, layout = find_core(spec.bare), spec.layout
    layers = find_layers(core)
    why_not = "rows have other lengths"
    if spec.row_tokens:
        why_not = why_no_launch(core, layout, spec.mesh.everyone.device, "room")
    if layout.compile == GRAPHS and (why_not or layout.recompute != "none" or layout.strategy not in ("single", "ddp")):
        raise ConfigError(
            f"train.compile is {GRAPHS}, and layers cannot be recorded as CUDA graphs here",
            where=why_not or f"recompute is {layout.recompute}, the layout {layout.name}",
            fix="write   compile: true",
        )
    if why_not or not isinstance(spec.bare, LossModel):
        for layer in layers:
            layer.compile(dynamic=True)  # lengths differ from micro-batch to micro-batch
        return
    spec.bare.steady = Steady(spec.row_tokens, layout.compile == GRAPHS, layers)
    for layer in layers:
        layer.compile(dynamic=False, **({"mode": GRAPHS} if layout.compile == GRAPHS else {}))


def _cut(spec: EngineSpec) -> None:
    cut = cut_by_autotp if spec.parallel.engine == "deepspeed" else cut_matrices
    cut(spec.bare, spec.mesh)


def _share_experts(spec: EngineSpec) -> None:
    share_experts(find_core(spec.bare), spec.mesh)


STEPS = (
    Step("pipeline", lambda spec: spec.layout.pp > 1, _cut_stages),
    Step("tensor", lambda spec: spec.layout.tp > 1, _cut),
    Step("expert", lambda spec: spec.layout.ep > 1, _share_experts),
    Step("sequence", lambda spec: spec.layout.sp > 1, _share_sequences),
    Step("fp8", lambda spec: spec.layout.precision == "fp8", _use_fp8),  # before parts that have such products inside
    Step("fused", lambda spec: isinstance(spec.bare, LossModel) and not spec.layout.compile, _fuse),
    Step("recompute", lambda spec: spec.layout.recompute != "none", _recompute),
    Step("activations", lambda spec: spec.layout.activations != "none", _move_activations),
    Step("compile", lambda spec: bool(spec.layout.compile), _compile),
)

# Last, over all of that: how data ranks share weights, gradients and state. A pipeline has one of these inside it.
ENGINES: Mapping[str, Callable[[EngineSpec], Engine]] = {
    "single": Single,
    "dp": DataParallel,
    "ddp": Ddp,
    "zero1": Sharded,
    "zero2": Sharded,
    "fsdp": Sharded,
    "hsdp": Sharded,
}


def parallelize(
    bare: torch.nn.Module,
    layout: Layout,
    parallel: ParallelConfig,
    mesh: Mesh,
    source: Weights | None = None,
    matrices: Collection[str] = (),
    folder: Path | None = None,
    row_tokens: int = 0,
    drives_passes: bool = True,
) -> Engine:
    """Apply the layout. With `source` the model is on the meta device still, and is filled once it is sharded.

    `matrices` names what the optimizer needs whole: under zero1 and zero2 each has a rank that owns it.
    In `folder` lies what is offloaded to a disk. `row_tokens`: the length of every row, where it never changes.
    `drives_passes`: the engine's own `forward_backward` does.
    """
    spec = EngineSpec(bare, layout, parallel, mesh, source, matrices, folder or Path(), row_tokens, drives_passes)
    for step in STEPS:
        if step.applies(spec):
            step.apply(spec)
    if parallel.engine == "deepspeed":
        return DeepSpeed(spec)
    return Pipeline(spec) if layout.pp > 1 else ENGINES[layout.strategy](spec)
