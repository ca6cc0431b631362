"""Kernels of torch for CPUs, replaced in this process by others, whoever calls them: layers, experts, the head."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

Kernel = Callable[..., Any]
PIECE = 1 << 22  # fp32 numbers that a kernel may hold at once beside what it is given: 16 MiB
_REPLACED: list[torch.library.Library] = []  # a kernel lives as long as its library


def kernel_of(name: str) -> Kernel:
    """As it is now. It wants dispatch keys first, as those that take its place are given them."""
    found: Kernel = torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed
    return found


def replace_kernel(name: str, serves: Callable[..., bool], other: Kernel) -> None:
    """`other` in place of torch's kernel of this name, for inputs that it `serves`."""
    kernel = kernel_of(name)

    def compute(keys: Any, *inputs: Any, **named: Any) -> Any:
        return (other if serves(*inputs, **named) else kernel)(keys, *inputs, **named)

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # torch warns of any kernel that takes another's place.
        warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
        library.impl(name, compute, "CPU", with_keyset=True)
    _REPLACED.append(library)
