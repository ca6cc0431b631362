"""A rank's part of a tensor that is cut along its flattened elements, as DeepSpeed cuts: from one element to another.

Such a part is no box of the tensor, but few boxes together (two ends of rows and what lies between them), each of which
lies in one piece in the part. Checkpoints hold boxes, so any layout reads what these wrote, and they read what any
layout wrote. Made by deepspeed.py; torch's DCP asks it for its boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from duoka.parallel.tensor_part import TensorPart, part_of
from duoka.torch_private import wrapper_of_shape

Corner = tuple[int, ...]


def boxes_of(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Corner, Corner]]:
    """(offset, size) of each box that elements `start` to `stop` of a tensor consist of, in their order."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    (first, begin), (last, end) = divmod(start, row), divmod(stop, row)
    if first == last:
        yield from _in_row(shape, first, begin, end)
        return
    if begin:
        yield from _in_row(shape, first, begin, row)
        first += 1
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _in_row(shape, last, 0, end)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[tuple[Corner, Corner]]:
    for offset, size in boxes_of(shape[1:], start, stop):
        yield (row, *offset), (1, *size)


def is_cut_flat(tensor: torch.Tensor) -> bool:
    """Whether DeepSpeed's stage 3 has cut a parameter: it is empty then, except while it is used."""
    return hasattr(tensor, "ds_tensor")


def real_shape(tensor: torch.Tensor) -> torch.Size:
    """Of the tensor before stage 3 cut it; under AutoTP that is a rank's part of the whole (tensor_part.py)."""
    return torch.Size(getattr(tensor, "ds_shape", tensor.shape))


def part_of_cut(parameter: Any) -> FlatShard:
    """This rank's part of a parameter that stage 3 has cut."""
    each, whole = parameter.partition_numel(), parameter.ds_numel
    start = min(each * dist.get_rank(parameter.ds_process_group), whole)
    return FlatShard(
        _own_of_cut(parameter)[: min(each, whole - start)], real_shape(parameter), start, part_of(parameter)
    )


def _own_of_cut(parameter: Any) -> torch.Tensor:
    """What this rank has, padded: in memory, or in DeepSpeed's file of it."""
    kept = parameter.ds_tensor
    if kept.numel() == kept.ds_numel:
        return kept.detach()  # type: ignore[no-any-return]
    return mapped_file(parameter.nvme_swapper.get_path(parameter, True), kept.ds_numel, parameter.dtype)


def mapped_file(path: str, length: int, dtype: torch.dtype) -> torch.Tensor:
    """The first values in a file, live: what is written there is in the file."""
    return torch.from_file(path, shared=True, size=length, dtype=dtype)


def gather_cut(parameter: Any) -> torch.Tensor:
    """The whole of a parameter that stage 3 has cut; all ranks call it."""
    own, group = _own_of_cut(parameter), parameter.ds_process_group
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own.contiguous(), group=group)
    return torch.cat(parts)[: parameter.ds_numel].view(real_shape(parameter))


class FlatShard(torch.Tensor):
    """Elements from `start` on of a tensor of `shape`: `live`, flat, the values themselves. It cannot compute.

    `within`: of which larger one that tensor is a part; this one is shaped as that.
    """

    live: torch.Tensor
    start: int
    cut: torch.Size  # what is cut flat
    within: TensorPart | None

    @staticmethod
    def __new__(cls, live: torch.Tensor, shape: torch.Size, start: int, within: TensorPart | None = None) -> FlatShard:
        part: FlatShard = wrapper_of_shape(cls, shape if within is None else within.shape, live)
        part.live, part.start, part.cut, part.within = live.detach(), start, shape, within
        return part

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise TypeError(f"{func} of a flat part of a tensor")

    def boxes(self) -> Iterator[tuple[Corner, torch.Tensor]]:
        """(where it begins in the whole tensor, its live values) of each box of this part."""
        at, corner = 0, (0,) * len(self.cut) if self.within is None else self.within.offset
        for offset, size in boxes_of(self.cut, self.start, self.start + self.live.numel()):
            length = math.prod(size)
            place = tuple(first + own for first, own in zip(corner, offset, strict=True))
            yield place, self.live[at : at + length].view(size)
            at += length

    # What torch's DCP asks of a tensor that is stored in parts.

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.live)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offset), values.shape) for offset, values in self.boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for offset, values in self.boxes():
            if index.offset is not None and tuple(index.offset) == offset:
                return values
        raise ValueError(f"{index.fqn} has no part at {index.offset} on this rank")
