"""The arithmetic of forward passes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def compute_in(precision: str, device: torch.device) -> Iterator[None]:
    """fp32 as it is, bf16 and fp16 through autocast over fp32 masters."""
    if precision == "fp32":
        yield
        return
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    with torch.autocast(device.type, dtype=dtype):
        yield
