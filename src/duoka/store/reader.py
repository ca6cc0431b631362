"""Reading tensors of a checkpoint straight into the memory where they belong, whatever layout wrote them.

torch's DCP decides which bytes of which files this rank needs; this reader fetches them. Its own reader for
safetensors goes through a mapped file and a copy, twice the time. Called by checkpoint.py, takeover.py and by serve.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from duoka.errors import StorageError
from duoka.optim.disk_file import find_on_disk
from duoka.runs.manifest import read_manifest

_BOUNCE_BYTES = 8 * 2**20  # through which goes what is filled on a disk
PIECE = "#"  # in a file, before the number of a tensor's further box; no parameter has it in its name


class CheckpointReader(dcp.HuggingFaceStorageReader):
    """DCP's view of a folder of safetensors files, with reads of our own."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._written_as: dict[MetadataIndex, str] = {}  # boxes that have another name in their file
        self.fs.ls = _written_files  # type: ignore[method-assign]

    def read_metadata(self) -> Metadata:
        """Boxes of one tensor in one file are one tensor's."""
        found = super().read_metadata()
        tensors, places = found.state_dict_metadata, found.storage_data
        for name in [name for name in tensors if PIECE in name]:
            piece, whole = tensors.pop(name), tensors[name.split(PIECE)[0]]
            whole.chunks += piece.chunks  # type: ignore[union-attr]
            sizes = zip(whole.size, piece.size, strict=True)  # type: ignore[union-attr]
            whole.size = torch.Size(max(pair) for pair in sizes)  # type: ignore[union-attr]
        for index in [index for index in places if PIECE in index.fqn]:
            joined = MetadataIndex(index.fqn.split(PIECE)[0], index.offset)
            places[joined] = places.pop(index)
            self._written_as[joined] = index.fqn
        return found

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            starts = read_header(Path(name))
            handle = os.open(name, os.O_RDONLY)
            try:
                for item in items:
                    self._read(
                        handle, starts[self._written_as.get(item.storage_index, item.storage_index.fqn)], item, planner
                    )
            finally:
                os.close(handle)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, handle: int, start: int, item: ReadItem, planner: LoadPlanner) -> None:
        stored = self.storage_data[item.storage_index]
        target = planner.resolve_tensor(item).detach()
        shape, lengths = tuple(stored.shape), tuple(item.lengths)
        direct = target.device.type == "cpu" and target.is_contiguous() and target.dtype == stored.dtype
        if lengths[1:] == shape[1:]:
            # Rows that lie end to end in the file.
            row_bytes = math.prod(shape[1:]) * stored.dtype.itemsize
            start += (item.storage_offsets[0] if shape else 0) * row_bytes
            values = target if direct else torch.empty(lengths, dtype=stored.dtype)
            _read_into(handle, values, start)
        else:
            whole = torch.empty(shape, dtype=stored.dtype)
            _read_into(handle, whole, start)
            slices = tuple(
                slice(offset, offset + length) for offset, length in zip(item.storage_offsets, lengths, strict=True)
            )
            values = whole[slices]
        if values is not target:
            target.copy_(values)
        planner.commit_tensor(item, target)


def _written_files(path: str) -> list[str]:
    """Of a checkpoint's folder what was written into it: a copy may still hold what another checkpoint of that step had
    there (rsync without --delete), whose tensors would pass for this one's, and file managers leave files of their own.
    """
    try:
        names = read_manifest(Path(path)).files
    except StorageError as error:  # it was whole when it was chosen
        raise OSError(error.what) from error
    return [os.path.join(path, name) for name in sorted(names)]


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[tuple[CheckpointReader, Mapping[str, Any]]]:
    """A checkpoint's reader and what it holds by name, for a dcp.load inside the block.

    torch logs the whole of every error, and its own deprecations, beside raising it: silent here.
    """
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader = CheckpointReader(str(folder))
            yield reader, reader.read_metadata().state_dict_metadata
    finally:
        logging.disable(logging.NOTSET)


def read_header(path: Path) -> dict[str, int]:
    """Where each tensor's bytes begin in a safetensors file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        facts: dict[str, Any] = json.loads(file.read(size))
    return {name: 8 + size + fact["data_offsets"][0] for name, fact in facts.items() if name != "__metadata__"}


def _read_into(handle: int, tensor: torch.Tensor, start: int) -> None:
    if not tensor.numel():
        return
    flat = tensor.reshape(-1).view(torch.uint8)
    if (place := find_on_disk(flat)) is not None:
        for at in range(0, len(flat), _BOUNCE_BYTES):
            part = torch.empty(min(_BOUNCE_BYTES, len(flat) - at), dtype=torch.uint8)
            _read_into(handle, part, start + at)
            place[0].write_tensor(place[1] + at, part)
        return
    left = flat.numpy().data
    while left:
        count = os.preadv(handle, [left], start)
        if count == 0:
            raise OSError("a file ends before its last tensor does")
        left, start = left[count:], start + count
