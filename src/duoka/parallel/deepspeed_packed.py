"""ZeRO++ under duoka: which weights DeepSpeed packs in 8 bits, and gradients in 4 so that gradients come back.

Its kernels read any tensor's bytes as fp16, whatever they are: fp32 or bf16 gradients would become noise without a
word. They take some shapes alone, and of others leave numbers out. They add up a node's gradients where all else is a
mean. So they are given fp16 of shapes that they take, and what comes back is undone. Seen in the source of 0.19.8, and
run with that source's arithmetic on CPUs (tests/cuda_quantizer.py); no GPU has run it yet. For deepspeed.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from duoka.errors import ConfigError
from duoka.parallel.flat_shard import real_shape
from duoka.plan.deepspeed import NATIVELY, PACKED_AT_ONCE, why_not_packed

Reduce = Callable[[list[torch.Tensor], Any], list[torch.Tensor]]

# Gradients of small numbers keep their bits in fp16, whose smallest is 6e-8; one of 256 would be too large.
SCALE = 256.0
SMALLEST_GROUP = 32 * PACKED_AT_ONCE  # below, a warp would ask threads that there are not
LARGEST_GROUP = 5 * 512 * 16  # above, no kernel is started, without a word


def packed_weights(bare: torch.nn.Module, kept: int) -> dict[str, torch.nn.Parameter]:
    """Those that travel in 8 bits: matrices of more than `kept` numbers, which are gathered when they are used."""
    return {
        name: parameter
        for name, parameter in bare.named_parameters()
        if len(real_shape(parameter)) > 1 and real_shape(parameter).numel() > kept
    }


def check_weights(bare: torch.nn.Module, num_ranks: int, kept: int) -> None:
    """Raise ConfigError for a weight that DeepSpeed cannot pack: of models whose shape was not known before."""
    sizes = {name: real_shape(weight).numel() for name, weight in packed_weights(bare, kept).items()}
    fault = why_not_packed(sizes, num_ranks)
    if fault is not None:
        raise ConfigError(fault.what, fix=fault.fix)


def pack_weights(bare: torch.nn.Module, kept: int) -> None:
    """Let these alone travel in 8 bits, and always so. Once stage 3 has cut the model.

    By itself DeepSpeed packs vectors too, of which ones become 0.992, but not after a step where they stay gathered;
    and a weight that is not read in its own module it gathers as it is at first. So no run would go on bit for bit.
    """
    packed = {id(weight) for weight in packed_weights(bare, kept).values()}
    for parameter in bare.parameters():
        parameter.all_gather_coalesced = Apart(packed, parameter.all_gather_coalesced)  # type: ignore[attr-defined]
        if id(parameter) in packed:
            parameter.all_gather = partial(_gather_packed, parameter)  # type: ignore[attr-defined]


@contextlib.contextmanager
def beside_autocast() -> Iterator[None]:
    """Around DeepSpeed's start: it refuses autocast beside packed weights, which would have two types to travel in.

    Of duoka's, which are fp32 whatever they are multiplied in, none has a type for that.
    """
    from deepspeed.runtime import torch_autocast

    check = torch_autocast._validate_auto_cast_settings
    torch_autocast._validate_auto_cast_settings = lambda engine: None
    try:
        yield
    finally:
        torch_autocast._validate_auto_cast_settings = check


class Apart:
    """DeepSpeed's gather of several weights, of which not all are packed.

    Nor is a node's copy of what arrived packed: half of the groups would come out smaller by 1/128 in each of a model's
    products on the way back, and so the gradients.
    """

    def __init__(self, packed: Collection[int], gather: Callable[..., Any]) -> None:
        self._packed = packed
        self._gather = gather

    def __call__(self, params: Iterable[torch.nn.Parameter], safe_mode: bool = False, quantize: bool = False) -> Any:
        from deepspeed.runtime.zero.partition_parameters import MultipleAllGatherHandles

        groups: dict[bool, list[torch.nn.Parameter]] = {}
        for one in params:
            copy: Any = one.ds_secondary_tensor  # type: ignore[attr-defined]
            groups.setdefault(quantize and id(one) in self._packed and copy is None, []).append(one)
        handles = [self._gather(groups[how], safe_mode=safe_mode, quantize=how) for how in sorted(groups)]
        return handles[0] if len(handles) == 1 else MultipleAllGatherHandles(handles)


def _gather_packed(parameter: Any) -> None:
    parameter.all_gather_coalesced([parameter], quantize=True).wait()


def is_packed(shape: Sequence[int], num_ranks: int) -> bool:
    """Whether DeepSpeed's kernels pack a gradient of this shape, all of it. It has a group for each row or column."""
    if len(shape) < 2:
        return False
    groups = max(shape[0], shape[1], num_ranks)
    size, rest = divmod(prod(shape), groups)
    return not rest and not groups % num_ranks and not size % PACKED_AT_ONCE and SMALLEST_GROUP <= size <= LARGEST_GROUP


def pack_as_half(groups: Any, device: torch.device) -> None:
    """From now on, of this process. `groups` are DeepSpeed's own, of nodes and across them. All ranks call it."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero import stage3

    num_ranks, near = dist.get_world_size(), get_accelerator().device_count()
    if num_ranks <= near:  # one node, in which it sends gradients as they are
        return
    known = stage3.all_to_all_quant_reduce
    stage3.all_to_all_quant_reduce = AsHalf(known.reduce if isinstance(known, AsHalf) else known, num_ranks, near)
    stage3.all_to_all_quant_reduce.look(groups, device)


def check_nodes(num_ranks: int) -> None:
    """Raise ConfigError where DeepSpeed would find no whole nodes: it takes a process to see all GPUs of its own."""
    from deepspeed.accelerator import get_accelerator

    near = get_accelerator().device_count()
    if num_ranks > near and num_ranks % near:
        what = f"DeepSpeed packs gradients between nodes of {near} GPUs (those that a process sees), all of them used"
        raise ConfigError(
            f"parallel.compress has gradients: int4, {what}, and {num_ranks} processes are no multiple of that",
            fix=f"start a multiple of {near} processes, or write   {NATIVELY}",
        )


class AsHalf:
    """DeepSpeed's exchange, around which matrices are fp16. What it does not pack it sends as it is."""

    def __init__(self, reduce: Reduce, num_ranks: int, near: int) -> None:
        self.reduce = reduce
        self._num_ranks, self._near = num_ranks, near
        self._times = near  # of the mean: what comes back is the mean of nodes' sums

    def look(self, groups: Any, device: torch.device) -> None:
        """See what comes back of ones, which a version that takes the mean would not multiply. All ranks call it.

        The kernels round the largest number of a group towards zero, and the smallest not at all: minus ones.
        """
        rows = -(-SMALLEST_GROUP // self._num_ranks) * self._num_ranks
        (told,) = self.reduce([-torch.ones(rows, SMALLEST_GROUP, dtype=torch.float16, device=device)], groups)
        for times in (1, self._near):
            if torch.allclose(told.float(), torch.tensor(-float(times), device=device), rtol=0.01):
                self._times = times
                return
        low, high = told.min().item(), told.max().item()
        raise ConfigError(
            f"parallel.compress has gradients: int4, and DeepSpeed's quantizer makes {low:g} to {high:g} of minus ones",
            fix=f"write   {NATIVELY}   or   gradients: none",
        )

    def __call__(self, tensors: list[torch.Tensor], groups: Any) -> list[torch.Tensor]:
        packed = [is_packed(one.shape, self._num_ranks) for one in tensors]
        given = [
            self._half(one) if is_one else one.reshape(-1)  # vectors are sent as they are
            for one, is_one in zip(tensors, packed, strict=True)
        ]
        answers = self.reduce(given, groups)
        return [
            answer.to(one.dtype).div_(SCALE) if is_one else answer
            for one, answer, is_one in zip(tensors, answers, packed, strict=True)
        ]

    def _half(self, gradient: torch.Tensor) -> torch.Tensor:
        """For NaN infinity, of which a whole group becomes NaN: the kernels would make 0 of NaN."""
        halves = gradient.mul(SCALE / self._times).half().contiguous()
        return halves.nan_to_num_(torch.inf, torch.inf, -torch.inf)
