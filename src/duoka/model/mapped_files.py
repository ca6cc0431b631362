"""Weights that lie in the files that they were read from, as these are mapped into memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

_MAPS = Path("/proc/self/maps")  # Linux alone has it
_SHARE = 2  # of a file, tensors that make up less than one in so many are copied


def leave_files(model: torch.nn.Module) -> None:
    """Give tensors of their own to the few that lie in a file, in place: the whole of it stays mapped for them.

    A type that is kept as the file has it (routers' corrections in fp32) is read without a copy, where the rest has
    been made narrower.
    """
    plain = (torch.Tensor, torch.nn.Parameter)  # what a packer's classes hold has no place of its own
    every = (*model.parameters(), *model.buffers())
    tensors = [one for one in every if type(one) in plain and one.device.type == "cpu"]
    for first, end in _mapped():
        inside = [one for one in tensors if first <= one.data_ptr() < end]
        if inside and sum(one.nbytes for one in inside) * _SHARE < end - first:
            _copy(model, {id(one): one.detach().clone() for one in inside})


def _copy(model: torch.nn.Module, copies: dict[int, torch.Tensor]) -> None:
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in copies:
                parameter.data = copies[id(parameter)]
        for name, buffer in module.named_buffers(recurse=False):
            if id(buffer) in copies:  # another tensor: as a view it would hold what it is a view of
                module._buffers[name] = copies[id(buffer)]


def _mapped() -> Iterator[tuple[int, int]]:
    """Where files of weights begin and end in memory."""
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        if line.endswith(".safetensors"):
            first, end = line.split(maxsplit=1)[0].split("-")
            yield int(first, 16), int(end, 16)
