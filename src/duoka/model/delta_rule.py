"""The gated delta rule of linear attention (Qwen3.5, Qwen3-Next, OLMo-hybrid) as one function with its own gradient.

Each token decays a state S (dim of keys, dim of values) by e^g, and writes to it what S misses of its value at its key:

    S_t = e^{g_t} (S - beta_t k_t (k_t S)) + beta_t k_t v_t,    o_t = q_t S_t

Chunks of tokens are computed at once (the UT transform of the DeltaNet papers), in fp32 under autocast too. Of
transformers' own function autograd keeps some twenty tensors in fp32; here what it reads is kept, and the backward pass
computes the rest again, some heads after the others. Where flash-linear-attention is there, its kernels are left.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from duoka.model import compiled_delta
from duoka.model.chunk_scan import decay_of_pairs

NAME, KERNELS = "torch_chunk_gated_delta_rule", "fla"  # transformers' function, and the package that is faster
CHUNK = 64
# Numbers of the values of heads that are computed together: what a processor's caches hold, or enough for a GPU.
AT_ONCE = {"cpu": 1 << 19, "cuda": 1 << 24}
_EPS = 1e-6  # of the norms of queries and keys


def in_place_of(theirs: Any) -> Any:
    return unless_state(theirs, delta_rule)


def unless_state(theirs: Any, own: Any) -> Any:
    """transformers' function of a delta rule, with ours in its place where no state is given or asked for."""

    def compute(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        *,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **others: Any,
    ) -> Any:
        if initial_state is None and not output_final_state:
            return own(query, key, value, g, beta, has_norms=use_qk_l2norm_in_kernel), None
        states = {"initial_state": initial_state, "output_final_state": output_final_state}
        how = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, **others}
        return theirs(query, key, value, g, beta, **states, **how)

    return None if theirs is None else compute


def delta_rule(
    query: torch.Tensor,  # (rows, tokens, key heads, dim)
    key: torch.Tensor,
    value: torch.Tensor,  # (rows, tokens, value heads, dim of values)
    g: torch.Tensor,  # (rows, tokens, value heads): the logarithm of the decay
    beta: torch.Tensor,  # (rows, tokens, value heads)
    *,
    has_norms: bool,
) -> torch.Tensor:
    """Shaped as the values. `has_norms`: queries and keys are brought to length 1."""
    if compiled_delta.fits(query, value, key, g, beta):
        return compiled_delta.compiled_delta(query, key, value, g, beta, has_norms)
    answer: torch.Tensor = _DeltaRule.apply(has_norms, query, key, value, g, beta)
    return answer


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, has_norms: bool, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*inputs)
        ctx.has_norms = has_norms
        answer = torch.empty_like(inputs[2], memory_format=torch.contiguous_format)
        with torch.autocast(answer.device.type, enabled=False):
            for keys, values in _some_heads(inputs):
                chunks = _read(inputs, keys, values, has_norms)
                answer[:, :, values] = _from_chunks(_scan(chunks, _solve(chunks))[0], answer.shape[1])
        return answer

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs: tuple[torch.Tensor, ...] = ctx.saved_tensors
        found = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in inputs]
        with torch.autocast(gradients[0].device.type, enabled=False):
            for keys, values in _some_heads(inputs):
                chunks = _read(inputs, keys, values, ctx.has_norms)
                own = _learn(chunks, _to_chunks(gradients[0][:, :, values]))
                for place, gradient in enumerate(own):
                    found[place][:, :, keys if place < 2 else values] = _from_chunks(gradient, inputs[0].shape[1])
        return None, *found


def _some_heads(inputs: tuple[torch.Tensor, ...]) -> Iterator[tuple[slice, slice]]:
    """Of keys, and of the values that share them."""
    rows, tokens, num_heads, dim = inputs[2].shape
    group = num_heads // inputs[0].shape[2]
    numbers = AT_ONCE.get(inputs[2].device.type, AT_ONCE["cuda"])
    at_once = max(1, numbers // (rows * tokens * dim * group))
    for first in range(0, inputs[0].shape[2], at_once):
        last = min(first + at_once, inputs[0].shape[2])
        yield slice(first, last), slice(first * group, last * group)


class _Chunks(NamedTuple):
    """All (rows, value heads, chunks, tokens, ...) in fp32, but for what is said of keys' heads."""

    query: torch.Tensor  # of length 1 where it has norms, scaled
    key: torch.Tensor
    value: torch.Tensor
    beta: torch.Tensor  # (..., 1)
    decay: torch.Tensor  # the logarithm of all decay from the chunk's begin to each token, in fp64
    pairs: torch.Tensor  # (..., tokens, tokens): decay from the second to the first, 0 where the second is later
    lengths: tuple[torch.Tensor, torch.Tensor] | None  # by which queries and keys were divided, of keys' heads: 1 / |x|
    group: int  # value heads of each key


class _Solved(NamedTuple):
    inverse: torch.Tensor  # of the chunk's triangular system
    below: torch.Tensor  # that system, below its diagonal of ones
    attention: torch.Tensor  # queries times keys, decayed
    values: torch.Tensor  # what each token writes, were the state empty
    keys: torch.Tensor  # by which it reads what to leave out of that


def _read(inputs: tuple[torch.Tensor, ...], keys: slice, values: slice, has_norms: bool) -> _Chunks:
    query, key = (_to_chunks(one[:, :, keys]) for one in inputs[:2])
    value, decay, beta = (_to_chunks(one[:, :, values]) for one in inputs[2:])
    lengths = None
    if has_norms:
        lengths = tuple(torch.rsqrt(one.square().sum(-1, keepdim=True) + _EPS) for one in (query, key))
        query, key = query * lengths[0], key * lengths[1]
    group = value.shape[1] // key.shape[1]
    query = query * query.shape[-1] ** -0.5
    if group > 1:
        query, key = (one.repeat_interleave(group, dim=1) for one in (query, key))
    decay = decay.double().cumsum(-1)
    pairs = decay_of_pairs(decay)
    return _Chunks(query, key, value, beta[..., None], decay, pairs, lengths, group)  # type: ignore[arg-type]


def _solve(at: _Chunks) -> _Solved:
    written = at.key * at.beta
    below = (written @ at.key.mT).mul_(at.pairs).tril_(-1)
    one = torch.eye(CHUNK, device=below.device).expand_as(below)
    inverse = torch.linalg.solve_triangular(below, one, upper=False, unitriangular=True)
    attention = (at.query @ at.key.mT).mul_(at.pairs)
    return _Solved(inverse, below, attention, inverse @ (at.value * at.beta), inverse @ (written * _since(at)))


def _since(at: _Chunks) -> torch.Tensor:
    """Decay from the chunk's begin to each token."""
    return at.decay.float().exp()[..., None]


def _until(at: _Chunks) -> torch.Tensor:
    """From each token to the chunk's end."""
    return (at.decay[..., -1:] - at.decay).float().exp()[..., None]


def _scan(at: _Chunks, solved: _Solved) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """(answers, the state before each chunk, what each chunk writes)."""
    query, key = at.query * _since(at), at.key * _until(at)
    over = _since(at)[..., -1, :, None]
    state = query.new_zeros(*query.shape[:2], query.shape[-1], at.value.shape[-1])
    states, written, answers = [], [], []
    for n in range(query.shape[2]):
        states.append(state)
        written.append(solved.values[:, :, n] - solved.keys[:, :, n] @ state)
        answers.append(query[:, :, n] @ state + solved.attention[:, :, n] @ written[-1])
        state = state * over[:, :, n] + key[:, :, n].mT @ written[-1]
    return torch.stack(answers, dim=2), states, written


def _learn(at: _Chunks, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gradients of query, key, value, g and beta, as chunks."""
    solved = _solve(at)
    _, states, written = _scan(at, solved)
    since, until = _since(at), _until(at)
    query, key, over = at.query * since, at.key * until, since[..., -1, 0]
    of_state = torch.zeros_like(states[0])
    of_written, of_keys, of_over, of_query, of_key = [], [], [], [], []
    for n in reversed(range(query.shape[2])):
        own = gradient[:, :, n]
        of_written.append(solved.attention[:, :, n].mT @ own + key[:, :, n] @ of_state)
        of_query.append(own @ states[n].mT)
        of_key.append(written[n] @ of_state.mT)
        of_keys.append(-(of_written[-1] @ states[n].mT))
        of_over.append((states[n] * of_state).sum((-1, -2)))
        of_state = of_state * over[:, :, n, None, None] + query[:, :, n].mT @ own
        of_state -= solved.keys[:, :, n].mT @ of_written[-1]
    d_written, d_keys, d_over, d_query, d_key = (
        torch.stack(one[::-1], dim=2) for one in (of_written, of_keys, of_over, of_query, of_key)
    )
    return _through_chunks(
        at, solved, (gradient, torch.stack(written, dim=2), d_written, d_keys), (d_query, d_key), d_over
    )


def _through_chunks(
    at: _Chunks,
    solved: _Solved,
    scanned: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    read: tuple[torch.Tensor, torch.Tensor],
    of_over: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """What the scan gave gradients for, down to what was read."""
    gradient, written, of_values, of_keys = scanned
    since, until = _since(at), _until(at)
    of_values, of_keys = solved.inverse.mT @ of_values, solved.inverse.mT @ of_keys
    of_below = -(of_values @ solved.values.mT + of_keys @ solved.keys.mT).tril_(-1)
    of_attention = (gradient @ written.mT).tril_()
    of_pairs = of_below * solved.below + of_attention * solved.attention
    of_below.mul_(at.pairs)
    of_attention.mul_(at.pairs)
    scaled, of_since = at.key * at.beta, of_keys * since
    of_scaled = of_below @ at.key + of_since
    d_query = of_attention @ at.key + read[0] * since
    d_key = of_below.mT @ scaled + of_attention.mT @ at.query + read[1] * until + of_scaled * at.beta
    leaves = (read[1] * at.key).sum(-1) * until[..., 0]
    of_pairs = of_pairs.double()  # what is added below cancels out
    d_decay = of_pairs.sum(-1) - of_pairs.sum(-2) + (of_since * scaled).sum(-1)
    d_decay += (read[0] * at.query).sum(-1) * since[..., 0] - leaves
    d_decay[..., -1] += leaves.sum(-1) + of_over * since[..., -1, 0]
    d_beta = (of_values * at.value).sum(-1) + (of_scaled * at.key).sum(-1)
    d_g = d_decay.flip(-1).cumsum(-1).flip(-1).float()
    both = (d_query, at.query, 0, at.query.shape[-1] ** -0.5), (d_key, at.key, 1, 1.0)
    return *(_through_norm(at, *one) for one in both), of_values * at.beta, d_g, d_beta


def _through_norm(at: _Chunks, gradient: torch.Tensor, unit: torch.Tensor, which: int, scale: float) -> torch.Tensor:
    """Of a query or key as it was read, from that of it as it was used: `unit`, times `scale`."""
    if at.lengths is not None:
        gradient = gradient - unit * ((gradient * unit).sum(-1, keepdim=True) / scale**2)
    if at.group > 1:
        gradient = gradient.unflatten(1, (-1, at.group)).sum(2)
    return gradient * scale if at.lengths is None else gradient * (at.lengths[which] * scale)


def _to_chunks(states: torch.Tensor) -> torch.Tensor:
    """(rows, tokens, heads, ...) as (rows, heads, chunks, tokens, ...) in fp32, zeros behind the end."""
    states = states.transpose(1, 2)
    more = -states.shape[2] % CHUNK
    padding = (0, 0) * (states.dim() - 3) + (0, more)
    filled = F.pad(states.float(), padding) if more else states.to(torch.float32, memory_format=torch.contiguous_format)
    return filled.unflatten(2, (-1, CHUNK))


def _from_chunks(states: torch.Tensor, tokens: int) -> torch.Tensor:
    return states.flatten(2, 3)[:, :, :tokens].transpose(1, 2)
