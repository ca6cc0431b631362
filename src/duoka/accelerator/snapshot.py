"""save_state and load_state: everything that a loop needs to go on as if it had never stopped.

Stands on the checkpoints of `duoka train` (full logical tensors by name, whole or not there, any world size reads
them), and adds what people's own loops bring: any optimizer, schedulers, loaders' places, their own objects.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from duoka.accelerator.json_state import pack, room_for, unpack
from duoka.accelerator.loaders import PreparedLoader
from duoka.accelerator.optimizer_state import pack_optimizer, room_for_optimizer
from duoka.accelerator.prepared import PreparedModel, PreparedOptimizer, PreparedScheduler
from duoka.accelerator.readings import Reading
from duoka.comm.world import World
from duoka.errors import ConfigError, StorageError
from duoka.model.build import named_part
from duoka.parallel.precision import Numerics
from duoka.plan.layout import Layout
from duoka.runs.versions import library_versions
from duoka.store.checkpoint import CheckpointStore, Facts
from duoka.store.resume import STATE, find_damage, newest_valid
from duoka.store.state import read_random_state, set_random_state

FOLDER = "state"  # inside the folder that people name, beside whatever else they write there


@dataclass
class LoopState:
    """What is no tensor; JSON."""

    step: int = 0
    shapes: dict[str, list[int]] = field(default_factory=dict)
    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    loaders: list[Any] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    num_open: int = 0  # micro-batches of a window that the save came into; they are done again


@dataclass(frozen=True)
class Opened:
    """A window that a save comes into: the batch that it began with, and how many micro-batches are done."""

    reading: Reading
    num_done: int


@dataclass
class Parts:
    """What was prepared and registered, in that order."""

    models: list[PreparedModel] = field(default_factory=list)
    optimizers: list[PreparedOptimizer] = field(default_factory=list)
    schedulers: list[PreparedScheduler] = field(default_factory=list)
    loaders: list[PreparedLoader] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)


@dataclass
class Snapshot:
    """What CheckpointStore writes and fills in place."""

    numerics: Numerics
    state: LoopState
    named: dict[str, torch.Tensor]

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.named

    def filled(self) -> None:
        """Nothing is made of them."""


def save_snapshot(
    target: Path, parts: Parts, numerics: Numerics, world: World, step: int, opened: Opened | None
) -> None:
    """With a window `opened`, its loader's place and the generators are those of its beginning."""
    state, named = LoopState(step, num_open=opened.num_done if opened else 0), _model_tensors(parts)
    names = {id(p): name for name, p in named.items()}
    for number, optimizer in enumerate(parts.optimizers):
        state.optimizers.append(pack_optimizer(optimizer.inner, number, names, named, world))
    state.schedulers = [pack(s.inner.state_dict(), named, f"scheduler{i}") for i, s in enumerate(parts.schedulers)]
    places = [
        opened.reading.place_before if opened and opened.reading.loader is loader else loader.state_dict()
        for loader in parts.loaders
    ]
    state.loaders = [pack(place, named, f"loader{i}") for i, place in enumerate(places)]
    state.objects = [pack(one.state_dict(), named, f"object{i}") for i, one in enumerate(parts.objects)]
    state.shapes = {name: list(tensor.shape) for name, tensor in named.items()}
    if world.is_main:
        target.parent.mkdir(parents=True, exist_ok=True)
    world.barrier()
    named |= _extra_tensors(parts)
    snapshot = Snapshot(numerics, state, {name: tensor.detach() for name, tensor in named.items()})
    with _open_store(target, parts, world) as store, _generators_of(opened, world):
        store.write(target, snapshot)  # type: ignore[arg-type]


def load_snapshot(folder: Path, parts: Parts, numerics: Numerics, world: World) -> int:
    """Returns the optimizer steps done."""
    source = _find(folder, world)
    saved = json.loads((source / STATE).read_text(encoding="utf-8"))["progress"]
    _check_counts(saved, parts, folder)
    named = _model_tensors(parts, saved["shapes"])
    restored = [
        room_for_optimizer(optimizer.inner, number, saved["optimizers"][number], named)
        for number, optimizer in enumerate(parts.optimizers)
    ]
    for kind in ("schedulers", "loaders", "objects"):
        named |= room_for(saved[kind])
    _check_shapes(saved["shapes"], named, folder)
    named |= _extra_tensors(parts)
    snapshot = Snapshot(numerics, LoopState(), {name: tensor.detach() for name, tensor in named.items()})
    with _open_store(source, parts, world) as store:
        store.load(source, snapshot)  # type: ignore[arg-type]
    for optimizer, state in zip(parts.optimizers, restored, strict=True):
        optimizer.inner.load_state_dict(state)
    for kind, each in (("schedulers", [s.inner for s in parts.schedulers]), ("loaders", parts.loaders),
                       ("objects", parts.objects)):  # fmt: skip
        for one, packed in zip(each, saved[kind], strict=True):
            one.load_state_dict(unpack(packed, named))
    for loader in parts.loaders:
        loader.num_open = int(saved.get("num_open", 0))
    return int(saved["step"])


@contextmanager
def _generators_of(opened: Opened | None, world: World) -> Iterator[None]:
    """Inside, random generators are where they were when the window began."""
    now = read_random_state(world.device)
    if opened is not None:
        set_random_state(opened.reading.random_before.tensors(), world.device)
    try:
        yield
    finally:
        set_random_state(now, world.device)


def newest(folder: Path, world: World, say: Callable[[str], None]) -> Path:
    """The newest whole checkpoint among `folder`'s."""
    found = newest_valid(folder, world, say)
    if found is None:
        raise StorageError(f"there is no checkpoint in {folder}", fix="name the folder that save_state was given")
    return found


def newest_of(folders: list[Path], parent: Path, world: World) -> Path:
    """The last of `folders` that is whole."""
    for folder in reversed(world.agree(folders)):
        if not find_damage(folder / FOLDER, world):
            return folder
    raise StorageError(f"there is no whole checkpoint in {parent}", fix="name the folder that save_state was given")


@contextmanager
def _open_store(target: Path, parts: Parts, world: World) -> Iterator[CheckpointStore]:
    """For one save or load, after which the script goes on at once: nothing is written behind its back."""
    layout = parts.models[0].layout if parts.models else Layout(dp=world.size, strategy="ddp")
    facts = Facts(versions=library_versions())
    store = CheckpointStore(target.parent, world, layout, facts, asynchronous=False)
    try:
        yield store
    finally:
        store.close()


def _find(folder: Path, world: World) -> Path:
    """The checkpoint itself, whole."""
    source = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    fault = find_damage(source, world) if world.agree(source.is_dir()) else "there is no such folder"
    if fault:
        raise StorageError(f"{folder} cannot be loaded: {fault}", fix="name another folder that save_state wrote")
    return source


def _model_tensors(parts: Parts, saved: Container[str] = ()) -> dict[str, torch.Tensor]:
    """Weights and persistent buffers by name; of models with adapters, only what is trained.

    Of what an optimizer has beside them, also what was trained and is frozen by now: `saved` knows it.
    """
    named: dict[str, torch.Tensor] = {}
    for number, model in enumerate(parts.models):
        model.engine.settle()
        lm = named_part(model.bare)
        prefix = f"model{number or ''}."
        adapters_only = hasattr(lm, "peft_config")
        named |= {prefix + n: p for n, p in lm.named_parameters() if p.requires_grad or not adapters_only}
        if not adapters_only:
            named |= {prefix + name: buffer for name, buffer in _kept_buffers(lm)}
    for number, optimizer in enumerate(parts.optimizers):
        known = {id(tensor) for tensor in named.values()}
        loose = {f"loose{number}.{i}": p for i, p in enumerate(p for p in optimizer.parameters() if id(p) not in known)}
        # Frozen weights of a base that is not saved have no state either.
        named |= {n: p for n, p in loose.items() if p.requires_grad or optimizer.state.get(p) or n in saved}
    return named


def _extra_tensors(parts: Parts) -> dict[str, torch.Tensor]:
    """What compressed gradients left out so far: each rank's own, and none where gradients travel whole."""
    named: dict[str, torch.Tensor] = {}
    for number, model in enumerate(parts.models):
        named |= model.engine.extra_tensors(f"model{number or ''}.")
    return named


def _kept_buffers(lm: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in lm.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _check_counts(saved: dict[str, Any], parts: Parts, folder: Path) -> None:
    for kind in ("optimizers", "schedulers", "loaders", "objects"):
        here, there = len(getattr(parts, kind)), len(saved[kind])
        if here != there:
            raise ConfigError(
                f"{folder} was saved with {there} {kind}, and {here} are prepared here",
                fix="prepare and register the same things, in the same order, before load_state",
            )


def _check_shapes(saved: dict[str, list[int]], named: dict[str, torch.Tensor], folder: Path) -> None:
    for name, tensor in named.items():
        if name not in saved or saved[name] != list(tensor.shape):
            there = f"of shape {saved[name]}" if name in saved else "missing"
            here = list(tensor.shape)
            raise ConfigError(
                f"{folder} was saved from another model: {name} is of shape {here} here and {there} there"
            )
