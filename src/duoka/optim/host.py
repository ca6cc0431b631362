"""AdamW with its state offloaded to host memory: 8 bytes per parameter less on the GPU, two bus copies per step.

Part by part comes over, is updated there, and goes back; the next ones travel while one is updated. On a CPU nothing
is copied, and the numbers are those of torch's own AdamW anywhere. disk.py keeps the state in a file instead.
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
_AHEAD = 2  # parts on their way to the host


@dataclass(frozen=True)
class Part:
    """What is updated at once: all that this rank has of a parameter, or a stretch of it in order of memory."""

    parameter: torch.nn.Parameter
    group: dict[str, Any]
    start: int = 0
    stop: int | None = None

    def of(self, tensor: Any) -> torch.Tensor:
        """This part of the parameter, or of its gradient; of the gradient a copy where it lies in another order."""
        local = local_part(tensor)
        return local if self.stop is None else local.reshape(-1)[self.start : self.stop]

    @property
    def is_last(self) -> bool:
        return self.stop is None or self.stop == local_part(self.parameter).numel()


@dataclass(frozen=True)
class Arrival:
    """A part's values and gradient, in host memory once `wait` has returned."""

    part: Part
    values: torch.Tensor
    grad: torch.Tensor
    sent: torch.cuda.Event | None

    @classmethod
    def of(cls, part: Part) -> Arrival:
        values, grad = (_send(part.of(tensor)) for tensor in (part.parameter, part.parameter.grad))
        sent = None
        if local_part(part.parameter).is_cuda:
            sent = torch.cuda.Event()
            sent.record()
        return cls(part, values, grad, sent)

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
    """torch's AdamW with `step` done where its state is; state and groups are those of the parent class.

    `share` of the state is offloaded, by whole parameters; the rest lies and is updated beside its parameters.
    """

    def __init__(self, groups: Any, *, share: float = 1.0, **settings: Any) -> None:
        super().__init__(groups, **settings)
        self.factor: torch.Tensor | None = None  # that the next step multiplies gradients by
        self._near: set[int] = set()
        seen = offloaded = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                # Spread over the model, so that what is updated near runs beside copies of what is not.
                seen += (size := local_part(parameter).numel())
                if offloaded + size > share * seen:
                    self._near.add(id(parameter))
                else:
                    offloaded += size

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            near = [p for p in group["params"] if p.grad is not None and self.is_near(p)]
            if self.factor is not None:
                for parameter in near:
                    local_part(parameter.grad).mul_(self.factor)
            self._update_near(near, group)
        under_way: deque[Arrival] = deque()
        for part in self.parts():
            under_way.append(Arrival.of(part))
            if len(under_way) > _AHEAD:
                self._update(under_way.popleft())
        while under_way:
            self._update(under_way.popleft())
        self.factor = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.factor = None  # of gradients that are gone, where a step was discarded

    def parts(self) -> Iterator[Part]:
        """What is updated where its offloaded state is, in order: all that got a gradient."""
        for group in self.param_groups:
            moved = (p for p in group["params"] if p.grad is not None and not self.is_near(p))
            yield from (Part(parameter, group) for parameter in moved)

    def is_near(self, parameter: torch.Tensor) -> bool:
        """Whether its state was left beside it."""
        return id(parameter) in self._near

    def fresh_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Before the first step."""
        return near_state(parameter) if self.is_near(parameter) else host_state(parameter)

    def _update_near(self, parameters: list[torch.nn.Parameter], group: dict[str, Any]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = near_state(parameter)
        update_fused(parameters, [self.state[parameter] for parameter in parameters], group)

    def moments(self, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        """Both moments of a part, in host memory, to be changed in place."""
        state = self.state[part.parameter]
        return local_part(state["exp_avg"]), local_part(state["exp_avg_sq"])

    def updated(self, part: Part) -> None:
        """The part's moments and values are the new ones. No-op."""

    def _update(self, arrival: Arrival) -> None:
        part, group, values = arrival.part, arrival.part.group, arrival.values
        arrival.wait()
        if not self.state[part.parameter]:
            self.state[part.parameter] = host_state(part.parameter)
        state, own = self.state[part.parameter], part.of(part.parameter)
        if not own.numel():
            state["step"] += 1
            return
        grad = arrival.grad if self.factor is None else arrival.grad * self.factor
        first, second = self.moments(part)
        count = state["step"].clone()  # of the parts of one parameter, all are of the same step
        adamw(
            [values], [grad], [first], [second], [], [count], fused=True, amsgrad=False, maximize=False,
            beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"],
        )  # fmt: skip
        if own.device != HOST:
            own.copy_(values, non_blocking=True)
        self.updated(part)
        if part.is_last:
            state["step"].copy_(count)


def update_fused(
    parameters: list[torch.nn.Parameter], states: list[dict[str, torch.Tensor]], group: dict[str, Any]
) -> None:
    """torch's AdamW in one kernel for all of them, on this rank's parts."""
    if parameters:
        adamw(
            [local_part(p) for p in parameters], [local_part(p.grad) for p in parameters],
            [local_part(one["exp_avg"]) for one in states], [local_part(one["exp_avg_sq"]) for one in states], [],
            [one["step"] for one in states], fused=True, amsgrad=False, maximize=False, lr=group["lr"],
            beta1=group["betas"][0], beta2=group["betas"][1], weight_decay=group["weight_decay"], eps=group["eps"],
        )  # fmt: skip


def host_state(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """AdamW's state before its first step, in host memory, sharded as the parameter is."""
    local = local_part(parameter)
    return state_of(parameter, *(torch.zeros_like(local, device=HOST) for _ in range(2)))


def near_state(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same, where the parameter is."""
    local = local_part(parameter)
    state = state_of(parameter, torch.zeros_like(local), torch.zeros_like(local))
    return state | {"step": state["step"].to(local.device)}


def state_of(parameter: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> dict[str, torch.Tensor]:
    """AdamW's state before its first step, of this rank's moments."""
    moments = [first, second]
    if isinstance(parameter, DTensor):
        moments = [like_sharded(parameter, moment) for moment in moments]
    return {"step": torch.zeros((), dtype=torch.float32), "exp_avg": moments[0], "exp_avg_sq": moments[1]}


def local_part(tensor: Any) -> torch.Tensor:
    """This rank's values, without a copy."""
    part: torch.Tensor = tensor.detach()
    return part.to_local() if isinstance(part, DTensor) else part
