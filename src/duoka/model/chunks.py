"""Logits of a head in chunks of rows, and the gradients of all that they are made of: never all logits at once.

For losses on top of a head (loss.py, logps.py): each walks over the chunks, and says of each what its gradient is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from duoka.data.feed.loader import IGNORED
from duoka.model import native
from duoka.model.vocabulary import WHOLE, Vocabulary

# Logits of one chunk (fp32): enough rows for an efficient matrix product, small beside a layer's activations. On a GPU
# each chunk reads the head's weight twice and adds a product as large as it: with 130 rows, at a vocabulary of 128k,
# that is several times the arithmetic; with 2,048 it is a fourth of it.
CHUNK_BYTES = 64 * 2**20
GPU_CHUNK_BYTES = 2**30
# On a CPU no more rows pay, where the vocabulary is small: what lies in the cache is not read from memory again.
CPU_CHUNK_ROWS = 512
# A chunk's part of the head's gradient in half precision, so many words of it at once before it is added in fp32: in
# the cache of a CPU, and no second head on a GPU.
PRODUCT_BYTES = 8 * 2**20
GPU_PRODUCT_BYTES = 256 * 2**20
MOST_PRODUCTS = 16  # of a chunk: a large head's are larger, since each costs a few calls


@dataclass(frozen=True)
class Bend:
    """What a model does to its logits after the head: logits * scale, then softcap * tanh(logits / softcap)."""

    scale: float = 1.0
    softcap: float | None = None

    def over(self, temperature: float) -> Bend:
        """The same, divided by a temperature at last."""
        if temperature == 1.0:
            return self
        return Bend(self.scale / temperature, None if self.softcap is None else self.softcap / temperature)


STRAIGHT = Bend()


@dataclass(frozen=True)
class LowRank:
    """What an adapter on the head adds to its logits: rows @ weight.T."""

    rows: torch.Tensor  # (..., rank), already scaled
    weight: torch.Tensor  # (vocab, rank)


@dataclass(frozen=True)
class Targets:
    """The rows of a batch that have a label: nothing else goes through the head."""

    rows: torch.Tensor  # (targets, dim), in the type that computes
    low_rows: torch.Tensor | None  # (targets, rank)
    labels: torch.Tensor  # (targets,)
    places: torch.Tensor  # (targets,) among all rows


@dataclass(frozen=True)
class Places:
    """Which tokens of a batch are targets, found while its labels were on the host: to ask a GPU for it would stop it.

    No tensor itself, so that code that slices arguments passes it on whole.
    """

    index: torch.Tensor  # (targets,) on the device
    states: torch.Tensor | None = None  # (targets,) whose states each is predicted from, where rows are shortened

    @classmethod
    def of(cls, labels: torch.Tensor) -> Places:
        return cls((labels.reshape(-1) != IGNORED).nonzero().squeeze(1))

    def in_short_row(self, places: torch.Tensor) -> Places:
        """`places`: of each token of the whole row, where it is computed."""
        return replace(self, states=places[self.index])


def take_targets(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    low: LowRank | None,
    places: Places | None = None,
    vocabulary: Vocabulary = WHOLE,
) -> Targets:
    flat = labels.reshape(-1)
    places = places or Places.of(labels)
    chosen, states = places.index, places.states

    def take(tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.reshape(-1, tensor.shape[-1])
        if torch.is_autocast_enabled(rows.device.type):
            rows = rows.to(torch.get_autocast_dtype(rows.device.type))
        if states is not None:
            return vocabulary.spread(rows[states])
        # All rows are targets in pretraining: no copy then.
        return vocabulary.spread(rows if len(chosen) == len(flat) else rows[chosen])

    return Targets(take(hidden), take(low.rows) if low else None, flat[chosen], chosen)


@dataclass(frozen=True)
class Chunk:
    """Logits of rows `start` to `end`, bent, in a buffer that the next chunk overwrites: a loss may work in place."""

    logits: torch.Tensor
    start: int
    end: int


class ChunkedLogits:
    """Logits of `rows`, and the gradients of its inputs as chunks add to them.

    Inputs are rows, weight, bias, rows and weight of the adapter; `wanted` says of each whether it gets a gradient.
    """

    def __init__(
        self,
        inputs: Sequence[torch.Tensor | None],
        bend: Bend,
        wanted: Sequence[bool],
        vocabulary: Vocabulary = WHOLE,
        *,
        narrow: bool = False,
    ) -> None:
        """`narrow`: logits are left in the type of the rows, for a loss that sums in a wider one by itself."""
        rows, weight, self.bias, low_rows, low_weight = inputs
        assert rows is not None
        assert weight is not None
        self.bend, self.wants_any, self._dtype = bend, any(wanted), rows.dtype
        self._most_words = vocabulary.most_words(weight.shape[0])
        self._logits_dtype = rows.dtype if narrow else wide(rows)
        self._factors = [_Factors(rows, weight, *wanted[:2])]
        if low_rows is not None and low_weight is not None:
            self._factors.append(_Factors(low_rows, low_weight, *wanted[3:5]))
        bias = self.bias
        self._softcap_slope: torch.Tensor | None = None  # of the chunk that is being learned
        self._bias_grad = torch.zeros_like(bias, dtype=wide(bias)) if bias is not None and wanted[2] else None

    def chunks(self) -> Iterator[Chunk]:
        for logits, start, end in _products(self._factors, self._most_words, self._logits_dtype):
            if self.bias is not None:
                logits += self.bias
            self._softcap_slope = None  # the last chunk's goes first: it is as large as the logits
            self._softcap_slope = _bend_(logits, self.bend, wants_slope=self.wants_any)
            yield Chunk(logits, start, end)

    def learn(self, chunk: Chunk) -> None:
        """Add to the gradients; the chunk's logits have become the slope of the loss by them."""
        slope = chunk.logits
        if self._softcap_slope is not None:
            slope *= self._softcap_slope
        if self.bend.scale != 1.0:
            slope *= self.bend.scale
        if self._bias_grad is not None:
            self._bias_grad += slope.sum(dim=0)
        narrow = slope.to(self._dtype)
        for factors in self._factors:
            factors.learn(narrow, chunk.start, chunk.end)

    def gradients(self) -> list[torch.Tensor | None]:
        """Of the inputs, in the types that sum; None where none is wanted."""
        first, *others = self._factors
        low = [others[0].row_grad, others[0].weight_grad] if others else [None, None]
        return [first.row_grad, first.weight_grad, self._bias_grad, *low]


class _Factors:
    """A part of the logits, rows @ weight.T, and the gradients of both factors as chunks add to them."""

    def __init__(self, rows: torch.Tensor, weight: torch.Tensor, want_rows: bool, want_weight: bool) -> None:
        self.rows, self.weight = rows, weight.to(rows.dtype)
        self.row_grad = torch.empty_like(rows) if want_rows else None
        self._product: torch.Tensor | None = None  # in memory that all chunks share
        # Summed over chunks in fp32: bf16 sums over many chunks lose what small gradients add. The first chunk writes
        # where later ones add: filling a head's worth of memory with zeros first takes as long as many rows.
        make = torch.empty_like if rows.shape[0] else torch.zeros_like
        self.weight_grad = make(weight, dtype=wide(weight)) if want_weight else None

    def learn(self, slope: torch.Tensor, start: int, end: int) -> None:
        if self.row_grad is not None:
            torch.mm(slope, self.weight, out=self.row_grad[start:end])
        if self.weight_grad is None:
            return
        part = self.rows[start:end]
        if slope.dtype != self.weight_grad.dtype:
            self._add_products(slope, part, is_first=start == 0)
        elif start == 0:
            torch.mm(slope.t(), part, out=self.weight_grad)
        else:
            self.weight_grad.addmm_(slope.t(), part)

    def _add_products(self, slope: torch.Tensor, part: torch.Tensor, *, is_first: bool) -> None:
        assert self.weight_grad is not None
        if self._product is None:
            most = PRODUCT_BYTES if part.device.type == "cpu" else GPU_PRODUCT_BYTES
            num_words = max(most // (part.shape[1] * part.itemsize), math.ceil(slope.shape[1] / MOST_PRODUCTS))
            self._product = part.new_empty(min(num_words, slope.shape[1]), part.shape[1])
        size = self._product.shape[0]
        adds = slope.dtype is torch.bfloat16 and native.adds(self.weight_grad, self._product)
        for words, total in zip(slope.split(size, dim=1), self.weight_grad.split(size), strict=True):
            product = torch.mm(words.t(), part, out=self._product[: words.shape[1]])
            if is_first:
                total.copy_(product)
            elif adds:
                native.add_(total, product)
            else:
                total.add_(product)


def _products(
    all_factors: list[_Factors], most_words: int, dtype: torch.dtype
) -> Iterator[tuple[torch.Tensor, int, int]]:
    """(logits, first row, row after the last), in one buffer for all: fresh memory costs more than the arithmetic."""
    rows, weight = all_factors[0].rows, all_factors[0].weight
    num_rows, vocab = rows.shape[0], weight.shape[0]
    if not num_rows:
        return
    on_cpu = rows.device.type == "cpu"
    most = max(1, (CHUNK_BYTES if on_cpu else GPU_CHUNK_BYTES) // (min(4, dtype.itemsize) * most_words))
    num_chunks = math.ceil(num_rows / (min(most, CPU_CHUNK_ROWS) if on_cpu else most))
    size = math.ceil(num_rows / num_chunks)  # alike, so that no chunk of a few rows pays for the head's whole gradient
    buffer = torch.empty(size, vocab, dtype=dtype, device=rows.device)
    for start in range(0, num_rows, size):
        end = min(start + size, num_rows)
        logits = buffer[: end - start]
        for index, factors in enumerate(all_factors):
            part = factors.rows[start:end]
            if part.dtype != buffer.dtype:
                # The narrow product has no name, which would keep it beside the slope's own narrow copy.
                take = logits.copy_ if index == 0 else logits.add_
                take(part @ factors.weight.t())
            elif index == 0:
                torch.mm(part, factors.weight.t(), out=logits)
            else:
                logits.addmm_(part, factors.weight.t())
        yield logits, start, end


def _bend_(logits: torch.Tensor, bend: Bend, *, wants_slope: bool) -> torch.Tensor | None:
    """Bend in place; returns the softcap's slope where there is one and it is wanted."""
    if bend.scale != 1.0:
        logits *= bend.scale
    if bend.softcap is None:
        return None
    logits.div_(bend.softcap).tanh_()
    slope = (logits * logits).neg_().add_(1.0) if wants_slope else None
    logits *= bend.softcap
    return slope


def wide(tensor: torch.Tensor) -> torch.dtype:
    """The type to sum in: fp32, or fp64 when the input is."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
