"""On a GPU: one kernel for what torch does in several, Liger's (`duoka[gpu]`), or duoka's in Triton: norms, the loss.

Nothing here is used before `try_all` has compared it with torch's form on this device, in this precision and at the
model's own widths; what answers otherwise, or not at all, is left, and the banner says why (plan/kernels.py has the
table). DUOKA_LIGER=0 leaves Liger's alone.

Liger's rotation writes over what it reads, and its gated product over what it was given, in the backward pass: callers
hand over only what nobody reads again.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import subprocess
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from duoka.plan.gpu_packages import why_no_liger, why_no_triton
from duoka.plan.kernels import TRITON_PARTS

Part = Literal["norm", "rotation", "MLP", "loss"]
PARTS: tuple[Part, ...] = ("norm", "rotation", "MLP", "loss")
_MODULES = {
    "RmsNorm": "duoka.model.norm_triton",
    "LigerRopeFunction": "liger_kernel.ops.rope",
    "LigerSiLUMulFunction": "liger_kernel.ops.swiglu",
}
OTHER_RANK = "another rank does without"
_NOT_TRIED = "not tried"
_ROWS = 5
_CLOSE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


class Sizes(NamedTuple):
    """Of the model, so that a kernel is tried at what it will be used for."""

    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    mlp: int = 176
    words: int = 512


@dataclass
class Tried:
    """What this process found: why a part is left, by name; a part with "" is used."""

    why: dict[Part, str] = field(default_factory=dict)


TRIED = Tried()


def takes(part: Part, *tensors: torch.Tensor) -> bool:
    """Whether these go to the kernel: whole tensors on a GPU, not under a compiler, which fuses by itself."""
    if TRIED.why.get(part, _NOT_TRIED) or torch.compiler.is_compiling():
        return False
    return all(one.is_cuda and one.dtype in _CLOSE and not isinstance(one, DTensor) for one in tensors)


def why_not() -> Mapping[Part, str]:
    """Of each part, why torch computes it here; "": it does not."""
    return {part: TRIED.why.get(part, _NOT_TRIED) for part in PARTS}


def leave(parts: Iterable[Part], why: str = OTHER_RANK) -> None:
    """Do without these, as where another rank has them not: copies of a weight learn the same bits."""
    for part in parts:
        TRIED.why[part] = TRIED.why.get(part) or why


def forget() -> None:
    """As another process would begin."""
    TRIED.why.clear()


# --- the kernels; what they write to is theirs ---


@functools.cache
def _function(module: str, name: str) -> Any:
    """Imported where it is first called: not every machine has it."""
    return getattr(importlib.import_module(module), name)


def find_function(name: str) -> Any:
    """An autograd function of Liger's or duoka's, by its name."""
    return _function(_MODULES[name], name)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """x * weight / rms(x), rounded once to `dtype`."""
    answer: torch.Tensor = find_function("RmsNorm").apply(x, weight, eps, dtype)
    return answer


def rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As rotary.rotate, over query and key themselves, by the first half of each table."""
    turned = find_function("LigerRopeFunction").apply(query, key, cos, sin)
    return turned[0], turned[1]


def silu_times(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up; the backward pass writes over both."""
    answer: torch.Tensor = find_function("LigerSiLUMulFunction").apply(gate, up)
    return answer


def silu_times_backward(
    gate: torch.Tensor, up: torch.Tensor, find: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of gate and up, in their own memory; `find(silu(gate) * up)` gives that of the product."""
    with torch.enable_grad():
        inputs = gate.detach().requires_grad_(), up.detach().requires_grad_()
        both = silu_times(*inputs)
    gate_grad, up_grad = torch.autograd.grad(both, inputs, find(both.detach()))
    return gate_grad, up_grad


def cross_entropy_(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As native.cross_entropy_, in fp32."""
    from duoka.model import slope_triton

    return slope_triton.cross_entropy_(logits, labels)


# --- tried beside torch ---


def try_all(
    device: torch.device, dtype: torch.dtype, sizes: Sizes, parts: Iterable[Part] = PARTS
) -> Mapping[Part, str]:
    """Compare each with torch's form once, values and gradients; every rank does, before there are layers."""
    if device.type != "cuda":
        return why_not()
    # In a thread of its own: what a recomputed layer records of its operations must not hold those of a trial.
    with ThreadPoolExecutor(1) as aside:
        for part in parts:
            missing = why_no_triton() if part in TRITON_PARTS else why_no_liger()
            TRIED.why[part] = missing or aside.submit(try_part, TRIALS[part], device, dtype, sizes).result()
    return why_not()


def try_part(trial: Callable[..., None], device: torch.device, dtype: torch.dtype, sizes: Sizes) -> str:
    try:
        with torch.enable_grad():
            for kind in dict.fromkeys((dtype, torch.float32)):  # the residual stream is wide
                trial(device, kind, sizes)
    except _trial_faults() as error:
        said = next(iter(str(error).strip().splitlines()), "")
        return f"it did not run here ({said[:120] or type(error).__name__})"
    except _Differs:
        return "it does not answer here as torch does"
    return ""


@functools.cache
def _trial_faults() -> tuple[type[BaseException], ...]:
    found: tuple[type[BaseException], ...] = (
        RuntimeError, ValueError, TypeError, AttributeError, LookupError, ImportError, AssertionError, OSError,
        subprocess.SubprocessError,
    )  # fmt: skip
    with contextlib.suppress(ImportError):
        found += (importlib.import_module("triton.errors").TritonError,)
    return found


def _draw(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


class _Differs(Exception):
    """A kernel's answer is not torch's."""


def _same(ours: Iterable[torch.Tensor], wanted: Iterable[torch.Tensor], dtype: torch.dtype) -> None:
    close = _CLOSE[dtype]
    for one, two in zip(ours, wanted, strict=True):
        limit = close * max(1.0, float(two.detach().float().std()))
        if one.shape != two.shape or not torch.allclose(one.float(), two.float(), rtol=close, atol=limit):
            raise _Differs


def _compare(ours: Callable[..., Any], plain: Callable[..., Any], inputs: list[torch.Tensor]) -> None:
    """Answers and gradients of both, each with inputs of its own; the plain one in fp32."""
    found = []
    for function, wide in ((ours, False), (plain, True)):
        own = [one.detach().clone() for one in inputs]
        own = [(one.float() if wide else one).requires_grad_() for one in own]
        # Not leaves: kernels write over what they are given.
        answers = function(*(one * 1.0 for one in own))
        answers = answers if isinstance(answers, tuple) else (answers,)
        slopes = [_draw(one.device, inputs[0].dtype, *one.shape).to(one.dtype) for one in answers]
        found.append([*answers, *torch.autograd.grad(answers, own, slopes)])
    _same(found[0], found[1], inputs[0].dtype)


def _try_norm(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> None:
    for shape in ((1, _ROWS, sizes.hidden), (1, _ROWS, sizes.heads, sizes.head_dim)):
        x, weight = _draw(device, dtype, *shape), _draw(device, dtype, shape[-1])
        _compare(lambda a, w: norm(a, w, 1e-5, a.dtype), lambda a, w: F.rms_norm(a, w.shape, w, 1e-5), [x, weight])


def _try_rotation(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> None:
    query, key = (_draw(device, dtype, 1, _ROWS, heads, sizes.head_dim) for heads in (sizes.heads, sizes.kv_heads))
    angles = _draw(device, torch.float32, 1, _ROWS, sizes.head_dim // 2).repeat(1, 1, 2)
    for tables in dict.fromkeys((torch.float32, dtype)):
        cos, sin = angles.cos().to(tables), angles.sin().to(tables)

        def turn(
            q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor = cos, sin: torch.Tensor = sin
        ) -> tuple[torch.Tensor, ...]:
            found = []
            for one in (q.transpose(1, 2), k.transpose(1, 2)):
                first, second = one.chunk(2, dim=-1)
                found.append(one * cos[:, None].float() + torch.cat((-second, first), -1) * sin[:, None].float())
            return tuple(found)

        def ours(
            q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor = cos, sin: torch.Tensor = sin
        ) -> tuple[torch.Tensor, ...]:
            return rotate(q.transpose(1, 2), k.transpose(1, 2), cos, sin)

        _compare(ours, turn, [query, key])


def _try_mlp(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> None:
    gate, up = (_draw(device, dtype, width, _ROWS, sizes.mlp)[:1] for width in (1, 2))
    _compare(silu_times, lambda a, b: F.silu(a) * b, [gate, up])


def _try_loss(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> None:
    logits = _draw(device, dtype, _ROWS, sizes.words) * 4
    labels = torch.arange(_ROWS, device=device) % sizes.words
    wanted = logits.float().requires_grad_()
    losses = F.cross_entropy(wanted, labels, reduction="none")
    (slope,) = torch.autograd.grad(losses.sum(), wanted)
    found = cross_entropy_(logits, labels)
    _same((found, logits), (losses, slope), dtype)


TRIALS: Mapping[Part, Callable[..., None]] = {
    "norm": _try_norm, "rotation": _try_rotation, "MLP": _try_mlp, "loss": _try_loss,
}  # fmt: skip
