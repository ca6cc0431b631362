"""A mixture on a CPU as one function with its own gradient, from tokens by way of their experts to the sum of these.

Of separate steps autograd keeps each chosen row (what an expert reads, what its gate reads and gives, its answer) and
puts the gradients of all experts together by copying them. Here what the first products give is kept alone. Rows are
taken from their tokens again; and the gradient of a choice's weight needs no answer of its expert: with an answer
h W of what the gate gave, and a token's slope g, it is g (h W) = (g W) h, and the backward pass has both.
Adapters of experts (expert_adapters.py) are thin products beside: h W + scale (h A) B.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from duoka.model import gates, native
from duoka.model.chunks import wide
from duoka.model.expert_products import NUM_TENSORS, Backward, Form, Forward, Like, Product

ALLOWED = "mixes_at_once"  # on a layer's experts: the activation that their gate is, or None


class Gate(NamedTuple):
    """What lies between an expert's products: by the model's code, and as an activation that we know."""

    code: Callable[[torch.Tensor], torch.Tensor]
    act: gates.Act | None


class Layout(NamedTuple):
    """Where chosen rows lie, expert after expert, each followed by rows of zeros up to a number that comes again."""

    order: torch.Tensor  # the choices (token * chosen + which), as they lie
    places: torch.Tensor  # of each choice, its row
    counts: list[int]  # of each expert, without the zeros
    sizes: list[int]
    chosen: int

    def parts(self) -> Iterator[tuple[int, slice, torch.Tensor]]:
        """Of each expert that was chosen: its number, its rows with the zeros, its choices."""
        row = choice = 0
        for expert, (count, size) in enumerate(zip(self.counts, self.sizes, strict=True)):
            if count:
                yield expert, slice(row, row + size), self.order[choice : choice + count]
            row, choice = row + size, choice + count


class How(NamedTuple):
    layout: Layout
    gate: Gate
    is_transposed: bool  # weights are (experts, in, out)
    dtype: torch.dtype  # of products

    def form(self, scale: float) -> Form:
        return Form(self.layout.counts, self.is_transposed, self.dtype, scale)


def find_act(module: Any) -> gates.Act | None:
    """The activation of experts whose gate is a usual one: tried on random numbers."""
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), contextlib.suppress(RuntimeError, ValueError, TypeError, AttributeError):
        if not module.has_gate:
            return None
        given: torch.Tensor = module._apply_gate(x)  # which may ask for what it has of other sizes alone
        for act in gates.ACTS:
            if given.shape == (4, 8) and torch.allclose(given, act.value(x[:, :8]) * x[:, 8:], rtol=1e-5, atol=1e-5):
                return act
    return None


def mix_at_once(
    hidden: torch.Tensor,  # (tokens, dim)
    weights: torch.Tensor,  # (tokens, chosen): of each choice
    first: Product,  # of gate and up
    down: Product,  # behind the gate
    how: How,
) -> torch.Tensor:
    scales = tuple(0.0 if one.adapter is None else one.adapter.scale for one in (first, down))
    answer: torch.Tensor = _Mixed.apply(how, scales, hidden, weights, *first.tensors(), *down.tensors())
    return answer


class _Mixed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, how: How, scales: tuple[float, float], hidden: torch.Tensor, weights: torch.Tensor,
        *products: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        rows, forms = sum(how.layout.sizes), [how.form(scale) for scale in scales]
        first, down = (Forward(of, form, rows) for of, form in zip(_halves(products), forms, strict=True))
        states = hidden.to(how.dtype)
        inner = torch.empty((rows, first.width), dtype=how.dtype, device=hidden.device)
        answers = torch.empty((rows, hidden.shape[1]), dtype=how.dtype, device=hidden.device)
        with torch.autocast("cpu", enabled=False):
            for expert, at, own in how.layout.parts():
                first.multiply(expert, at, _rows(states, own, at, how), inner[at])
                given = how.gate.code(inner[at]) if how.gate.act is None else gates.times(how.gate.act, inner[at], None)
                down.multiply(expert, at, given, answers[at])
            summed = _sum_choices(answers, how.layout, weights)
        ctx.how, ctx.forms, ctx.like = how, forms, [Like.of(one) for one in products]
        ctx.dtypes, ctx.num_kept = (hidden.dtype, weights.dtype), len(first.kept())
        reads = _reads(_halves(ctx.needs_input_grad[4:])[0])
        ctx.save_for_backward(states if reads else None, weights, inner, *first.kept(), *down.kept())
        return summed.to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        states, weights, inner, *kept = ctx.saved_tensors
        how, layout, (_, _, wants_hidden, wants_weights, *learn) = ctx.how, ctx.how.layout, ctx.needs_input_grad
        like = [one if learns else None for one, learns in zip(ctx.like, learn, strict=True)]
        kept_of = kept[: ctx.num_kept], kept[ctx.num_kept :]
        first, down = (Backward(*each) for each in zip(kept_of, ctx.forms, _halves(like), strict=True))
        of_weights = torch.empty(weights.shape, dtype=ctx.dtypes[1]) if wants_weights else None
        slopes = torch.empty((len(inner), grad.shape[1]), dtype=how.dtype, device=grad.device) if wants_hidden else None
        with torch.autocast("cpu", enabled=False):
            for expert, at, own in layout.parts():
                slope, share = _rows(grad, own, at, how), weights.flatten()[own].to(wide(inner))
                through = down.turn(expert, slope)
                given, find_inner = _gate_again(how.gate, inner[at])
                of_share = _weigh_(through[: len(own)], given[: len(own)], share)
                if of_weights is not None:
                    of_bias = down.through_bias(expert, slope[: len(own)], share.dtype)
                    of_weights.view(-1)[own] = (of_share if of_bias is None else of_share + of_bias).to(ctx.dtypes[1])
                down.learn(expert, at, given, slope, share)
                of_inner = find_inner(through)
                first.learn(expert, at, None if states is None else _rows(states, own, at, how), of_inner, None)
                if slopes is not None:
                    first.turn(expert, of_inner, slopes[at])
            of_hidden = None if slopes is None else _sum_choices(slopes, layout, None).to(ctx.dtypes[0])
        return None, None, of_hidden, of_weights, *first.found, *down.found


def _halves(of_both: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """What belongs to the first product, and to the one behind the gate."""
    return of_both[:NUM_TENSORS], of_both[NUM_TENSORS:]


def _reads(learns: Sequence[bool]) -> bool:
    """Whether the gradients of a product's tensors ask for what it read."""
    weight, _, a, _ = learns
    return weight or a


def _rows(of_tokens: torch.Tensor, own: torch.Tensor, at: slice, how: How) -> torch.Tensor:
    """Those of the choices' tokens, and zeros behind them."""
    rows = of_tokens.new_empty((at.stop - at.start, of_tokens.shape[1]))
    rows[: len(own)] = of_tokens.index_select(0, own // how.layout.chosen)
    rows[len(own) :] = 0
    return rows.to(how.dtype)


def _gate_again(gate: Gate, inner: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """(what it gave, which may be written to; how the slope of what it reads is found from that)."""
    act = gate.act
    if act is not None:
        given = gates.times(act, inner, None)
        return given, lambda slope: gates.gradients(act, inner, None, lambda: slope, None, in_place=False)[0]
    with torch.enable_grad():
        read = inner.detach().requires_grad_()
        given = gate.code(read)
    return given.detach().clone(memory_format=torch.contiguous_format), lambda slope: torch.autograd.grad(
        given, read, slope
    )[0]


def _weigh_(through: torch.Tensor, given: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Of each row the sum of products of both's numbers; both become as many times what they are."""
    if native.serves(through, given, share):
        return native.weigh_rows_(through, given, share)
    sums = (through.to(share.dtype) * given.to(share.dtype)).sum(1)
    for one in (through, given):
        one.copy_(one * share[:, None])
    return sums


def _sum_choices(rows: torch.Tensor, layout: Layout, weights: torch.Tensor | None) -> torch.Tensor:
    """Of each token, what its choices gave, times their weights."""
    tokens, times = len(layout.places) // layout.chosen, None if weights is None else weights.flatten().to(wide(rows))
    if native.serves(rows):
        begins = torch.arange(tokens + 1) * layout.chosen
        return native.sum_rows(rows, layout.places, begins, times)
    each = rows[layout.places].to(wide(rows))
    each = each if times is None else each * times[:, None]
    return each.view(tokens, layout.chosen, rows.shape[1]).sum(1)
