"""A mixture on a CPU as one function with its own gradient, from tokens by way of their experts to the sum of these.

Of separate steps autograd keeps each chosen row (what an expert reads, what its gate reads and gives, its answer) and
puts the gradients of all experts together by copying them. Here what the first products give is kept alone. Rows are
taken from their tokens again; and the gradient of a choice's weight needs no answer of its expert: with an answer
h W of what the gate gave, and a token's slope g, it is g (h W) = (g W) h, and the backward pass has both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from duoka.model import gates, native
from duoka.model.chunks import wide

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
    first: torch.Tensor,  # of gate and up, and of the product behind the gate, all experts'
    down: torch.Tensor,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    how: How,
) -> torch.Tensor:
    answer: torch.Tensor = _Mixed.apply(how, hidden, weights, first, down, *biases)
    return answer


class _Mixed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, how: How, hidden: torch.Tensor, weights: torch.Tensor, first: torch.Tensor, down: torch.Tensor,
        first_bias: torch.Tensor | None, down_bias: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        states, rows, width = hidden.to(how.dtype), sum(how.layout.sizes), first.shape[2 if how.is_transposed else 1]
        firsts, downs = _narrow(first, how), _narrow(down, how)
        inner = torch.empty((rows, width), dtype=how.dtype, device=hidden.device)
        answers = torch.empty((rows, hidden.shape[1]), dtype=how.dtype, device=hidden.device)
        with torch.autocast("cpu", enabled=False):
            for (expert, at, own), into, out_of in zip(how.layout.parts(), firsts, downs, strict=True):
                _multiply(_rows(states, own, at, how), into, _of(first_bias, expert), inner[at], how)
                given = how.gate.code(inner[at]) if how.gate.act is None else gates.times(how.gate.act, inner[at], None)
                _multiply(given, out_of, _of(down_bias, expert), answers[at], how)
            summed = _sum_choices(answers, how.layout, weights)
        # Narrow weights are kept as they came: where ranks share them, they are gathered again.
        firsts = [first] if first.dtype == how.dtype else firsts
        downs = [down] if down.dtype == how.dtype else downs
        ctx.how, ctx.num_firsts, ctx.like = how, len(firsts), [_Like.of(one) for one in (first, down)]
        ctx.hidden = _Like.of(hidden)
        ctx.save_for_backward(
            states if ctx.needs_input_grad[3] else None, weights, inner, first_bias, down_bias, *firsts, *downs
        )
        return summed.to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        states, weights, inner, first_bias, down_bias, *narrow = ctx.saved_tensors
        how, wanted, layout = ctx.how, ctx.needs_input_grad, ctx.how.layout
        firsts, downs = (
            _narrow(some[0], how) if like.dtype == how.dtype else some
            for some, like in zip((narrow[: ctx.num_firsts], narrow[ctx.num_firsts :]), ctx.like, strict=True)
        )
        given_like = (_Like.of(weights), *ctx.like, _Like.of(first_bias), _Like.of(down_bias))
        found = _Found(how, [like if wants else None for like, wants in zip(given_like, wanted[2:], strict=True)])
        slopes = torch.empty((len(inner), grad.shape[1]), dtype=how.dtype, device=grad.device) if wanted[1] else None
        with torch.autocast("cpu", enabled=False):
            for (expert, at, own), into, out_of in zip(layout.parts(), firsts, downs, strict=True):
                slope, share = _rows(grad, own, at, how), weights.flatten()[own].to(wide(inner))
                through = slope @ (out_of.t() if how.is_transposed else out_of)
                given, find_inner = _gate_again(how.gate, inner[at])
                of_share = _weigh_(through[: len(own)], given[: len(own)], share)
                found.of_down(expert, own, slope, share, of_share, given, down_bias)
                of_inner = find_inner(through)
                if wanted[3] or wanted[5]:
                    found.of_first(expert, of_inner, None if states is None else _rows(states, own, at, how))
                if slopes is not None:
                    torch.mm(of_inner, into.t() if how.is_transposed else into, out=slopes[at])
            of_hidden = None if slopes is None else _sum_choices(slopes, layout, None).to(ctx.hidden.dtype)
        return None, of_hidden, *found.all()


class _Like(NamedTuple):
    """Of a tensor that is not kept for it."""

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor | None) -> _Like | None:
        return None if tensor is None else cls(tensor.shape, tensor.dtype)


class _Found:
    """Gradients of weights and biases, as one expert after the other gives its own."""

    def __init__(self, how: How, wanted: list[_Like | None]) -> None:
        made = [None if like is None else torch.empty(like.shape, dtype=like.dtype) for like in wanted]
        self._how, self._products = how, dict[torch.Size, torch.Tensor]()
        self._weights, self._first, self._down, self._first_bias, self._down_bias = made
        for expert, count in enumerate(how.layout.counts):
            for one in made[1:]:
                if one is not None and not count:
                    one[expert].zero_()

    def all(self) -> tuple[torch.Tensor | None, ...]:
        return self._weights, self._first, self._down, self._first_bias, self._down_bias

    def of_down(
        self, expert: int, own: torch.Tensor, slope: torch.Tensor, share: torch.Tensor, of_share: torch.Tensor,
        given: torch.Tensor, bias: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """`given`: what the gate gave, times the choices' weights; `slope`: of the answers, before these."""
        few = slope[: len(own)]
        if self._weights is not None:
            if bias is not None:
                of_share = of_share + few.to(share.dtype) @ bias[expert].to(share.dtype)
            self._weights.view(-1)[own] = of_share.to(self._weights.dtype)
        if self._down is not None:
            self._put(self._down[expert], given, slope)
        if self._down_bias is not None:
            self._down_bias[expert] = share @ few.to(share.dtype)

    def of_first(self, expert: int, of_inner: torch.Tensor, rows: torch.Tensor | None) -> None:
        if self._first is not None and rows is not None:
            self._put(self._first[expert], rows, of_inner)
        if self._first_bias is not None:
            self._first_bias[expert] = of_inner.sum(0, dtype=wide(of_inner))

    def _put(self, to: torch.Tensor, read: torch.Tensor, slope: torch.Tensor) -> None:
        """The gradient of a weight, of what its product read and the slope of what it gave."""
        left, right = (read, slope) if self._how.is_transposed else (slope, read)
        if to.dtype == left.dtype:
            torch.mm(left.t(), right, out=to)
            return
        if to.shape not in self._products:
            self._products[to.shape] = torch.empty(to.shape, dtype=left.dtype)
        to.copy_(torch.mm(left.t(), right, out=self._products[to.shape]))


def _narrow(weight: torch.Tensor, how: How) -> list[torch.Tensor]:
    """The weights of each expert that was chosen, as products take them.

    Copies are parameters too: what is moved elsewhere until the backward pass (parallel/activations.py) is no weight.
    """
    used = [own for own, count in zip(weight.detach().unbind(), how.layout.counts, strict=True) if count]
    if weight.dtype == how.dtype:
        return used
    return [torch.nn.Parameter(own.to(how.dtype), requires_grad=False) for own in used]


def _rows(of_tokens: torch.Tensor, own: torch.Tensor, at: slice, how: How) -> torch.Tensor:
    """Those of the choices' tokens, and zeros behind them."""
    rows = of_tokens.new_empty((at.stop - at.start, of_tokens.shape[1]))
    rows[: len(own)] = of_tokens.index_select(0, own // how.layout.chosen)
    rows[len(own) :] = 0
    return rows.to(how.dtype)


def _of(bias: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    return None if bias is None else bias[expert]


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, to: torch.Tensor, how: How) -> None:
    across = weight if how.is_transposed else weight.t()
    if bias is None:
        torch.mm(x, across, out=to)
    else:
        torch.addmm(bias.to(to.dtype), x, across, out=to)


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
