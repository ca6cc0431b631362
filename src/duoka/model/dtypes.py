"""The names of number types: ours (plan, config), and those of safetensors files; and what no narrow one can hold."""

import re
from collections.abc import Callable

import torch

# fp8: the layers' products alone are in 8 bits (fp8.py), and what they read and give is bf16 as all else.
BY_PRECISION = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
SAFETENSORS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
# What transformers' models say of themselves, and beside which types it counts there.
_WIDE: dict[torch.dtype, tuple[str, ...]] = {
    torch.float16: ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"),
    torch.bfloat16: ("_keep_in_fp32_modules_strict",),
}


def computed_in(tensor: torch.Tensor) -> torch.dtype:
    """What a product of it, and attention, has: autocast narrows, also what rotary tables have widened."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def stays_wide(lm: torch.nn.Module, dtype: torch.dtype) -> Callable[[str], bool]:
    """By name, which tensors of a transformers model are fp32 beside others of `dtype`, in memory and in its files.

    A router's bias, above all: it decides between experts by less than bf16 tells apart.
    """
    parts = {part for kind in _WIDE.get(dtype, ()) for part in getattr(lm, kind, None) or ()}
    if not parts:
        return lambda name: False
    pattern = re.compile("|".join(part.replace("*", ".*") for part in sorted(parts)))
    return lambda name: pattern.search(name) is not None


@torch.no_grad()
def narrow(lm: torch.nn.Module, dtype: torch.dtype) -> None:
    """The weights in `dtype`, as transformers reads them in it; in place.

    `lm.to(dtype)` would narrow what stays wide too, and what no file has: rotary frequencies, which in bf16 turn
    a token a thousand places on by another angle altogether.
    """
    is_wide = stays_wide(lm, dtype)
    for name, tensor in lm.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and not is_wide(name):
            tensor.data = tensor.data.to(dtype)
