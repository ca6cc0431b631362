"""What DeepSpeed exchanges, counted in the ledger like everybody's: a layer around its own over torch.distributed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from duoka.comm.collectives import bytes_of, gather_into, is_gloo, scatter_into
from duoka.comm.ledger import LEDGER

PIECE = 1 << 20  # elements of a rank's part


class CountedBackend:
    """DeepSpeed's backend with its collectives counted; whatever else it is asked for, it is the backend itself."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def _count(self, kind: str, whole_bytes: int, group: Any) -> None:
        size = self._backend.get_world_size(group)
        if size > 1:
            LEDGER.note(kind, whole_bytes, size)

    def all_reduce(
        self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        self._count("all-reduce", bytes_of(tensor), group)
        with LEDGER.waiting():
            return self._backend.all_reduce(tensor, op, group, async_op)

    def reduce(
        self, tensor: torch.Tensor, dst: int, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        self._count("reduce", bytes_of(tensor), group)
        with LEDGER.waiting():
            return self._backend.reduce(tensor, dst, op, group, async_op)

    def broadcast(self, tensor: torch.Tensor, src: int, group: Any = None, async_op: bool = False) -> Any:
        self._count("broadcast", bytes_of(tensor), group)
        with LEDGER.waiting():
            return self._backend.broadcast(tensor, src, group, async_op)

    def all_gather(self, tensor_list: Any, tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        self._count("all-gather", bytes_of(tensor) * len(tensor_list), group)
        with LEDGER.waiting():
            return self._backend.all_gather(tensor_list, tensor, group, async_op)

    def all_gather_into_tensor(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        self._count("all-gather", bytes_of(output_tensor), group)
        with LEDGER.waiting():
            if not async_op and is_gloo(group, output_tensor.device):
                return gather_in_pieces(output_tensor, input_tensor, group)
            # Scales come as a column, which gloo does not gather into a line.
            return gather_into(output_tensor.view(-1), input_tensor.reshape(-1), group=group, async_op=async_op)

    def all_gather_coalesced(
        self, output_tensors: Any, input_tensors: Any, group: Any = None, async_op: bool = False
    ) -> Any:
        for whole in output_tensors:
            self._count("all-gather", bytes_of(whole), group)
        with LEDGER.waiting():
            return self._backend.all_gather_coalesced(output_tensors, input_tensors, group=group, async_op=async_op)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        # ZeRO++'s packed gradients: both are halves of a reduce-scatter, added up between them.
        self._count("reduce-scatter", bytes_of(input), group)
        with LEDGER.waiting():
            return self._backend.all_to_all_single(
                output, input, output_split_sizes, input_split_sizes, group=group, async_op=async_op
            )

    def reduce_scatter_tensor(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        self._count("reduce-scatter", bytes_of(input_tensor), group)
        with LEDGER.waiting():
            # DeepSpeed's own would call torch by a name that torch warns of, at each call.
            if str(op).endswith("SUM"):
                return scatter_into(output_tensor, input_tensor, group=group, async_op=async_op)
            return self._backend.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


def gather_in_pieces(output: torch.Tensor, own: torch.Tensor, group: Any) -> None:
    """gloo gathers into a copy of the whole: all weights once more, in a step, where stages 1 and 2 gather these."""
    ranks, values = dist.get_world_size(group), own.reshape(-1)
    whole = output.view(ranks, -1)
    for start in range(0, values.numel(), PIECE):
        part = values[start : start + PIECE]
        arrived = part.new_empty(ranks * part.numel())
        gather_into(arrived, part.contiguous(), group=group)
        whole[:, start : start + PIECE] = arrived.view(ranks, -1)


def count_exchanges() -> None:
    """From now on, once DeepSpeed has its backend."""
    from deepspeed.comm import comm

    if not isinstance(comm.cdb, CountedBackend):
        comm.cdb = CountedBackend(comm.cdb)
