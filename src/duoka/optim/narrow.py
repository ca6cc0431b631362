"""AdamW whose weights, gradients and moments are bf16: 8 bytes per parameter in place of 16. `train.weights: bf16`.

A bf16 number has 8 bits: a step of lr on a weight of 1 lies below half of its last bit, and rounding to the nearest
would lose it, every time. Here results are rounded at random, up as often as they lie high, so that steps arrive in the
mean (stochastic rounding). The chance is counted, not drawn: a hash of the parameter's name, the step and the number's
place in the whole tensor, so that any split over ranks rounds alike, and a run that goes on as one that never stopped.
Parameters of other types, as a head that stays fp32, learn by torch's own AdamW.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from duoka.model import native
from duoka.model.dropout import counted, place_key
from duoka.optim.host import local_part, near_state, state_of, update_fused
from duoka.torch_private import compute_local_shape_and_global_offset

# At once, where no compiled kernel does it: temporaries take some 60 bytes for each (plan/memory.py knows them).
CHUNK = {"cpu": 2**20, "cuda": 2**23}


class NarrowAdamW(torch.optim.AdamW):
    """torch's AdamW with a step of its own for bf16; state and groups are those of the parent class."""

    def __init__(self, groups: Any, *, names: Mapping[torch.nn.Parameter, str], **settings: Any) -> None:
        super().__init__(groups, **settings)
        self._names = names

    def fresh_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Before the first step. Its number is asked by the host, so it lies there."""
        if parameter.dtype is not torch.bfloat16:
            return near_state(parameter)
        local = local_part(parameter)
        return state_of(parameter, torch.zeros_like(local), torch.zeros_like(local))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            wide = []
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self.state[parameter] = self.fresh_state(parameter)
                if parameter.dtype is torch.bfloat16:
                    self._update(parameter, group)
                else:
                    wide.append(parameter)
            update_fused(wide, [self.state[parameter] for parameter in wide], group)

    def _update(self, parameter: torch.nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state["step"] += 1
        step, (beta1, beta2) = int(state["step"]), group["betas"]
        numbers = tuple(local_part(one) for one in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]))
        if not numbers[0].numel():
            return
        factors = (
            group["lr"], beta1, beta2, group["eps"], group["weight_decay"],
            1 / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step),
        )  # fmt: skip
        key = place_key(self._names[parameter], step)
        for first, stretch in stretches(parameter, numbers):
            _update_stretch(stretch, first, key, factors)


def _update_stretch(numbers: Sequence[torch.Tensor], first: int, key: int, factors: tuple[float, ...]) -> None:
    is_flat = all(one.is_contiguous() for one in numbers)
    if is_flat and native.serves(*numbers):
        native.adamw_(numbers, first, key, *factors)  # type: ignore[arg-type]
        return
    if is_flat and numbers[0].is_cuda and kernel_of_triton() is not None:
        kernel_of_triton().update_narrow(*numbers, first, key, *factors)
        return
    chunk = CHUNK["cpu" if numbers[0].device.type == "cpu" else "cuda"]
    flat = [one.view(-1) if one.is_contiguous() else one.reshape(-1) for one in numbers]
    for start in range(0, flat[0].numel(), chunk):
        weight, grad, average, square = (one[start : start + chunk] for one in flat)
        update_narrow(weight, grad, average, square, first + start, key, *factors)
    for one, values in zip(numbers, flat, strict=True):
        if not one.is_contiguous():
            one.copy_(values.view(one.shape))


@functools.cache
def kernel_of_triton() -> Any:
    """narrow_triton.py, where Triton is there; torch brings it for CUDA."""
    if importlib.util.find_spec("triton") is None:
        return None
    from duoka.optim import narrow_triton

    return narrow_triton


def stretches(parameter: torch.Tensor, numbers: Sequence[torch.Tensor]) -> Iterator[tuple[int, Sequence[torch.Tensor]]]:
    """What of this rank's `numbers` is one piece of the whole tensor, and where that begins, counted in numbers."""
    if not isinstance(parameter, DTensor) or not parameter.ndim:
        yield 0, numbers
        return
    whole, local = parameter.shape, numbers[0].shape
    _, offset = compute_local_shape_and_global_offset(whole, parameter.device_mesh, parameter.placements)
    if local[1:] == whole[1:]:
        yield int(offset[0]) * math.prod(whole[1:]), numbers
        return
    assert local[0] == whole[0] and local[2:] == whole[2:], "rules refuse what cuts columns"
    for number in range(whole[0]):  # of each expert, some rows
        begin = (number * whole[1] + int(offset[1])) * math.prod(whole[2:])
        yield begin, tuple(one[number] for one in numbers)


def update_narrow(
    weight: torch.Tensor, grad: torch.Tensor, average: torch.Tensor, square: torch.Tensor, first: int, key: int,
    lr: float, beta1: float, beta2: float, eps: float, decay: float, first_scale: float, second_scale: float,
) -> None:  # fmt: skip
    """One step in place, of flat bf16 tensors whose numbers begin at `first` of the whole."""
    places = torch.arange(first, first + weight.numel(), device=weight.device, dtype=torch.int64)
    noise = counted(key, places)
    slope = grad.float()
    one = average.float().mul_(beta1).add_(slope, alpha=1 - beta1)
    two = square.float().mul_(beta2).addcmul_(slope, slope, value=1 - beta2)
    below = two.sqrt().mul_(second_scale).add_(eps)
    moved = weight.float().mul_(1 - lr * decay).addcdiv_(one, below, value=-lr * first_scale)
    for to, values, shift in ((weight, moved, 0), (average, one, 16), (square, two, 32)):
        to.copy_(rounded_at_random(values, (noise >> shift) & 0xFFFF))


def rounded_at_random(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """fp32 as bf16: up by chance, as often as 16 bits of `noise` say; inf and NaN stay what they are."""
    bits = values.view(torch.int32)
    is_finite = (bits & 0x7F800000) != 0x7F800000
    return (bits + noise.to(torch.int32) * is_finite & -65536).view(torch.float32).to(torch.bfloat16)
