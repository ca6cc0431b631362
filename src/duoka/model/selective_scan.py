"""The scan of Mamba 1 (Mamba, Falcon-Mamba, Jamba, Zamba) as one function with its own gradient.

A channel's state S (some sixteen numbers) decays at each token, which then writes to it and reads it:

    S_t = e^{dt_t A} S_{t-1} + dt_t x_t B_t,    y_t = (C_t S_t + D x_t) silu(z_t),    dt_t = softplus of what is given

transformers' own function goes from token to token in Python, and autograd keeps some ten states of each. Here what it
reads is kept, and the backward pass computes the states again: by a compiled kernel on CPUs (scan.cpp), else chunks of
tokens beside each other, some channels after the others. Where mamba-ssm is there, its kernels are left.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from duoka.model import native
from duoka.torch_private import FakeTensor

NAME, KERNELS = "mamba_selective_scan", "mamba_ssm"  # transformers' function, and the package that is faster
CHUNK = 32
# Numbers of states that are computed together without the kernel.
AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 25}
_PARTS = 32  # sums of channels that the gradients of B and C are added up from, whatever the threads
_LARGEST = 256  # state of a channel that the kernel takes
Five = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def in_place_of(theirs: Any) -> Any:
    def compute(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **others: Any,
    ) -> Any:
        if return_last_state or not delta_softplus or D is None or z is None or delta_bias is None:
            how = {"delta_bias": delta_bias, "delta_softplus": delta_softplus, "return_last_state": return_last_state}
            return theirs(hidden_states, dt, A, B, C, D=D, z=z, **how, **others)
        return selective_scan(hidden_states, dt, A, B.transpose(1, 2), C.transpose(1, 2), D, z, delta_bias)

    return None if theirs is None else compute


def selective_scan(
    x: torch.Tensor,  # (rows, channels, tokens)
    dt: torch.Tensor,  # before its bias and softplus
    A: torch.Tensor,  # (channels, size of the state)
    B: torch.Tensor,  # (rows, tokens, size of the state)
    C: torch.Tensor,
    D: torch.Tensor,  # (channels,)
    z: torch.Tensor,
    bias: torch.Tensor,  # (channels,), of dt
) -> torch.Tensor:
    """Shaped as x."""
    answer: torch.Tensor = _SelectiveScan.apply(x, dt, A, B, C, D, z, bias)
    return answer


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*inputs)
        with torch.autocast(inputs[0].device.type, enabled=False):
            scanned, D, z, _ = _read(inputs)
            answer = _scan(scanned).addcmul_(scanned[0], D).mul_(F.silu(z))
        return answer.to(inputs[0].dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs: tuple[torch.Tensor, ...] = ctx.saved_tensors
        with torch.autocast(gradient.device.type, enabled=False):
            scanned, D, z, raised = _read(inputs)
            open_by = z.sigmoid()
            own = gradient.float() * z * open_by
            answer, of_x, of_dt, of_A, of_B, of_C = _learn(scanned, own)
            of_x.addcmul_(own, D)
            of_D = (own * scanned[0]).sum((0, 2))
            # silu'(z) = s (1 + z (1 - s))
            of_z = answer.addcmul_(scanned[0], D).mul_(gradient.float()).mul_(open_by * (1 + z * (1 - open_by)))
            of_dt *= raised.sigmoid()
        found = (of_x, of_dt, of_A, of_B, of_C, of_D, of_z, of_dt.sum((0, 2)))
        return tuple(value.to(given.dtype) for value, given in zip(found, inputs, strict=True))


def _read(inputs: tuple[torch.Tensor, ...]) -> tuple[Five, torch.Tensor, torch.Tensor, torch.Tensor]:
    """In fp32: what the scan takes (its steps positive), D beside the channels, z, and dt with its bias."""
    x, dt, A, B, C, D, z, bias = (one.detach().float() for one in inputs)
    raised = dt + bias[:, None]
    return (x, F.softplus(raised), A, B, C), D[:, None], z, raised


def _scan(inputs: Five) -> torch.Tensor:
    rows, channels, tokens = inputs[0].shape
    answer = torch.empty((rows, channels, tokens), device=inputs[0].device)
    if _is_compiled(inputs):
        given = [one.contiguous() for one in inputs]
        _call("scan_forward", (*given, answer), rows, channels, tokens, inputs[2].shape[1])
        return answer
    for some in _some_channels(inputs):
        answer[:, some] = _by_chunks(_of(inputs, some))
    return answer


def _learn(inputs: Five, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The scan's answer, and the gradients of what it takes."""
    rows, channels, tokens = inputs[0].shape
    answer, of_x, of_steps = (torch.empty_like(gradient, memory_format=torch.contiguous_format) for _ in range(3))
    of_A = torch.empty_like(inputs[2], memory_format=torch.contiguous_format)
    if _is_compiled(inputs):
        given = [one.contiguous() for one in (*inputs, gradient)]
        parts = min(_PARTS, channels)
        of_B, of_C = (torch.empty((parts, *inputs[3].shape)) for _ in range(2))
        found = answer, of_x, of_steps, of_A, of_B, of_C
        _call("scan_backward", (*given, *found), rows, channels, tokens, of_A.shape[1], parts)
        return answer, of_x, of_steps, of_A, of_B.sum(0), of_C.sum(0)
    of_B, of_C = (torch.zeros_like(one) for one in inputs[3:])
    for some in _some_channels(inputs):
        with torch.enable_grad():
            own = tuple(one.detach().requires_grad_() for one in _of(inputs, some))
            value = _by_chunks(own)  # type: ignore[arg-type]
            slopes = torch.autograd.grad(value, own, gradient[:, some])
        answer[:, some], of_x[:, some], of_steps[:, some], of_A[some] = value.detach(), *slopes[:3]
        of_B += slopes[3]
        of_C += slopes[4]
    return answer, of_x, of_steps, of_A, of_B, of_C


def _is_compiled(inputs: Five) -> bool:
    """Whether the kernel computes it; of fake tensors, whether it would."""
    is_fake = isinstance(inputs[0], FakeTensor) and inputs[0].device.type == "cpu" and native.find() is not None
    return inputs[2].shape[1] <= _LARGEST and (is_fake or native.serves(*inputs))


def _call(name: str, tensors: tuple[torch.Tensor, ...], *sizes: int) -> None:
    if not isinstance(tensors[0], FakeTensor):
        places = (one.data_ptr() for one in tensors)
        getattr(native.find(), name)(*places, *sizes, torch.get_num_threads())


def _some_channels(inputs: Five) -> Iterator[slice]:
    rows, channels, tokens = inputs[0].shape
    numbers = AT_ONCE.get(inputs[0].device.type, AT_ONCE["cuda"])
    at_once = max(1, numbers // (rows * tokens * inputs[2].shape[1]))
    for first in range(0, channels, at_once):
        yield slice(first, min(first + at_once, channels))


def _of(inputs: Five, some: slice) -> Five:
    x, steps, A, B, C = inputs
    return x[:, some], steps[:, some], A[some], B, C


def _by_chunks(inputs: Five) -> torch.Tensor:
    """In torch's words: token by token in all chunks at once, from the state that each begins with."""
    tokens, (_, _, A, _, _) = inputs[0].shape[2], inputs
    x, steps, B, C = (_to_chunks(one) for one in (inputs[0].mT, inputs[1].mT, *inputs[3:]))
    state = x.new_zeros(*x.shape[:2], x.shape[3], A.shape[1])  # (rows, chunks, channels, size)
    by_token = list(zip(*(one.unbind(2) for one in (steps, steps * x, B, C)), strict=True))

    def after(state: torch.Tensor, step: torch.Tensor, written: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        return torch.addcmul((step[..., None] * A).exp() * state, written[..., None], B[:, :, None])

    if x.shape[1] > 1:
        for *token, _ in by_token:
            state = after(state, *token)
        own, over = state.unbind(1), (steps.sum(2)[..., None] * A).exp().unbind(1)
        begins = [torch.zeros_like(own[0])]
        for n in range(x.shape[1] - 1):
            begins.append(torch.addcmul(own[n], begins[-1], over[n]))
        state = torch.stack(begins, dim=1)
    answers = []
    for *token, read in by_token:
        state = after(state, *token)
        answers.append((state @ read[..., None])[..., 0])
    return torch.stack(answers, dim=2).flatten(1, 2)[:, :tokens].mT


def _to_chunks(states: torch.Tensor) -> torch.Tensor:
    """(rows, tokens, ...) as (rows, chunks, tokens, ...), zeros behind the end."""
    return F.pad(states, (0, 0, 0, -states.shape[1] % CHUNK)).unflatten(1, (-1, CHUNK))
