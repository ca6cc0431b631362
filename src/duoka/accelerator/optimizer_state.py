"""The state of people's own optimizers, to named tensors and JSON and back: whole, whatever a rank holds of it.

Under sharding a tensor of it may be a DTensor, this rank's plain part of one, or the same on every rank. A form is kept
beside each, so that it comes back as what it was, on any number of ranks. Called by snapshot.py on all ranks.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, zeros

from duoka.accelerator.json_state import pack, room_for, unpack
from duoka.accelerator.nested import map_tensors, tensors_in
from duoka.comm.world import World
from duoka.errors import ConfigError

# How a tensor lies beside a sharded parameter: a part of a tensor like it, the same on every rank, or a DTensor's axes
# (of which each is the dim that it shards, or None).
Form = str | list[int | None]
_PART, _PLAIN = "part", "plain"


@dataclass(frozen=True)
class _Value:
    """One entry of a parameter's state."""

    name: str  # of the parameter
    kind: str
    parameter: torch.Tensor
    value: Any

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.kind


def pack_optimizer(
    optimizer: torch.optim.Optimizer, number: int, names: dict[int, str], named: dict[str, torch.Tensor], world: World
) -> dict[str, Any]:
    """Tensors of its state go into `named`, under their parameters' names; the rest is returned."""
    values = [
        _Value(names[id(parameter)], kind, parameter, value)
        for parameter, state in optimizer.state.items()
        for kind, value in state.items()
    ]
    own = f"optim{number or ''}"
    parts = _find_parts(values, world)
    rest: dict[str, Any] = {names[id(parameter)]: {} for parameter in optimizer.state}
    for one in values:
        whole = map_tensors(one.value, partial(_whole, parameter=one.parameter, is_part=one.key in parts))
        found: dict[str, torch.Tensor] = {}
        packed = pack(whole, found, f"{own}.{one.kind}.{one.name}")
        named |= found
        forms = [_form(tensor, one.parameter, one.key in parts) for tensor in tensors_in(one.value)]
        rest[one.name][one.kind] = {"value": packed, "forms": dict(zip(found, forms, strict=True))}
    groups = [
        {key: pack(value, named, f"{own}.group{i}.{key}") for key, value in _plain(group).items()}
        for i, group in enumerate(optimizer.param_groups)
    ]
    return {"state": rest, "groups": groups}


def _find_parts(values: list[_Value], world: World) -> set[tuple[str, str]]:
    """The values that are each rank's own part of a tensor like their parameter; other plain ones must be all alike."""
    plain = {
        one.key: (_is_part(one), _print(one.value))
        for one in values
        if isinstance(one.parameter, DTensor) and any(not isinstance(each, DTensor) for each in tensors_in(one.value))
    }
    if world.size == 1:
        return {key for key, (is_part, _) in plain.items() if is_part}
    everyones: list[dict[tuple[str, str], Any]] = world.gather(plain)
    parts = set()
    for key in sorted({key for found in everyones for key in found}):
        found = [each.get(key, (False, None)) for each in everyones]
        if all(is_part for is_part, _ in found):
            parts.add(key)
        elif any(held != found[0][1] for _, held in found):
            raise ConfigError(
                f"the optimizer's {key[1]} of {key[0]} differs between ranks, and only rank 0's would be saved",
                fix="keep in it what torch.zeros_like(parameter) makes (a DTensor), or write   strategy='ddp'",
            )
    return parts


def _is_part(one: _Value) -> bool:
    """Plain tensors of the size of this rank's part of the parameter."""
    assert isinstance(one.parameter, DTensor)
    size = one.parameter.to_local().shape
    found = list(tensors_in(one.value))
    return bool(found) and all(not isinstance(tensor, DTensor) and tensor.shape == size for tensor in found)


def _print(value: Any) -> tuple[Any, ...]:
    """What is the same on all ranks where `value` is."""
    return tuple(
        (tuple(tensor.shape), zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data))
        for tensor in tensors_in(value)
        if not isinstance(tensor, DTensor)
    )


def _whole(tensor: torch.Tensor, parameter: torch.Tensor, is_part: bool) -> torch.Tensor:
    """`tensor` as a checkpoint holds it: what ranks have parts of is a DTensor without sums that are still due."""
    if is_part and isinstance(parameter, DTensor):
        return DTensor.from_local(
            tensor.detach(), parameter.device_mesh, parameter.placements, run_check=False,
            shape=parameter.shape, stride=parameter.stride(),
        )  # fmt: skip
    if isinstance(tensor, DTensor):
        return tensor.redistribute(placements=[_settled(one) for one in tensor.placements])
    return tensor


def _settled(placement: Placement) -> Placement:
    return Replicate() if placement.is_partial() else placement


def _form(tensor: torch.Tensor, parameter: torch.Tensor, is_part: bool) -> Form | None:
    if not isinstance(parameter, DTensor):
        return None
    if not isinstance(tensor, DTensor):
        return _PART if is_part else _PLAIN
    return [one.dim if isinstance(one, Shard) else None for one in tensor.placements]


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    return {
        key: float(value) if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def room_for_optimizer(
    optimizer: torch.optim.Optimizer, number: int, saved: dict[str, Any], named: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """A state dict whose tensors are empty and stand in `named` too, where loading fills them."""
    names = {id(p): name for name, p in named.items()}
    states: dict[int, dict[str, Any]] = {}
    place = 0
    groups = []
    if len(optimizer.param_groups) != len(saved["groups"]):
        here, there = len(optimizer.param_groups), len(saved["groups"])
        raise ConfigError(f"the optimizer has {here} groups of parameters, the saved one {there}")
    for group, old in zip(optimizer.param_groups, saved["groups"], strict=True):
        numbers = list(range(place, place + len(group["params"])))
        place += len(numbers)
        groups.append({**{key: _filled_later(value, named) for key, value in old.items()}, "params": numbers})
        for index, parameter in zip(numbers, group["params"], strict=True):
            name = names.get(id(parameter), "")
            own = f"optim{number or ''}"
            facts = saved["state"].get(name, {})
            state = {kind: _room(fact, f"{own}.{kind}.{name}", parameter, named) for kind, fact in facts.items()}
            if state:
                states[index] = state
    return {"state": states, "param_groups": groups}


def _filled_later(packed: Any, named: dict[str, torch.Tensor]) -> Any:
    """A packed value whose tensors are empty, and stand in `named` too."""
    named |= (rooms := room_for(packed))
    return unpack(packed, rooms)


def _room(fact: dict[str, Any], name: str, parameter: torch.Tensor, named: dict[str, torch.Tensor]) -> Any:
    """A value of an optimizer's state with empty tensors, each as it lies beside this parameter."""
    if "value" not in fact:  # of versions that knew one tensor's facts and no forms
        named[name] = room = _empty(
            fact["shape"], getattr(torch, fact["dtype"].removeprefix("torch.")), None, parameter
        )
        return room
    rooms = {
        name: _empty(list(flat.shape), flat.dtype, fact.get("forms", {}).get(name), parameter)
        for name, flat in room_for(fact["value"]).items()
    }
    named |= rooms
    is_part = {name for name, form in fact.get("forms", {}).items() if form == _PART}
    return unpack(fact["value"], {name: _own(room) if name in is_part else room for name, room in rooms.items()})


def _empty(shape: list[int], dtype: torch.dtype, form: Form | None, parameter: torch.Tensor) -> torch.Tensor:
    is_like = shape == list(parameter.shape)
    if not isinstance(parameter, DTensor):
        return torch.zeros_like(parameter, dtype=dtype).detach() if is_like else torch.zeros(shape, dtype=dtype)
    if isinstance(form, list) and not is_like:
        mesh = parameter.device_mesh
        axes = form if len(form) == mesh.ndim else [None] * mesh.ndim
        placements: list[Placement] = [Replicate() if dim is None else Shard(dim) for dim in axes]
        return zeros(shape, dtype=dtype, device_mesh=mesh, placements=placements)
    return (
        torch.zeros_like(parameter, dtype=dtype).detach()
        if is_like and form != _PLAIN
        else torch.zeros(shape, dtype=dtype)
    )


def _own(room: torch.Tensor) -> torch.Tensor:
    return room.to_local() if isinstance(room, DTensor) else room
