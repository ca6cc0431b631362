"""The final folder of a run: a result that no rank holds as a whole, written by all of them; own loops' weights too.

transformers itself says what the folder holds (names, files, index, config) from a model without values. Rank 0 writes
the headers of those files, and each rank puts the rows that it has at their places in them: nothing is gathered.
Adapters are small, and some models' files hold other tensors than the model does: of these rank 0 has all, one by one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from duoka.comm.world import World, close_side_world, open_side_world
from duoka.errors import StorageError
from duoka.hub.new_model import copy_processor_files
from duoka.hub.saving import without_deepspeed
from duoka.model.dtypes import stays_wide
from duoka.model.result import (
    add_stop_token,
    base_dtype,
    copy_tokenizer,
    name_dtype,
    put_in_place,
    write_beside,
    write_result,
)
from duoka.optim.disk_file import find_on_disk
from duoka.parallel.flat_shard import is_cut_flat, part_of_cut
from duoka.parallel.gather import gather_state
from duoka.parallel.mesh import Mesh
from duoka.parallel.tensor_part import part_of, whole_shape
from duoka.process.no_room import disk_error, more_room
from duoka.runs.heart import Heart
from duoka.torch_private import compute_local_shape_and_global_offset

_WRITE_BYTES = 1 << 26  # at a time: a sign of life after each


@dataclass(frozen=True)
class ResultSources:
    """What the folder takes from elsewhere: config and type of the base, the tokenizer, a template not its own.

    `stop_id`: the token that training ended answers with.
    """

    base: Path
    tokenizer: Path
    chat_template: str | None = None
    beside: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)  # further files, small
    stop_id: int | None = None


@dataclass(frozen=True)
class _Slot:
    """Where a tensor lies: in which file, from which byte on, in which type."""

    file: str
    start: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Draft:
    """What all ranks know before they write."""

    folder: str
    slots: Mapping[str, _Slot]  # by the model's own names


def write_final(lm: torch.nn.Module, mesh: Mesh, sources: Callable[[], ResultSources], final: Path) -> None:
    """Write the result, on all ranks together; an older one is replaced in one step, when the new one is whole.

    `sources` is asked on rank 0 alone. Nobody waits in training's group, whose patience is that of a step: a rank
    that writes shows that it moves, and the others have a day.
    """
    side = open_side_world(mesh.everyone)
    try:
        _write_final(lm, mesh, side, sources, final)
    finally:
        close_side_world(side)


def _write_final(
    lm: torch.nn.Module, mesh: Mesh, side: World, sources: Callable[[], ResultSources], final: Path
) -> None:
    heart = mesh.everyone.heart
    with contextlib.ExitStack() as cleaning:
        told: ResultSources | None = None
        draft: _Draft | None = None
        with _shared_fault(side, final):
            if side.is_main:
                told = sources()
                add_stop_token(lm, told.stop_id)
                draft = _begin(lm, mesh, base_dtype(told.base), final.parent, f".{final.name}.", {})
                if draft is not None:
                    cleaning.callback(shutil.rmtree, draft.folder, ignore_errors=True)
        draft = side.agree(draft)
        if draft is None:
            whole = gather_state(lm, keep=side.is_main, pipeline=mesh.pipeline)
            heart.tell("end")
            with _shared_fault(side, final):
                if told is not None:
                    write_result(
                        lm, told.base, final, whole, tokenizer_folder=told.tokenizer,
                        chat_template=told.chat_template, beside=told.beside,
                    )  # fmt: skip
            return
        with _shared_fault(side, final):
            _write_own(lm, draft, mesh, heart)
        with _shared_fault(side, final):
            if told is not None:
                copy_tokenizer(told.tokenizer, Path(draft.folder), told.chat_template)
                copy_processor_files(told.base, Path(draft.folder))
                write_beside(told.beside, Path(draft.folder))
                put_in_place(Path(draft.folder), final)
                for left in final.parent.glob(f".{final.name}.*"):  # by a process that was killed in here
                    shutil.rmtree(left, ignore_errors=True)


def write_weights(lm: torch.nn.Module, mesh: Mesh, folder: Path, options: Mapping[str, Any]) -> bool:
    """Weights in their own types, with config, beside what else is in `folder`; on all ranks together.

    `options` go to save_pretrained. False, and nothing written, where only whole tensors would do.
    """
    side = open_side_world(mesh.everyone)
    try:
        with contextlib.ExitStack() as cleaning:
            draft: _Draft | None = None
            with _shared_fault(side, folder, LOOP_GOES_ON):
                if side.is_main:
                    folder.mkdir(parents=True, exist_ok=True)
                    draft = _begin(lm, mesh, None, folder, ".draft.", options)
                    if draft is not None:
                        cleaning.callback(shutil.rmtree, draft.folder, ignore_errors=True)
            draft = side.agree(draft)
            if draft is None:
                return False
            with _shared_fault(side, folder, LOOP_GOES_ON):
                _write_own(lm, draft, mesh, mesh.everyone.heart)
            with _shared_fault(side, folder, LOOP_GOES_ON):
                if side.is_main:
                    for path in sorted(Path(draft.folder).iterdir()):
                        path.replace(folder / path.name)
        return True
    finally:
        close_side_world(side)


RUN_GOES_ON = (
    "the last checkpoint is whole, and a result that was there before is unchanged",
    "{room} there, then start the same command again: it trains no step anew",
)
LOOP_GOES_ON = ("", "{room} there, or name another folder")


@contextlib.contextmanager
def _shared_fault(side: World, final: Path, words: tuple[str, str] = RUN_GOES_ON) -> Iterator[None]:
    """What one rank's disk refuses ends all of them here: none waits for one that has left."""
    fault: OSError | None = None
    try:
        yield
    except Exception as error:
        # A library in another language raises a kind of its own for a full disk.
        fault = error if isinstance(error, OSError) else disk_error(error)
        if fault is None:
            raise
    told = side.gather(None if fault is None else (fault.strerror or str(fault), more_room(fault)))
    reasons = dict(one for one in told if one is not None)
    if reasons:
        raise StorageError(
            f"the result could not be written to {final}: {'; '.join(reasons)}",
            where=words[0],
            fix=words[1].format(room=next(iter(reasons.values()))),
        ) from fault


# --- rank 0: what will lie where ---


def _begin(
    lm: torch.nn.Module, mesh: Mesh, dtype: torch.dtype | None, place: Path, prefix: str, options: Mapping[str, Any]
) -> _Draft | None:
    """A draft in `place` with everything but values in it; None when the files hold what the ranks do not have as it
    is. Without a `dtype` tensors keep their own."""
    # A rank of a pipeline knows neither the names nor the sizes of the others' layers.
    if hasattr(lm, "peft_config") or mesh.pipeline.size > 1:
        return None
    metas: dict[int, torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}
    is_wide = stays_wide(lm, dtype or torch.float32)
    for name, tensor in lm.state_dict(keep_vars=True).items():
        wanted = torch.float32 if is_wide(name) else dtype
        kind = wanted if wanted is not None and tensor.is_floating_point() else tensor.dtype
        # Shared tensors stay shared, so that transformers finds tied heads and plans them once.
        state[name] = metas.setdefault(id(tensor), torch.empty(whole_shape(tensor), dtype=kind, device="meta"))
    # As transformers orders a model that it loaded itself: which tensors share a file depends on the order, and a model
    # that was built without its weights has another.
    state = {name: state[name] for name in sorted(state, key=_natural)}
    name_of = {id(meta): name for name, meta in reversed(state.items())}
    draft = Path(tempfile.mkdtemp(dir=place, prefix=prefix))
    try:
        files = _plan_files(lm, draft, state, options)
        planned = [tensor for tensors, _ in files.values() for tensor in tensors.values()]
        if not planned or any(id(tensor) not in name_of for tensor in planned):
            shutil.rmtree(draft)
            return None
        if dtype is not None:
            name_dtype(draft, dtype)
        slots: dict[str, _Slot] = {}
        for file, (tensors, metadata) in files.items():
            header, starts, size = _layout(tensors, metadata)
            with (draft / file).open("wb") as out:
                out.write(header)
                out.truncate(size)
            for name, start in starts.items():
                slots[name_of[id(tensors[name])]] = _Slot(file, start, tensors[name].dtype)
    except BaseException:  # a Ctrl-C too must leave no half-written folder behind; it goes on upwards
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return _Draft(os.fspath(draft), slots)


def _natural(name: str) -> list[tuple[bool, str, int]]:
    """layers.2 before layers.10, fc2 before fc10."""
    key = []
    for part in name.split("."):
        text = part.rstrip("0123456789")
        key.append((bool(text), text, int(part[len(text) :] or -1)))
    return key


_Files = dict[str, tuple[dict[str, torch.Tensor], dict[str, str]]]


def _plan_files(lm: torch.nn.Module, draft: Path, state: dict[str, torch.Tensor], options: Mapping[str, Any]) -> _Files:
    """Let transformers write config and index, and note what it would write into which file."""
    from transformers import modeling_utils

    files: _Files = {}

    def note(tensors: dict[str, torch.Tensor], path: str | Path, metadata: dict[str, str] | None = None) -> None:
        files[Path(path).name] = (dict(tensors), metadata or {})

    # Its one call of safetensors; which names, splits and ties lead there is transformers' own affair.
    write, modeling_utils.safe_save_file = modeling_utils.safe_save_file, note  # type: ignore[assignment]
    try:
        with without_deepspeed():
            lm.save_pretrained(os.fspath(draft), state_dict=state, **options)  # type: ignore[operator]
    finally:
        modeling_utils.safe_save_file = write
    return files


def _layout(tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> tuple[bytes, dict[str, int], int]:
    """A safetensors file without its values: (its head, at which byte each tensor starts, its size)."""
    from safetensors.torch import save

    # The order is the library's: it is read off a file of as many tensors with one element each.
    small = save({name: torch.zeros(1, dtype=tensor.dtype) for name, tensor in tensors.items()})
    (length,) = struct.unpack("<Q", small[:8])
    known = json.loads(small[8 : 8 + length])
    ordered = sorted(tensors, key=lambda name: known[name]["data_offsets"][0])
    head: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    starts, at = {}, 0
    for name in ordered:
        size = tensors[name].numel() * tensors[name].element_size()
        starts[name] = at
        head[name] = {
            "dtype": known[name]["dtype"], "shape": list(tensors[name].shape), "data_offsets": [at, at + size],
        }  # fmt: skip
        at += size
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, {name: begin + start for name, start in starts.items()}, begin + at


# --- every rank: its own values ---


def _write_own(lm: torch.nn.Module, draft: _Draft, mesh: Mesh, heart: Heart) -> None:
    """What this rank has of each tensor goes to its place; of equal copies one rank's, in turn."""
    state = lm.state_dict(keep_vars=True)
    with contextlib.ExitStack() as open_files:
        files: dict[str, int] = {}
        for number, (name, slot) in enumerate(draft.slots.items()):
            for local, offset in _own_boxes(state[name], number, mesh):
                if slot.file not in files:
                    files[slot.file] = os.open(Path(draft.folder, slot.file), os.O_WRONLY)
                    open_files.callback(os.close, files[slot.file])
                values = local.to("cpu", slot.dtype).contiguous()
                write_box(files[slot.file], slot.start, values, tuple(whole_shape(state[name])), offset, heart)
                if (place := find_on_disk(local)) is not None:
                    place[0].let_go()  # mapped, it counts as this process's memory
        for handle in files.values():
            os.fsync(handle)  # before the name says that it is whole


_Box = tuple[torch.Tensor, tuple[int, ...]]


def _own_boxes(tensor: torch.Tensor, number: int, mesh: Mesh) -> list[_Box]:
    """(values, where they begin in the whole tensor) of what this rank writes."""
    part = part_of(tensor)
    if is_cut_flat(tensor):
        if part is None and number % mesh.tensor.size != mesh.tensor.rank:  # who shares matrices has the same of it
            return []
        return [(values, offset) for offset, values in part_of_cut(tensor).boxes()]
    if part is not None:
        return [(tensor.detach(), part.offset)] if number % mesh.loss.size == mesh.loss.rank else []
    box = _own_box(tensor.detach(), number, mesh)
    return [] if box is None else [box]


def _own_box(tensor: torch.Tensor, number: int, mesh: Mesh) -> _Box | None:
    if not isinstance(tensor, DTensor):
        world = mesh.everyone
        return (tensor, (0,) * tensor.dim()) if number % world.size == world.rank else None
    grid = tensor.device_mesh
    place = grid.get_coordinate()
    assert place is not None
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate) and place[axis] != number % grid.size(axis):
            return None
    local = tensor.to_local()
    _, offset = compute_local_shape_and_global_offset(tensor.shape, grid, tensor.placements)
    return (local, tuple(offset)) if local.numel() else None


def write_box(
    handle: int, start: int, values: torch.Tensor, whole: tuple[int, ...], offset: tuple[int, ...], heart: Heart
) -> None:
    """`values` at their place in a tensor of shape `whole` whose bytes begin at `start`."""
    size = values.element_size()
    raw = values.reshape(-1).view(torch.uint8).numpy().data if values.numel() else memoryview(b"")
    # The outer dims that do not lie end to end in the file; inside them, one run of bytes each.
    cut = max((dim for dim in range(values.dim()) if values.shape[dim] != whole[dim]), default=0)
    strides = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    run = math.prod(values.shape[cut:]) * size
    for number, place in enumerate(itertools.product(*(range(values.shape[dim]) for dim in range(cut)))):
        at = [offset[dim] + (place[dim] if dim < cut else 0) for dim in range(len(whole))]
        where = start + size * sum(one * stride for one, stride in zip(at, strides, strict=True))
        write_run(handle, raw[number * run : (number + 1) * run], where, heart)


def write_run(handle: int, raw: memoryview, where: int, heart: Heart) -> None:
    done = 0
    while done < len(raw):
        done += os.pwrite(handle, raw[done : done + _WRITE_BYTES], where + done)
        if done >= _WRITE_BYTES or len(raw) >= _WRITE_BYTES:
            heart.tell("end")
