"""AdamW with its state offloaded to host memory: 8 bytes per parameter less on the GPU, two bus copies per step.

Tensor by tensor comes over, is updated there, and goes back; the next one travels while one is updated. On a CPU
nothing is copied, and the numbers are those of torch's own AdamW anywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from duoka.torch_private import like_sharded

HOST = torch.device("cpu")
_AHEAD = 2  # tensors on their way to the host


@dataclass(frozen=True)
class _Arrival:
    """A parameter's values and gradient, in host memory once `wait` has returned."""

    parameter: torch.nn.Parameter
    group: dict[str, Any]
    values: torch.Tensor
    grad: torch.Tensor
    sent: torch.cuda.Event | None

    @classmethod
    def of(cls, parameter: torch.nn.Parameter, group: dict[str, Any]) -> _Arrival:
        values, grad = (_send(local_part(tensor)) for tensor in (parameter, parameter.grad))
        sent = None
        if local_part(parameter).is_cuda:
            sent = torch.cuda.Event()
            sent.record()
        return cls(parameter, group, values, grad, sent)

    def wait(self) -> None:
        if self.sent is not None:
            self.sent.synchronize()


def _send(tensor: torch.Tensor) -> torch.Tensor:
    """Begin to copy it to the host, in memory that the bus reaches by itself; what is there already stays."""
    if not tensor.is_cuda:
        return tensor.to(HOST)
    there = torch.empty(tensor.shape, dtype=tensor.dtype, device=HOST, pin_memory=True)
    return there.copy_(tensor, non_blocking=True)


class HostAdamW(torch.optim.AdamW):
    """torch's AdamW with `step` done where its state is; state and groups are those of the parent class."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        under_way: deque[_Arrival] = deque()
        for parameter, group in self._members():
            under_way.append(_Arrival.of(parameter, group))
            if len(under_way) > _AHEAD:
                self._update(under_way.popleft())
        while under_way:
            self._update(under_way.popleft())

    def _members(self) -> Iterator[tuple[torch.nn.Parameter, dict[str, Any]]]:
        for group in self.param_groups:
            yield from ((parameter, group) for parameter in group["params"] if parameter.grad is not None)

    def _update(self, arrival: _Arrival) -> None:
        parameter, group, values = arrival.parameter, arrival.group, arrival.values
        arrival.wait()
        if not self.state[parameter]:
            self.state[parameter] = host_state(parameter)
        state = self.state[parameter]
        own = local_part(parameter)
        if not own.numel():
            state["step"] += 1
            return
        adamw(
            [values], [arrival.grad], [local_part(state["exp_avg"])], [local_part(state["exp_avg_sq"])], [],
            [state["step"]], fused=True, amsgrad=False, maximize=False,
            beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"],
        )  # fmt: skip
        if own.device != HOST:
            own.copy_(values, non_blocking=True)


def host_state(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """AdamW's state before its first step, in host memory, sharded as the parameter is."""
    moments = [torch.zeros_like(local_part(parameter), device=HOST) for _ in range(2)]
    if isinstance(parameter, DTensor):
        moments = [like_sharded(parameter, moment) for moment in moments]
    return {"step": torch.zeros((), dtype=torch.float32), "exp_avg": moments[0], "exp_avg_sq": moments[1]}


def local_part(tensor: Any) -> torch.Tensor:
    """This rank's values, without a copy."""
    part: torch.Tensor = tensor.detach()
    return part.to_local() if isinstance(part, DTensor) else part
