"""Attention on CPUs by the compiled kernels (attention.cpp, attention_wide.cpp): all documents of a row in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from duoka.model import native
from duoka.model.documents import Documents
from duoka.model.dtypes import computed_in
from duoka.model.one_document import Scoring

# Of one document, where products are fp32's: each thread keeps six forms of its keys, and torch's is as fast by then.
_LONGEST_WIDE = 8192
ALLOWED = "attends_by_own_kernel"  # on an attention module: these kernels may compute it
Edges = tuple[torch.Tensor, torch.Tensor]
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]  # queries, keys, values, sinks


class _Inputs(ctypes.Structure):  # as attention.h has them
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "key", "value")),
        *((name, ctypes.c_int64) for name in ("query_stride", "key_stride", "value_stride")),
        *((name, ctypes.c_void_p) for name in ("query_edges", "key_edges")),
        *((name, ctypes.c_int64) for name in ("documents", "heads", "groups", "dim", "value_dim", "tokens", "window")),
        ("sinks", ctypes.c_void_p),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


def attend_compiled(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents | None, how: Scoring
) -> torch.Tensor | None:
    """On a CPU, all documents in one call; None where these kernels do not know the case.

    (rows, heads, tokens, dim) in, (rows, tokens, heads, dim) out.
    """
    dtype = computed_in(query)
    rows, _, tokens, _ = query.shape
    longest, count = (tokens, rows) if documents is None else (documents.longest_key, len(documents.lengths))
    if how.drop is not None or not fits((query, key, value, how.sinks), dtype, count, longest):
        return None
    # Edges that do not fill the row are for torch's form to refuse.
    if documents is not None and (rows > 1 or int(documents.edges[0]) or int(documents.edges[-1]) != tokens):
        return None
    edges = documents.both_edges if documents is not None else (torch.arange(rows + 1, dtype=torch.int32) * tokens,) * 2
    return attend_documents(query.to(dtype), key.to(dtype), value.to(dtype), edges, how)


def fits(inputs: Heads, dtype: torch.dtype, num_documents: int, longest: int) -> bool:
    """Whether they can be computed as `dtype`, and there is work for every thread: else torch's kernel is faster.

    So a run of more threads may attend by torch's kernel, whose results differ by their type's last digits.
    """
    query, key, value, sinks = inputs
    given = (query, key, value) if sinks is None else (query, key, value, sinks)
    if dtype not in (torch.float32, torch.bfloat16) or not native.serves(*given):
        return False
    if longest > _LONGEST_WIDE and not (native.level() > 1 and dtype is torch.bfloat16):
        return False
    heads, groups, dims = query.shape[1], key.shape[1], (query.shape[-1], value.shape[-1])
    is_whole = heads % groups == 0 and not any(dim % 16 for dim in dims)
    return is_whole and num_documents * groups >= torch.get_num_threads()


def attend_documents(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, edges: Edges, how: Scoring
) -> torch.Tensor:
    """Causal, each document for itself, in fp32 or bf16.

    `edges`: where documents begin, and the end, of queries and of keys; one with more keys asks for its last tokens.
    """
    scale = how.scaling if how.scaling is not None else query.shape[-1] ** -0.5
    answer: torch.Tensor = CompiledAttention.apply(
        query, key, value, how.sinks, edges, (scale, how.softcap, how.window)
    )
    return answer


class CompiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        edges: Edges,
        how: tuple[float, float | None, int | None],
    ) -> torch.Tensor:
        heads = tuple(native.laid_by_token(one) for one in (query, key, value))
        rows, count, tokens, _ = query.shape
        out = torch.empty((rows, tokens, count, value.shape[-1]), dtype=query.dtype)
        sums = torch.empty((count, rows * tokens), dtype=torch.float32)
        wide = None if sinks is None else sinks.detach().float().contiguous()
        call, rest = _kernel("forward", out)
        call(ctypes.byref(_inputs(heads, edges, wide, how)), out.data_ptr(), sums.data_ptr(), *rest)
        ctx.save_for_backward(*heads, *edges, out, sums, sinks)
        ctx.how = how
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        query, key, value, *edges, out, sums, sinks = ctx.saved_tensors
        heads, grad = (query, key, value), grad.contiguous()
        wide, sink_slopes = (None, None) if sinks is None else (sinks.float().contiguous(), torch.empty_like(sums))
        slopes = [torch.empty(one.transpose(1, 2).shape, dtype=out.dtype) for one in heads]
        call, rest = _kernel("backward", out)
        places = (None if one is None else one.data_ptr() for one in (out, grad, sums, *slopes, sink_slopes))
        call(ctypes.byref(_inputs(heads, edges, wide, ctx.how)), *places, *rest)
        of_sinks = None if sink_slopes is None else sink_slopes.sum(dim=1).to(sinks.dtype)
        return *(one.transpose(1, 2) for one in slopes), of_sinks, None, None


def _kernel(direction: str, out: torch.Tensor) -> tuple[Callable[..., None], tuple[int, ...]]:
    """The fastest that this processor has, and its last arguments."""
    library, threads = native.library(), torch.get_num_threads()
    if library.has_narrow_attention and out.dtype is torch.bfloat16:
        return getattr(library, f"attention_{direction}"), (threads,)
    return getattr(library, f"wide_attention_{direction}"), (out.dtype is torch.float32, threads)


def _inputs(heads: Any, edges: Any, sinks: torch.Tensor | None, how: tuple[float, float | None, int | None]) -> _Inputs:
    query, key, value = heads
    scale, softcap, window = how
    rows, count, tokens, dim = query.shape
    return _Inputs(
        *(one.data_ptr() for one in heads), *(one.stride(2) for one in heads), *(one.data_ptr() for one in edges),
        len(edges[0]) - 1, count, key.shape[1], dim, value.shape[-1], rows * tokens, window or 0,
        None if sinks is None else sinks.data_ptr(), scale, softcap or 0.0,
    )  # fmt: skip
