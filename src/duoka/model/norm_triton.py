"""RMS norm on GPUs, in Triton: one kernel each way, from a wide residual stream to the type that products compute in.

torch's operators and Liger's kernels answer as wide as they are given, so that casts of the same numbers follow.
Imported where Triton is there, which torch brings for CUDA.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

_AT_ONCE = 4096  # numbers of a program's tile: several short rows, as of heads, or one long one
_PROGRAMS = 8  # for each multiprocessor, where each sums up the weight's gradient over rows of its own


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x, weight, out, inverses, num_rows, eps, dim: tl.constexpr, width: tl.constexpr, num: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * num + tl.arange(0, num)
    columns = tl.arange(0, width)
    at = rows[:, None] * dim + columns[None, :]
    exists = (rows < num_rows)[:, None] & (columns < dim)[None, :]
    found = tl.load(x + at, mask=exists, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(found * found, axis=1) / dim + eps)
    factors = tl.load(weight + columns, mask=columns < dim, other=0.0).to(tl.float32)
    answer = found * inverse[:, None] * factors[None, :]
    tl.store(out + at, answer.to(out.dtype.element_ty), mask=exists)
    tl.store(inverses + rows, inverse, mask=rows < num_rows)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    grad, x, weight, inverses, x_grad, sums, num_rows, dim: tl.constexpr, width: tl.constexpr, num: tl.constexpr,
    learns: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    columns = tl.arange(0, width)
    factors = tl.load(weight + columns, mask=columns < dim, other=0.0).to(tl.float32)
    total = tl.zeros((width,), tl.float32)
    for first in range(program * num, num_rows, tl.num_programs(0) * num):
        rows = (first + tl.arange(0, num)).to(tl.int64)
        at = rows[:, None] * dim + columns[None, :]
        exists = (rows < num_rows)[:, None] & (columns < dim)[None, :]
        slope = tl.load(grad + at, mask=exists, other=0.0).to(tl.float32)
        inverse = tl.load(inverses + rows, mask=rows < num_rows, other=0.0)[:, None]
        normed = tl.load(x + at, mask=exists, other=0.0).to(tl.float32) * inverse
        scaled = slope * factors[None, :]
        along = tl.sum(scaled * normed, axis=1)[:, None] / dim
        tl.store(x_grad + at, ((scaled - normed * along) * inverse).to(x_grad.dtype.element_ty), mask=exists)
        if learns:
            total += tl.sum(slope * normed, axis=0)
    if learns:
        tl.store(sums + program.to(tl.int64) * dim + columns, total, mask=columns < dim)


def _laid_out(dim: int) -> dict[str, Any]:
    width = triton.next_power_of_2(dim)
    num = max(1, _AT_ONCE // width)
    return {"dim": dim, "width": width, "num": num, "num_warps": 16 if width > 4096 else 8}


@functools.cache
def _most_programs(device: torch.device) -> int:
    on_gpu = device.type == "cuda"  # else Triton's interpreter runs one after the other
    return _PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 2


class RmsNorm(torch.autograd.Function):
    """x * weight / rms(x), in fp32, rounded once to `dtype`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
        x = x.contiguous()
        how = _laid_out(x.shape[-1])
        num_rows = x.numel() // x.shape[-1]
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        inverses = torch.empty(num_rows, dtype=torch.float32, device=x.device)
        if num_rows:
            _forward[(triton.cdiv(num_rows, how["num"]),)](x, weight, out, inverses, num_rows, eps, **how)
        ctx.save_for_backward(x, weight, inverses)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, weight, inverses = ctx.saved_tensors
        learns, how = ctx.needs_input_grad[1], _laid_out(x.shape[-1])
        count = triton.cdiv(len(inverses), how["num"])
        if learns:
            count = min(count, _most_programs(x.device))
        x_grad = torch.empty_like(x)
        sums = torch.empty((count, x.shape[-1]) if learns else (0,), dtype=torch.float32, device=x.device)
        if count:
            _backward[(count,)](
                grad.contiguous(), x, weight, inverses, x_grad, sums, len(inverses), learns=learns, **how
            )
        return x_grad, sums.sum(dim=0).to(weight.dtype) if learns else None, None, None
