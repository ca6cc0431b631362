"""The scan of Mamba 2 (Granite 4, Nemotron-H, Falcon-H1, Bamba, Zamba 2) as one function with its own gradient.

A head's state S (size of the state, dim of the head) decays by e^a at each token, which then writes to it and reads it:

    S_t = e^{a_t} S_{t-1} + dt_t B_t x_t,    y_t = C_t S_t + D x_t

Chunks of tokens are computed at once (the "state space duality" of the Mamba 2 paper), in fp32 under autocast too. Of
transformers' own function autograd keeps tensors of tokens x tokens for each head; here what it reads is kept, and the
backward pass computes the rest again, some heads after the others. Where mamba-ssm is there, its kernels are left.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

NAME, KERNELS = "mamba2_chunk_scan", "mamba_ssm"  # transformers' function, and the package that is faster
CHUNK = 64
# Numbers of heads that are computed together: what a processor's caches hold, or enough for a GPU.
AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 24}


def in_place_of(theirs: Any) -> Any:
    def compute(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        initial_states: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **others: Any,
    ) -> Any:
        if initial_states is not None or return_final_states or not dt_softplus or others.get("z") is not None:
            how = {"dt_softplus": dt_softplus, "dt_limit": dt_limit, "return_final_states": return_final_states}
            given = {"D": D, "dt_bias": dt_bias, "initial_states": initial_states, **how, **others}
            return theirs(hidden_states, dt, A, B, C, chunk_size, **given)
        steps = F.softplus(dt.float() if dt_bias is None else dt.float() + dt_bias.float())
        if tuple(dt_limit) != (0.0, float("inf")):
            steps = steps.clamp(*dt_limit)
        return chunk_scan(hidden_states, steps, steps * A.float(), B, C, D)

    return None if theirs is None else compute


def chunk_scan(
    x: torch.Tensor,  # (rows, tokens, heads, dim)
    dt: torch.Tensor,  # (rows, tokens, heads)
    a: torch.Tensor,  # (rows, tokens, heads): the logarithm of the decay
    B: torch.Tensor,  # (rows, tokens, groups of heads, size of the state)
    C: torch.Tensor,
    D: torch.Tensor | None,  # (heads,)
) -> torch.Tensor:
    """Shaped as x."""
    answer: torch.Tensor = _ChunkScan.apply(x, dt, a, B, C, x.new_zeros(x.shape[2]) if D is None else D)
    return answer


class _ChunkScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*inputs)
        x, D = inputs[0], inputs[5].float()
        answer = torch.empty_like(x, memory_format=torch.contiguous_format)
        with torch.autocast(x.device.type, enabled=False):
            for group, heads in _some_heads(inputs):
                for one in heads:
                    at = _read(inputs, one, group)
                    found = _reads_state(at, _scan(at)) + (at.attention @ at.written.transpose(2, 3)).transpose(2, 3)
                    answer[:, :, one] = _from_chunks(found + at.x * D[one, None], x.shape[1])
        return answer

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs: tuple[torch.Tensor, ...] = ctx.saved_tensors
        found = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in inputs]
        tokens, D = inputs[0].shape[1], inputs[5].float()
        with torch.autocast(gradient.device.type, enabled=False):
            for group, heads in _some_heads(inputs):
                of_group: Any = (0, 0)
                for one in heads:
                    at, own = _read(inputs, one, group), _to_chunks(gradient[:, :, one])
                    *of_heads, of_B, of_C = _learn(at, own)
                    of_heads[0].addcmul_(own, D[one, None])
                    for place, value in enumerate(of_heads):
                        found[place][:, :, one] = _from_chunks(value, tokens)
                    found[5][one] = (own * at.x).sum((0, 1, 2, 4)).to(D.dtype)
                    of_group = of_group[0] + of_B, of_group[1] + of_C
                for place, value in zip((3, 4), of_group, strict=True):
                    found[place][:, :, group] = _from_chunks(value, tokens)
        return tuple(found)


def _some_heads(inputs: tuple[torch.Tensor, ...]) -> Iterator[tuple[int, list[slice]]]:
    """For each group the heads that share its B and C, as many at once as are computed together."""
    rows, tokens, num_heads, dim = inputs[0].shape
    num_groups = inputs[3].shape[2]
    size = num_heads // num_groups
    numbers = AT_ONCE.get(inputs[0].device.type, AT_ONCE["cuda"])
    at_once = max(1, numbers // (rows * tokens * dim))
    for group in range(num_groups):
        first, end = group * size, (group + 1) * size
        yield group, [slice(head, min(head + at_once, end)) for head in range(first, end, at_once)]


class _Chunks(NamedTuple):
    """In fp32, (rows, chunks, tokens, heads, dim) or the first of these."""

    x: torch.Tensor
    dt: torch.Tensor
    written: torch.Tensor  # x dt
    B: torch.Tensor  # (rows, chunks, tokens, size of the state)
    C: torch.Tensor
    since: torch.Tensor  # decay from the chunk's begin to each token
    until: torch.Tensor  # from each token to the chunk's end
    pairs: torch.Tensor  # (rows, chunks, heads, tokens, tokens): from the second to the first, 0 where it is later
    attention: torch.Tensor  # C times B, decayed


def _read(inputs: tuple[torch.Tensor, ...], heads: slice, group: int) -> _Chunks:
    x, dt, decay = (_to_chunks(one[:, :, heads]) for one in inputs[:3])
    B, C = (_to_chunks(one[:, :, group]) for one in inputs[3:5])
    decay = decay.double().cumsum(2)
    until = (decay[:, :, -1:] - decay).float().exp()
    pairs = decay_of_pairs(decay.transpose(2, 3).contiguous())
    attention = pairs * (C @ B.mT)[:, :, None]
    return _Chunks(x, dt, x * dt[..., None], B, C, decay.float().exp(), until, pairs, attention)


def decay_of_pairs(decay: torch.Tensor) -> torch.Tensor:
    """From (..., tokens), the logarithm of all decay up to each: (..., tokens, tokens), 0 where the second is later.

    Not below what fp32 can say: such exponentials take several times as long.
    """
    coarse, fine = in_two(decay)
    apart = (coarse[..., :, None] - coarse[..., None, :]).add_(fine[..., :, None]).sub_(fine[..., None, :])
    return apart.clamp_(-80.0, 0.0).exp_().tril_()


def in_two(decay: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two fp32 of an fp64, differences of whose first are exact: the whole decay is large beside that from one token to
    the next."""
    coarse = decay.detach().mul(256).round_().div_(256)
    return coarse.float(), (decay - coarse).float()


def _scan(at: _Chunks) -> torch.Tensor:
    """The state before each chunk: (rows, chunks, size of the state, heads, dim)."""
    own = _shared(at.B.mT, at.written * at.until[..., None])
    states = torch.zeros_like(own)
    for n in range(1, own.shape[1]):
        states[:, n] = own[:, n - 1].addcmul_(states[:, n - 1], _over(at)[:, n - 1])
    return states


def _over(at: _Chunks) -> torch.Tensor:
    """Decay over each whole chunk, beside its state."""
    return at.since[:, :, -1, None, :, None]


def _shared(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """A product with what all heads of a group share."""
    return (left @ right.flatten(3)).unflatten(3, right.shape[3:])


def _reads_state(at: _Chunks, states: torch.Tensor) -> torch.Tensor:
    return _shared(at.C, states).mul_(at.since[..., None])


def _learn(at: _Chunks, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gradients of x (but for D's part), dt, a, and of B and C from these heads, as chunks."""
    states, decayed = _scan(at), gradient * at.since[..., None]
    of_states = _shared(at.C.mT, decayed)  # before each chunk
    left = torch.zeros_like(of_states)  # after it
    for n in reversed(range(states.shape[1] - 1)):
        left[:, n] = of_states[:, n + 1].addcmul_(left[:, n + 1], _over(at)[:, n + 1])
    of_decay = (gradient * _reads_state(at, states)).sum(-1).double()  # what is added below cancels out
    of_written = _shared(at.B, left).mul_(at.until[..., None])
    leaves = (of_written * at.written).sum(-1)
    of_decay -= leaves
    of_decay[:, :, -1] += leaves.sum(2) + at.since[:, :, -1] * (states * left).sum((2, 4))

    by_head, written = gradient.transpose(2, 3), at.written.transpose(2, 3)
    of_attention = by_head @ written.mT
    of_products = (of_attention * at.pairs).sum(2)
    of_pairs = of_attention.mul_(at.attention).tril_(-1).double()
    of_decay += (of_pairs.sum(-1) - of_pairs.sum(-2)).transpose(2, 3)
    of_written += (at.attention.mT @ by_head).transpose(2, 3)
    of_B = (at.written * at.until[..., None]).flatten(3) @ left.flatten(3).mT + of_products.mT @ at.C
    of_C = decayed.flatten(3) @ states.flatten(3).mT + of_products @ at.B
    of_a = of_decay.flip(2).cumsum(2).flip(2).float()
    return of_written * at.dt[..., None], (of_written * at.x).sum(-1), of_a, of_B, of_C


def _to_chunks(states: torch.Tensor) -> torch.Tensor:
    """(rows, tokens, ...) as (rows, chunks, tokens, ...) in fp32, zeros behind the end."""
    more = -states.shape[1] % CHUNK
    padding = (0, 0) * (states.dim() - 2) + (0, more)
    filled = F.pad(states.float(), padding) if more else states.to(torch.float32, memory_format=torch.contiguous_format)
    return filled.unflatten(1, (-1, CHUNK))


def _from_chunks(states: torch.Tensor, tokens: int) -> torch.Tensor:
    return states.flatten(1, 2)[:, :tokens]
