"""Kimi's delta rule (Kimi Linear, Ling and Ring in their linear forms): as that of delta_rule.py, but each number of a
key decays by itself.

So pairs of tokens of a chunk have a decay for each of these numbers, and chunks are short here. Of transformers' own
function autograd keeps such tensors of chunks of 64 tokens, and the gradient of each chunk that it takes is as large as
all of them. Here what it reads is kept, and the backward pass computes the rest again, some heads after the others.
Where flash-linear-attention is there, its kernels are left.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from duoka.model import compiled_delta
from duoka.model.chunk_scan import in_two
from duoka.model.delta_rule import unless_state

NAME, KERNELS = "chunk_kimi_delta_attention", "fla"  # transformers' function, and the package that is faster
CHUNK = 16
# Numbers of pairs that are computed together.
AT_ONCE = {"cpu": 1 << 21, "cuda": 1 << 26}
_EPS = 1e-6  # of the norms of queries and keys


def in_place_of(theirs: Any) -> Any:
    return unless_state(theirs, kimi_delta)


def kimi_delta(
    query: torch.Tensor,  # (rows, tokens, heads, dim)
    key: torch.Tensor,
    value: torch.Tensor,  # (rows, tokens, heads, dim of values)
    g: torch.Tensor,  # (rows, tokens, heads, dim): the logarithm of the decay
    beta: torch.Tensor,  # (rows, tokens, heads)
    *,
    has_norms: bool,
) -> torch.Tensor:
    """Shaped as the values. `has_norms`: queries and keys are brought to length 1."""
    if compiled_delta.fits(query, value, key, g, beta):
        return compiled_delta.compiled_delta(query, key, value, g, beta, has_norms)
    answer: torch.Tensor = _KimiDelta.apply(has_norms, query, key, value, g, beta)
    return answer


class _KimiDelta(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, has_norms: bool, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*inputs)
        ctx.has_norms = has_norms
        answer = torch.empty_like(inputs[2], memory_format=torch.contiguous_format)
        with torch.autocast(answer.device.type, enabled=False):
            for some in _some_heads(inputs):
                answer[:, :, some] = _by_chunks(has_norms, *(one[:, :, some] for one in inputs))
        return answer

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs: tuple[torch.Tensor, ...] = ctx.saved_tensors
        found = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in inputs]
        with torch.autocast(gradients[0].device.type, enabled=False), torch.enable_grad():
            for some in _some_heads(inputs):
                own = [one[:, :, some].detach().requires_grad_() for one in inputs]
                answer = _by_chunks(ctx.has_norms, *own)
                slopes = torch.autograd.grad(answer, own, gradients[0][:, :, some].float())
                for place, slope in zip(found, slopes, strict=True):
                    place[:, :, some] = slope
        return None, *found


def _some_heads(inputs: tuple[torch.Tensor, ...]) -> Iterator[slice]:
    rows, tokens, num_heads, dim = inputs[0].shape
    numbers = AT_ONCE.get(inputs[0].device.type, AT_ONCE["cuda"])
    at_once = max(1, numbers // (rows * tokens * CHUNK * dim))
    for first in range(0, num_heads, at_once):
        yield slice(first, min(first + at_once, num_heads))


def _by_chunks(
    has_norms: bool, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    tokens = query.shape[1]
    query, key, value, g, beta = (_to_chunks(one) for one in (query, key, value, g, beta[..., None]))
    if has_norms:
        query, key = (one * torch.rsqrt(one.square().sum(-1, keepdim=True) + _EPS) for one in (query, key))
    query, written, decay = query * query.shape[-1] ** -0.5, key * beta, g.double().cumsum(-2)
    coarse, fine = in_two(decay)
    apart = (coarse[..., :, None, :] - coarse[..., None, :, :]) + (fine[..., :, None, :] - fine[..., None, :, :])
    # (..., tokens, tokens, dim): keys, decayed until the first. Less than what fp32 can say takes long.
    keys = apart.clamp(-80.0, 0.0).exp() * key[..., None, :, :]
    attention, below = ((keys @ one[..., None])[..., 0] for one in (query, written))
    attention, below, since = attention.tril(), below.tril(-1), decay.float().exp()
    both = torch.cat((value * beta, written * since), dim=-1)
    solved = torch.linalg.solve_triangular(below, both, upper=False, unitriangular=True)
    values, reads = solved.split((value.shape[-1], key.shape[-1]), dim=-1)

    left = key * (decay[..., -1:, :] - decay).float().exp()
    state = query.new_zeros(*query.shape[:2], query.shape[-1], value.shape[-1])
    answers = []
    by_chunk = (one.unbind(2) for one in (query * since, attention, values, reads, left, since[..., -1, :, None]))
    for asks, near, new, reading, leaves, over in zip(*by_chunk, strict=True):
        new = new - reading @ state
        answers.append(asks @ state + near @ new)
        state = state * over + leaves.mT @ new
    return torch.stack(answers, dim=2).flatten(2, 3)[:, :, :tokens].transpose(1, 2)


def _to_chunks(states: torch.Tensor) -> torch.Tensor:
    """(rows, tokens, heads, dim) as (rows, heads, chunks, tokens, dim) in fp32, zeros behind the end."""
    states = states.transpose(1, 2).float()
    return F.pad(states, (0, 0, 0, -states.shape[2] % CHUNK)).unflatten(2, (-1, CHUNK))
