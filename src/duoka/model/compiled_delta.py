"""The delta rules on CPUs by a compiled kernel (delta.cpp), token by token.

What decays a state is one number for each head (delta_rule.py) or for each number of its keys (kimi_delta.py).
"""

from __future__ import annotations

from typing import Any

import torch

from duoka.model import native
from duoka.torch_private import FakeTensor

_MOST, _LANES, _COLUMNS = 256, 16, 4  # numbers of a key that the kernel takes, and what they and values come in
_LONGEST = 16_384  # tokens of a row: each thread keeps seven forms of its keys, where chunks take heads in turns


def fits(query: torch.Tensor, value: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether the kernel computes it; of fake tensors, whether it would."""
    dim, is_whole = query.shape[-1], query.shape[-1] % _LANES == 0 and value.shape[-1] % _COLUMNS == 0
    if dim > _MOST or not is_whole or query.shape[1] > _LONGEST:
        return False
    if isinstance(query, FakeTensor):
        narrow = query.dtype in (torch.float32, torch.bfloat16)
        return query.device.type == "cpu" and narrow and native.find() is not None
    return query.numel() > 0 and native.serves(query, value, *others)


def compiled_delta(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, has_norms: bool
) -> torch.Tensor:
    answer: torch.Tensor = _CompiledDelta.apply(has_norms, query, key, value, g, beta)
    return answer


class _CompiledDelta(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, has_norms: bool, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*inputs)
        ctx.has_norms = has_norms
        read = _read(inputs)
        answer = torch.empty(read[2].shape, dtype=read[2].dtype, device=read[2].device)
        _call("delta_forward", read, (answer,), has_norms)
        return answer.to(inputs[2].dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        inputs: tuple[torch.Tensor, ...] = ctx.saved_tensors
        read = _read(inputs)
        found = [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in read]
        _call("delta_backward", read, (gradient.to(read[2].dtype).contiguous(), *found), ctx.has_norms)
        return None, *(value.to(given.dtype) for value, given in zip(found, inputs, strict=True))


def _read(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """As the kernel reads them: queries, keys and values of one type, decays and betas in fp32."""
    kinds = {one.dtype for one in inputs[:3]}
    kind = kinds.pop() if len(kinds) == 1 else torch.float32
    types = (kind, kind, kind, torch.float32, torch.float32)
    return tuple(one.detach().to(dtype).contiguous() for one, dtype in zip(inputs, types, strict=True))


def _call(name: str, read: tuple[torch.Tensor, ...], others: tuple[torch.Tensor, ...], has_norms: bool) -> None:
    query, _, value, g, _ = read
    if isinstance(query, FakeTensor):
        return
    rows, tokens, key_heads, dim = query.shape
    sizes = (rows, tokens, key_heads, *value.shape[2:3], dim, value.shape[3], dim if g.dim() == 4 else 1)
    places = (one.data_ptr() for one in (*read, *others))
    how = (has_norms, value.dtype is torch.float32, torch.get_num_threads())
    getattr(native.find(), name)(*places, *sizes, *how)
