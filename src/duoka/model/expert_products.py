"""Products of each expert of a mixture with its own rows, there and back: with its weights, and an adapter beside them.

An adapter's are thin, x W + scale (x A) B, so that of a frozen weight nothing is made or found that is as large as it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from duoka.model.chunks import wide
from duoka.model.thin import collect, spread_, squeeze


class Adapter(NamedTuple):
    """Beside the weights of all experts of a layer."""

    a: torch.Tensor  # (experts, rank, in)
    b: torch.Tensor  # (experts, rank, out)
    scale: float

    def in_lines(self, line: int) -> Adapter:
        """With zeros behind a rank that is no multiple of it."""
        more = -self.a.shape[1] % line
        if not more:
            return self
        a, b = (F.pad(one, (0, 0, 0, more)) for one in (self.a, self.b))
        return Adapter(a, b, self.scale)


class Product(NamedTuple):
    """What all experts of a layer multiply with."""

    weight: torch.Tensor  # (experts, out, in), or (experts, in, out)
    bias: torch.Tensor | None
    adapter: Adapter | None

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.weight, self.bias, *((None, None) if self.adapter is None else self.adapter[:2])


NUM_TENSORS = 4  # of a product


class Like(NamedTuple):
    """Of a tensor that is not kept for it."""

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor | None) -> Like | None:
        return None if tensor is None else cls(tensor.shape, tensor.dtype)


class Form(NamedTuple):
    counts: Sequence[int]  # of each expert, its rows
    is_transposed: bool  # weights are (experts, in, out)
    dtype: torch.dtype  # of products
    scale: float  # of the adapters


class Forward:
    """One product of all experts; keeps for the backward pass what that cannot make again."""

    def __init__(self, tensors: Sequence[torch.Tensor | None], form: Form, rows: int) -> None:
        weight, self._bias, a, b = tensors
        assert weight is not None
        self._form, self._whole = form, weight
        self._weights, self._a, self._b = _narrow(weight, form), _thin(a, form), _thin(b, form)
        self._low = None if a is None else torch.empty((rows, a.shape[1]), dtype=form.dtype, device=a.device)
        self.width = weight.shape[2 if form.is_transposed else 1]

    def multiply(self, expert: int, at: slice, x: torch.Tensor, to: torch.Tensor) -> None:
        """`at`: where these rows lie among all."""
        weight = self._weights[expert]
        across = weight if self._form.is_transposed else weight.t()
        if self._bias is None:
            torch.mm(x, across, out=to)
        else:
            torch.addmm(self._bias[expert].to(to.dtype), x, across, out=to)
        if self._low is not None:
            assert self._a is not None and self._b is not None
            low = self._low[at].copy_(squeeze(x, self._a[expert]))
            spread_(to, low, self._b[expert], self._form.scale)

    def kept(self) -> list[torch.Tensor | None]:
        # Narrow weights are kept as they came: where ranks share them, they are gathered again.
        is_narrow = self._whole.dtype == self._form.dtype
        return [self._bias, self._a, self._b, self._low, *([self._whole] if is_narrow else self._weights.values())]


class Backward:
    """Gradients of such a product: of what it reads, and of what learns in it, one expert after the other."""

    def __init__(self, kept: Sequence[torch.Tensor | None], form: Form, like: Sequence[Like | None]) -> None:
        """`like`: weight, bias and adapter, of which None does not learn."""
        self._bias, self._a, self._b, self._low, *weights = kept
        used = [expert for expert, count in enumerate(form.counts) if count]
        if weights and weights[0] is not None and weights[0].dim() == 3:  # all experts', as they came
            whole = weights[0].detach().unbind()
            weights = [whole[expert] for expert in used]
        self._form, self._weights = form, dict(zip(used, weights, strict=True))
        self.found = [None if one is None else torch.empty(one.shape, dtype=one.dtype) for one in like]
        self._products = dict[torch.Size, torch.Tensor]()
        self._turned: tuple[int, torch.Tensor] | None = None
        for expert, count in enumerate(form.counts):
            for one in self.found:
                if one is not None and not count:
                    one[expert].zero_()

    def turn(self, expert: int, slope: torch.Tensor, to: torch.Tensor | None = None) -> torch.Tensor:
        """The slope of what the expert read, of that of what it gave."""
        weight = self._weights[expert]
        assert weight is not None
        found = torch.mm(slope, weight.t() if self._form.is_transposed else weight, out=to)
        if self._a is not None:
            spread_(found, self._turn_low(expert, slope), self._a[expert])
        return found

    def learn(
        self, expert: int, at: slice, read: torch.Tensor | None, slope: torch.Tensor, share: torch.Tensor | None
    ) -> None:
        """Of rows `at`. With `share`, what each of the rows counts: `read` has that in it, and `slope` not."""
        of_weight, of_bias, of_a, of_b = self.found
        if of_weight is not None and read is not None:
            self._put(of_weight[expert], *((read, slope) if self._form.is_transposed else (slope, read)))
        if of_bias is not None:
            own = slope if share is None else share @ slope[: len(share)].to(share.dtype)
            of_bias[expert] = own if share is not None else own.sum(0, dtype=wide(own))
        if of_a is not None and read is not None:
            of_a[expert] = collect(self._turn_low(expert, slope), read)
        if of_b is not None and self._low is not None:
            low = self._low[at]
            if share is not None:
                low = low.clone()
                low[: len(share)] *= share[:, None]
            of_b[expert] = collect(low, slope, self._form.scale)

    def through_bias(self, expert: int, slope: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """Of each row its slope times what the bias added."""
        return None if self._bias is None else slope.to(dtype) @ self._bias[expert].to(dtype)

    def _turn_low(self, expert: int, slope: torch.Tensor) -> torch.Tensor:
        """(rows, rank), once for each expert."""
        if self._turned is None or self._turned[0] != expert:
            assert self._b is not None
            self._turned = expert, squeeze(slope, self._b[expert], self._form.scale)
        return self._turned[1]

    def _put(self, to: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        if to.dtype == left.dtype:
            torch.mm(left.t(), right, out=to)
            return
        if to.shape not in self._products:
            self._products[to.shape] = torch.empty(to.shape, dtype=left.dtype)
        to.copy_(torch.mm(left.t(), right, out=self._products[to.shape]))


def _narrow(weight: torch.Tensor, form: Form) -> dict[int, torch.Tensor]:
    """The weights of each expert that was chosen, as products take them.

    Copies are parameters too: what is moved elsewhere until the backward pass (parallel/activations.py) is no weight.
    """
    used = {one: own for one, own in enumerate(weight.detach().unbind()) if form.counts[one]}
    if weight.dtype == form.dtype:
        return used
    return {one: torch.nn.Parameter(own.to(form.dtype), requires_grad=False) for one, own in used.items()}


def _thin(matrices: torch.Tensor | None, form: Form) -> torch.Tensor | None:
    """All experts' of an adapter, one behind the other."""
    if matrices is None:
        return None
    own = matrices.detach().to(form.dtype).contiguous()
    return own if own.data_ptr() == matrices.data_ptr() else torch.nn.Parameter(own, requires_grad=False)
