"""Shards of weights and gradients in files: FSDP gathers from their mapping, and backward passes write into it.

What lies there is the page cache's, which gives it back when memory is short, and counts as no process's own. The
next layers are asked for while one computes; pages are let go of when a layer was gathered, or its gradients stored.
Made by sharded.py where parallel.offload has params: disk.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from duoka.optim.disk_file import DiskFile
from duoka.optim.host import local_part
from duoka.torch_private import compute_local_shape_and_global_offset, like_sharded

_ALIGNED = 64  # bytes: a cache line, as torch's own allocations
_LAYERS_AHEAD = 2


class ShardsOnDisk:
    """This rank's shards of a model, each at a place of its own in both files."""

    def __init__(self, model: torch.nn.Module, folder: Path) -> None:
        self._places: dict[int, int] = {}  # where a parameter's shard begins
        end = 0
        for parameter in model.parameters():
            if isinstance(parameter, DTensor):
                size = math.prod(_local_shape(parameter)) * parameter.element_size()
                self._places[id(parameter)] = end
                end += -(-size // _ALIGNED) * _ALIGNED
        self.weights = DiskFile(folder, end, "weights")
        self.gradients = DiskFile(folder, end, "gradients")
        self._learning: list[torch.nn.Parameter] = []
        self._so_far: dict[torch.Tensor, torch.Tensor] = {}  # gradients of a step's earlier micro-batches

    @property
    def size_bytes(self) -> int:
        return self.weights.size_bytes + self.gradients.size_bytes

    def keep(self, parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The values of this rank's shard, from now on in the file."""
        place = self.weights.part(self._places[id(parameter)], values.dtype, values.shape)
        place.copy_(values)
        self.weights.let_go()
        return place

    def move(self, model: torch.nn.Module) -> None:
        """Bring there what a model holds in memory, shard by shard."""
        moved: dict[int, torch.nn.Parameter] = {}
        state: dict[str, torch.Tensor] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if isinstance(parameter, DTensor):
                if id(parameter) not in moved:
                    there = like_sharded(parameter, self.keep(parameter, local_part(parameter)))
                    moved[id(parameter)] = torch.nn.Parameter(there, requires_grad=parameter.requires_grad)
                state[name] = moved[id(parameter)]
        model.load_state_dict(state, strict=False, assign=True)

    def take_gradients(self, model: torch.nn.Module, units: Iterable[FSDPModule]) -> None:
        """Have backward passes leave gradients in the file, and layers ask for those that come next."""
        for parameter in model.parameters():
            start = self.weights.place_of(local_part(parameter)) if isinstance(parameter, DTensor) else None
            if start is None or not local_part(parameter).numel():
                continue  # of rows that are cut unevenly FSDP makes a copy: they stay in memory
            if parameter.requires_grad:
                self._learning.append(parameter)
                parameter.register_post_accumulate_grad_hook(self._store(start))
        layers = [unit for unit in units if isinstance(unit, torch.nn.Module)]
        stretches = [self._stretch(layer) for layer in layers]
        for number, layer in enumerate(layers):
            ahead = [one for one in stretches[number + 1 : number + 1 + _LAYERS_AHEAD] if one]
            layer.register_forward_pre_hook(functools.partial(self._forward, ahead))

    def begin_pass(self) -> None:
        """A micro-batch comes: its gradients are added to the file here, not by FSDP."""
        self._so_far = {one: one.grad for one in self._learning if one.grad is not None}
        for parameter in self._so_far:
            parameter.grad = None

    def finish_pass(self) -> None:
        """What this micro-batch did not reach keeps what it had."""
        for parameter, grad in self._so_far.items():
            if parameter.grad is None:
                parameter.grad = grad
        self._so_far = {}

    def _stretch(self, layer: torch.nn.Module) -> tuple[int, int] | None:
        """Where a layer's own weights lie in the file: (begin, size). Asked before any is gathered."""
        below = {id(one) for unit in _units_below(layer) for one in unit.parameters()}
        begin, end = math.inf, 0
        for parameter in layer.parameters():
            if isinstance(parameter, DTensor) and id(parameter) not in below:
                local = local_part(parameter)
                start = self.weights.place_of(local)
                if start is not None and local.numel():
                    begin, end = min(begin, start), max(end, start + local.numel() * local.element_size())
        return (int(begin), end - int(begin)) if end else None

    def _store(self, start: int) -> Callable[[torch.Tensor], None]:
        def store(parameter: torch.Tensor) -> None:
            assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
            grad = local_part(parameter.grad)
            size = grad.numel() * grad.element_size()
            there = self.gradients.part(start, grad.dtype, grad.shape)
            if there.data_ptr() != grad.data_ptr():
                self.gradients.will_write(start, size)
                _add_or_copy(grad, there, is_first=parameter not in self._so_far)
                parameter.grad = like_sharded(parameter, there)
            self.weights.will_need(start - 2 * _LAYERS_AHEAD * size, 2 * _LAYERS_AHEAD * size)
            self.let_go()

        return store

    def _forward(self, ahead: list[tuple[int, int]], module: torch.nn.Module, inputs: object) -> None:
        """A layer is gathered: those that come after it will be wanted."""
        for begin, size in ahead:
            self.weights.will_need(begin, size)
        self.let_go()

    def will_update(self, values: torch.Tensor) -> None:
        start = self.weights.place_of(values)
        if start is not None:
            self.weights.will_write(start, values.numel() * values.element_size())

    def let_go(self) -> None:
        """What is mapped counts as this process's memory until it is let go of; its content stays."""
        self.weights.let_go()
        self.gradients.let_go()


def _add_or_copy(values: torch.Tensor, there: torch.Tensor, *, is_first: bool) -> None:
    """By one thread: several that touch new pages of a mapping stand in each other's way."""
    if values.dtype is not torch.float32:
        there.copy_(values if is_first else there + values)
    elif is_first:
        np.copyto(there.numpy(), values.numpy())
    else:
        np.add(there.numpy(), values.numpy(), out=there.numpy())


def _units_below(layer: torch.nn.Module) -> Iterator[torch.nn.Module]:
    return (module for module in layer.modules() if module is not layer and isinstance(module, FSDPModule))


def _local_shape(parameter: DTensor) -> tuple[int, ...]:
    shape, _ = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(shape)
