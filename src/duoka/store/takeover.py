"""What a stage takes over from the one before it, beside its weights: the optimizer state (`optim.state`).

main.py calls this once, before a run's first step and on all ranks; a resumed run has optimizer state of its own. The
checkpoint may come from any layout and number of processes.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from duoka.comm.world import World
from duoka.config.schema import OptimConfig
from duoka.errors import ConfigError, StorageError
from duoka.runs.folder import RunFolder
from duoka.runs.manifest import find_requested, is_checkpoint
from duoka.store.contents import Contents
from duoka.store.reader import opened
from duoka.store.resume import Say, config_of, find_damage, newest_valid

_AGAIN = "delete optim.state: the optimizer begins with empty state"
_MOST_SHOWN = 3


def take_over_state(optim: OptimConfig, run: RunFolder, base: Path, world: World, contents: Contents, say: Say) -> None:
    """Fill the optimizer with the state (moments, momentum) that `optim.state` names."""
    assert optim.state
    asked = optim.state
    folder = _find(asked, run, base, world, say)
    before = config_of(folder).optim.name
    if before != optim.name:
        raise ConfigError(
            f"optim.state is {asked!r}, which was trained by {before}; optim.name is {optim.name} here, and "
            "its optimizer state is incompatible",
            fix=f"write   name: {before}   or {_AGAIN}",
        )
    own = {f"optim.{k}": v for k, v in contents.engine.optimizer_tensors(contents.optimizer).items()}
    fault = ""
    with opened(folder) as (reader, saved):
        sizes = {name: tuple(one.size) for name, one in saved.items() if hasattr(one, "size")}
        _compare(asked, own, sizes, world)
        try:
            dcp.load(own, storage_reader=reader, no_dist=world.size == 1)
        except (CheckpointException, SafetensorError, OSError, ValueError) as error:
            fault = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    faults = list(dict.fromkeys(one for one in world.gather(fault) if one))
    if faults:
        raise StorageError(
            f"optim.state is {asked!r}, and {folder} cannot be read", where="\n".join(faults), fix=_AGAIN
        )
    say(f"the optimizer begins with the state of {folder}")


def _find(asked: str, run: RunFolder, base: Path, world: World, say: Say) -> Path:
    place: Path | None = world.agree(find_requested(asked, run, base) if world.is_main else None)
    found: Path | None = place
    if place is not None and not is_checkpoint(place):
        found = newest_valid(place, world, say)
    elif place is not None and (fault := find_damage(place, world)):
        raise StorageError(f"optim.state is {asked!r}, which is damaged", where=fault, fix=_AGAIN)
    if found is None:
        there = "there is no such folder" if place is None else f"there is no checkpoint in {place}"
        raise ConfigError(
            f"optim.state is {asked!r}: {there}",
            fix=f"write the folder of the run before, such as runs/base (not its final), or {_AGAIN}",
        )
    return found


def _compare(asked: str, own: dict[str, torch.Tensor], saved: dict[str, tuple[int, ...]], world: World) -> None:
    """Refuse, on all ranks alike, optimizer state that is missing or of other shapes."""
    wanted: dict[str, tuple[int, ...]] = {}
    for part in world.gather({name: tuple(tensor.shape) for name, tensor in own.items()}):
        wanted |= part
    wrong = [
        f"{name.removeprefix('optim.')}: {saved.get(name, 'none')} there, {size} here"
        for name, size in wanted.items()
        if saved.get(name) != size
    ]
    if wrong:
        more = [f"and {len(wrong) - _MOST_SHOWN:,} more"] if len(wrong) > _MOST_SHOWN else []
        raise ConfigError(
            f"optim.state is {asked!r}, and its optimizer state does not fit the parameters that are trained here",
            where="\n".join([*wrong[:_MOST_SHOWN], *more]),
            fix=f"begin with that run's own model, or {_AGAIN}",
        )
