"""Products of the layers' linear modules in 8-bit floats; all else computes as in bf16.

Forward x W, backward g W for the input and g x for the weight. x and W are e4m3 (3 bits of mantissa), gradients e5m2
(wider range, 2 bits). Each tensor has one scale, found anew at each use: its largest number comes to the upper end.

Scales are powers of two. Multiplying by them rounds nothing, and a scale one step off gives the same mantissas: only
what is smaller than some 1/10,000 of a tensor's largest number (e4m3; e5m2: 1/100,000,000) may round otherwise. So a
number is rounded alike whatever rows stand beside it, and results do not depend on how a batch is split, which scales
of any value would break. One scale a tensor, and not one a row: the product for the weight sums over rows, so that it
could not read x as the forward pass rounded it, and x would be kept in 16 bits beside that.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from duoka.errors import ConfigError
from duoka.model.layers import find_layers
from duoka.torch_private import in_shape_of, scaled_mm

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
STEP = 16  # kernels take rows and columns in so many
CAPABILITY = (8, 9)  # the first NVIDIA GPUs that multiply 8-bit floats: Ada and Hopper
# Where a mixture chooses experts: whatever their size, they are computed as they are.
_ROUTERS = ("gate", "router", "shared_expert_gate")
_LEAST = 2.0**-64  # a tensor of zeros is scaled as if this were its largest number
_EXPONENT = 0x7F800000  # bits of an fp32: without sign and mantissa, the power of two below it
_NARROWED = "_duoka_fp8"


class Narrow(NamedTuple):
    """`values` x `scale` is the tensor, rounded. The scale is one fp32 number, a power of two."""

    values: torch.Tensor
    scale: torch.Tensor


@torch.no_grad()
def quantize(x: torch.Tensor, dtype: torch.dtype) -> Narrow:
    """Nothing saturates: the largest number fits. One that is infinite or NaN makes products NaN, not large."""
    with torch.autocast(x.device.type, enabled=False):  # on CPUs it would widen x first
        largest = torch.linalg.vector_norm(x, ord=torch.inf).float()
    up = (torch.finfo(dtype).max / largest.clamp(min=_LEAST)).view(torch.int32).bitwise_and(_EXPONENT)
    up = up.view(torch.float32)
    return Narrow((x * up).to(dtype), up.reciprocal())


def multiply(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """(a x scale_a) @ (b x scale_b) of 8-bit matrices, summed in fp32.

    Where no hardware does it, from widened numbers: products of two 8-bit floats are exact in fp32, and 8-bit floats
    in bf16, so that only the order of the sums differs.
    """
    if a.is_cuda and _has_products(a.device):
        a, b = lay_out(a, b)
        return scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype, use_fast_accum=False)
    with torch.autocast(a.device.type, enabled=False):
        # Not in place: selective recompute keeps what a product gives.
        return (a.to(out_dtype) @ b.to(out_dtype)) * (scale_a * scale_b)


@functools.cache
def _has_products(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= CAPABILITY


def lay_out(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first by rows, the second by columns, with zeros up to a length that kernels take: that of tokens is any."""
    more = -a.shape[1] % STEP
    return _by_rows(a, more), _by_rows(b.t(), more).t()


def _by_rows(matrix: torch.Tensor, more: int) -> torch.Tensor:
    flat = matrix.view(torch.uint8)  # bytes can be copied everywhere, and a byte 0 is the number 0
    flat = F.pad(flat, (0, more)) if more else flat.contiguous()
    return flat.view(matrix.dtype)


# --- the three products of a layer ---


def product(x: Narrow, weight: Narrow, out_dtype: torch.dtype) -> torch.Tensor:
    """x W^T. All matrices here are flat: (rows, numbers)."""
    return multiply(x.values, weight.values.t(), x.scale, weight.scale, out_dtype)


def input_gradient(grad: Narrow, weight: Narrow, out_dtype: torch.dtype) -> torch.Tensor:
    return multiply(grad.values, weight.values, grad.scale, weight.scale, out_dtype)


def weight_gradient(grad: Narrow, x: Narrow, out_dtype: torch.dtype) -> torch.Tensor:
    return multiply(grad.values.t(), x.values, grad.scale, x.scale, out_dtype)


def kept_weight(weight: torch.Tensor, narrow: Narrow, *, again: bool) -> tuple[torch.Tensor, ...]:
    """What to save of a weight: its 8-bit form, or to round it `again` itself, which takes no memory."""
    return (weight,) if again else narrow


def weight_again(kept: Sequence[torch.Tensor], dtype: torch.dtype) -> Narrow:
    """From what `kept_weight` said."""
    return Narrow(*kept) if len(kept) == 2 else narrow_weight(kept[0], dtype)


def narrow_weight(weight: torch.Tensor, dtype: torch.dtype) -> Narrow:
    """From its form in `dtype`, in which weights that are gathered come: one process and many round alike."""
    return quantize(weight.detach().to(dtype), E4M3)


class Fp8Product(torch.autograd.Function):
    """x W^T + bias, in `dtype`. Of x only the 8-bit form is kept, which comes as `values` and `scale`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, values: torch.Tensor,
        scale: torch.Tensor, dtype: torch.dtype, again: bool,
    ) -> torch.Tensor:  # fmt: skip
        flat, narrow = Narrow(values, scale), narrow_weight(weight, dtype)
        out = product(flat, narrow, dtype)
        kept = kept_weight(weight, narrow, again=again) if ctx.needs_input_grad[0] else ()
        ctx.save_for_backward(*(flat if ctx.needs_input_grad[1] else (None, None)), *kept)
        ctx.shape, ctx.dtypes = x.shape, (x.dtype, weight.dtype)
        return in_shape_of(x, out if bias is None else out + bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        values, scale, *kept = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        narrow = quantize(rows, E5M2)
        x_grad = weight_grad = bias_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = input_gradient(narrow, weight_again(kept, grad.dtype), grad.dtype)
            x_grad = x_grad.view(ctx.shape).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            weight_grad = weight_gradient(narrow, Narrow(values, scale), grad.dtype).to(ctx.dtypes[1])
        if ctx.needs_input_grad[2]:
            bias_grad = rows.sum(0).to(ctx.dtypes[1])
        return x_grad, weight_grad, bias_grad, None, None, None, None


def narrow_rows(x: torch.Tensor, dtype: torch.dtype) -> Narrow:
    """The 8-bit form of a layer's input, flat; once for all modules that read the same tensor (q, k and v)."""
    shares = not torch.compiler.is_compiling() and not x.is_inference()  # compiled code finds equal work by itself
    found = getattr(x, _NARROWED, None) if shares else None
    if found is not None and found[1:] == (x._version, dtype):
        narrow: Narrow = found[0]
        return narrow
    narrow = quantize(x.detach().to(dtype).reshape(-1, x.shape[-1]), E4M3)
    if shares:
        # On the tensor itself, so that it lives no longer than that.
        setattr(x, _NARROWED, (narrow, x._version, dtype))
    return narrow


# --- modules ---


class Fp8Linear(torch.nn.Linear):
    rounds_again: bool  # the weight is saved for the backward pass, and not its 8-bit form

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.numel():
            return F.linear(x, self.weight, self.bias)  # ranks without rows join in gathering weights
        dtype = product_dtype(x, self.weight)
        narrow = narrow_rows(x, dtype)
        answer: torch.Tensor = Fp8Product.apply(x, self.weight, self.bias, *narrow, dtype, self.rounds_again)
        return answer


def product_dtype(x: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def apply_fp8(core: torch.nn.Module, *, again: bool) -> None:
    """Let linear modules of the layers multiply in 8 bits, in place.

    `again`: weights are rounded in the backward pass again. So it is where they are gathered for each pass: what is
    saved of them is their memory, which comes back then, and an 8-bit form would stay, whole, on every rank. And where
    activations go elsewhere, which forms of weights should not.

    What has another class than torch's (adapters, packed weights) stays as it is, and so do routers, and shapes that
    kernels do not take. Raises where nothing is left: the setting would mean nothing.
    """
    layers, count = find_layers(core), 0
    for layer in layers:
        for name, module in layer.named_modules():
            if type(module) is torch.nn.Linear and _fits(name, module):
                module.__class__ = Fp8Linear
                module.rounds_again = again  # type: ignore[assignment]
                count += 1
    if layers and not count:
        raise ConfigError(
            f"train.precision is fp8, and no linear layer of this model's blocks has two sizes divisible by {STEP}",
            fix="write:   precision: bf16",
        )


def _fits(name: str, module: torch.nn.Linear) -> bool:
    sizes = module.in_features % STEP == module.out_features % STEP == 0
    return sizes and name.rpartition(".")[2] not in _ROUTERS


def describe_fp8(core: torch.nn.Module, device: torch.device) -> str:
    """For the banner of a run; "" where nothing is in 8 bits."""
    linear = [one for layer in find_layers(core) for one in layer.modules() if isinstance(one, torch.nn.Linear)]
    count = sum(isinstance(one, Fp8Linear) for one in linear)
    if not count:
        return ""
    is_real = device.type == "cuda" and _has_products(device)
    how = "" if is_real else "; emulated, because this device has no such products"
    return f"in 8 bits in {count} of {len(linear)} linear layers of the blocks{how}"
