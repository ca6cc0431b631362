"""A token for each of a few rows at a time, on CPUs: products and attention of their own (decode.cpp).

What such a pass costs is reading the weights, and torch's products of a few rows read them at half of what memory
gives. Here each number of an answer is computed by itself, in one order, so a row's numbers do not depend on how many
rows there are. Without a compiler torch's form computes the same to its last digits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from duoka.model import native

MOST_ROWS = 16  # beyond, torch's products are as fast or faster


class FewRowsLinear(torch.nn.Linear):
    """torch's, but for products of few rows in a pass without gradients."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        is_small = input.numel() <= MOST_ROWS * weight.shape[1] and input.dtype is weight.dtype
        if is_small and not torch.is_grad_enabled() and input.is_contiguous() and native.serves(input, weight):
            return multiply_rows(input, weight, self.bias)
        return F.linear(input, weight, self.bias)


def answer_fast(lm: torch.nn.Module) -> bool:
    """Let its products of few rows be the compiled ones; True where a pass is row by row, however many there are."""
    if native.find() is None:
        return False
    matrices = 0
    for module in lm.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = FewRowsLinear
        by_codes = getattr(module, "decodes", False) and getattr(module.weight, "dtype", None) is torch.int8
        if not by_codes and not isinstance(module, FewRowsLinear | torch.nn.Embedding):
            matrices += sum(parameter.ndim > 1 for parameter in module.parameters(recurse=False))
    parameter = next(lm.parameters())
    return not matrices and native.serves(parameter)


def multiply_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x (..., in) @ weight.T + bias, of one type: fp32 or bf16; sums are fp32."""
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    library = native.find()
    assert library is not None
    library.multiply_rows(
        x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(),
        x.numel() // x.shape[-1], weight.shape[1], weight.shape[0], x.dtype is torch.float32, torch.get_num_threads(),
    )  # fmt: skip
    return out


def multiply_codes(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """x (..., in), fp32 or bf16, by codes (out, in) of 8 bits, of whose rows each has a scale; sums are fp32."""
    out = x.new_empty((*x.shape[:-1], codes.shape[0]))
    wide, scales = x.float().contiguous(), scales.float().contiguous()
    bias = None if bias is None else bias.to(x.dtype)
    library = native.find()
    assert library is not None
    library.multiply_codes(
        wide.data_ptr(), codes.data_ptr(), scales.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(),
        x.numel() // x.shape[-1], codes.shape[1], codes.shape[0], x.dtype is torch.float32, torch.get_num_threads(),
    )  # fmt: skip
    return out


def attend_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, places: torch.Tensor, window: int, scale: float
) -> torch.Tensor:
    """One token of each row: (rows, heads, 1, dim), contiguous, over the keys and values at its `places`.

    places: (4, rows): the addresses of a row's keys and values (0: an empty row), each (groups, capacity, dim); its
    capacity; and where its token stands, whose key and value are written there. window 0: all that stands before.
    """
    rows, heads, _, dim = query.shape
    out = torch.empty((rows, 1, heads, dim), dtype=query.dtype)
    library = native.find()
    assert library is not None
    library.attend_rows(
        query.data_ptr(), key.data_ptr(), value.data_ptr(), places.data_ptr(), out.data_ptr(), rows, heads,
        key.shape[1], dim, window, scale, query.dtype is torch.float32, torch.get_num_threads(),
    )  # fmt: skip
    return out
