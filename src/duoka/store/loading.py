"""Filling a run from a checkpoint: tensors, state, generators. Called by checkpoint.py, on all ranks together."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException

from duoka.comm.world import World
from duoka.errors import StorageError
from duoka.parallel.powersgd import inherit
from duoka.store.reader import opened
from duoka.store.resume import STATE
from duoka.store.state import TrainState, set_random_state

TRAINED = "model."  # before the names of trained tensors

if TYPE_CHECKING:
    from duoka.store.contents import Contents


def read_progress(folder: Path) -> TrainState:
    """Where a checkpoint stands, before anything of it is loaded."""
    try:
        return TrainState(**json.loads((folder / STATE).read_text(encoding="utf-8"))["progress"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{folder / STATE} cannot be read: {error}", fix="choose another checkpoint") from None


def fill_contents(folder: Path, contents: Contents, world: World) -> None:
    """Model, optimizer and state as a checkpoint of any layout has them; a fault is raised on all ranks."""
    fault = ""
    try:
        _fill_tensors(folder, contents, world)
        saved = json.loads((folder / STATE).read_text(encoding="utf-8"))
        for name, value in saved["progress"].items():
            setattr(contents.state, name, value)
        if contents.numerics.scaler.is_enabled() and saved["scaler"]:
            contents.numerics.scaler.load_state_dict(saved["scaler"])
        random = folder / random_name(world.rank)
        if random.is_file():
            # A world that grew has ranks without a saved generator: they keep their seeded one.
            set_random_state(load_file(random), world.device)
    except (CheckpointException, SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        fault = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    faults = list(dict.fromkeys(one for one in world.gather(fault) if one))
    if faults:
        raise StorageError(
            f"the checkpoint {folder} does not fit this run",
            where="\n".join(faults[:3]),
            fix="go on with the model and the version of duoka that wrote it, or start a new run",
        )


def _fill_tensors(folder: Path, contents: Contents, world: World) -> None:
    with opened(folder) as (reader, saved):
        own = contents.tensors()
        _check_all_are_trained(saved, own, world)
        inheritance = inherit(own, saved, world.rank, world.size)
        dcp.load(inheritance.named, storage_reader=reader, no_dist=world.size == 1)
        inheritance.settle()
    contents.filled()


def _check_all_are_trained(saved: Collection[str], own: Collection[str], world: World) -> None:
    """What was trained and has no place on any rank would be lost without a word."""
    here = {name.removeprefix(TRAINED) for name in saved if name.startswith(TRAINED) and name not in own}
    # Each rank of a pipeline trains some of the model's layers.
    dropped = sorted(here.intersection(*world.gather(here)))
    if dropped:
        raise ValueError(f"it holds {len(dropped):,} trained tensors that this run does not train: {dropped[0]} ...")


def random_name(rank: int) -> str:
    """The file of a rank's generators."""
    return f"random-{rank:05d}.safetensors"
