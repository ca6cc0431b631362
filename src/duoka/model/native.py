"""Kernels for CPUs (the .cpp files beside), compiled once per machine, as functions of tensors.

`serves` says whether tensors can be given to it. Without a compiler, under DUOKA_NATIVE=0 and wherever it cannot serve,
callers use torch's form, which rounds to bf16 at other places: results differ as bf16 results do, by its last digit.
"""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from duoka.model.native_library import Library, load_compiled
from duoka.plan.compiler import SWITCH, find_compiler
from duoka.runs.cache import cache_folder

_NORM_PARTS = 64  # sums of rows that a norm's weight gradient is added up from, whatever the threads


def serves(*tensors: torch.Tensor) -> bool:
    """Plain tensors on a CPU, in fp32 or bf16, not under a compiler that wants to see what is computed."""
    for tensor in tensors:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
            return False
        if tensor.dtype not in (torch.bfloat16, torch.float32):
            return False
    return not torch.compiler.is_compiling() and find() is not None


def narrows(*tensors: torch.Tensor) -> bool:
    """`serves`, in a pass whose products are bf16."""
    on = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16
    return on and serves(*tensors)


@dataclass
class _Found:
    library: Library | None = None
    why_not: str = ""


@functools.cache
def _find() -> _Found:
    if os.environ.get(SWITCH) == "0":
        return _Found(why_not=f"{SWITCH}=0")
    compiler = find_compiler()
    if compiler is None:
        return _Found(why_not="no C++ compiler (duoka doctor)")
    try:
        try:
            return _Found(load_compiled(compiler, cache_folder() / "native"))
        except OSError:  # a cache that cannot be written, or holds no programs: for this process alone
            with tempfile.TemporaryDirectory() as place:
                return _Found(load_compiled(compiler, Path(place)))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", b"") or b""
        first = next(iter(said.decode(errors="replace").strip().splitlines()), str(error))
        return _Found(why_not=f"{compiler} could not make them: {first}")


def find() -> Library | None:
    """The library, compiled where it is not there yet; None where there is no compiler or it is switched off."""
    return _find().library


def forget() -> None:
    """Look again, as another process would."""
    _find.cache_clear()


def level() -> int:
    """What this process has: 0 nothing, 1 what every processor has, 2 and attention in bf16's own arithmetic."""
    library = find()
    return 0 if library is None else 1 + library.has_narrow_attention


def use_at_most(level: int) -> None:
    """What all ranks have: copies of a weight that learn by other kernels would differ in their last digits."""
    found = _find()
    if level == 0 and found.library is not None:
        found.library, found.why_not = None, "another rank has none"
    elif level == 1 and found.library is not None:
        found.library.has_narrow_attention = False


def why_not() -> str:
    """Why there are none; "": there are. Compiles them, where nobody did yet."""
    return _find().why_not


def library() -> Any:
    found = find()
    assert found is not None, "asked for only where `serves` said yes"
    return found


def _at(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _is_wide(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.float32


# --- the functions; what they write to is made here, contiguous ---


def norm_forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(x * weight / rms(x) in bf16, 1 / rms of each row). x: contiguous."""
    dim = x.shape[-1]
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    inverse = torch.empty(x.numel() // dim, dtype=torch.float32)
    library().norm_forward(
        _at(x), _at(weight), _at(out), _at(inverse), len(inverse), dim, eps, _is_wide(x), _is_wide(weight),
        torch.get_num_threads(),
    )  # fmt: skip
    return out, inverse


def norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, inverse: torch.Tensor, wants: tuple[bool, bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of x and of the weight, each where it is wanted."""
    dim, rows = x.shape[-1], len(inverse)
    parts = min(_NORM_PARTS, max(1, rows))
    x_grad = torch.empty_like(x) if wants[0] else None
    sums = torch.empty(parts, dim, dtype=torch.float32) if wants[1] else None
    library().norm_backward(
        _at(grad), _at(x), _at(weight), _at(inverse), _at(x_grad), _at(sums), rows, dim, parts, _is_wide(x),
        _is_wide(weight), torch.get_num_threads(),
    )  # fmt: skip
    return x_grad, None if sums is None else sums.sum(dim=0).to(weight.dtype)


def gate_times(gate: torch.Tensor, up: torch.Tensor | None, *, gelu: bool = False) -> torch.Tensor:
    """silu(gate) * up, of contiguous bf16, or GELU's tanh form in place of SiLU; without `up`, `gate` has both."""
    pair, sizes = _gate_rows(gate, up)
    out = torch.empty_like(pair[0], memory_format=torch.contiguous_format)
    library().gate_forward(*(_at(one) for one in (*pair, out)), *sizes, gelu, torch.get_num_threads())
    return out


def gate_times_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None, *, gelu: bool, again: bool, in_place: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(gradient of gate, of up, their product where it is wanted `again`). `in_place`: up's goes over `grad`."""
    pair, sizes = _gate_rows(gate, up)
    gate_grad, out = torch.empty_like(gate), torch.empty_like(grad) if again else None
    up_grad = None if up is None else grad if in_place else torch.empty_like(up)
    places = (*pair, *_gate_rows(gate_grad, up_grad)[0])
    library().gate_backward(_at(grad), *(_at(one) for one in places), _at(out), *sizes, gelu, torch.get_num_threads())
    return gate_grad, up_grad, out


def _gate_rows(
    gate: torch.Tensor, up: torch.Tensor | None
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[int, int, int]]:
    """(gate and up; how many rows, how long they are, and from one to the next)."""
    if up is not None:
        return (gate, up), (1, gate.numel(), gate.numel())
    width = gate.shape[-1] // 2
    return gate.chunk(2, dim=-1), (gate.numel() // (2 * width), width, 2 * width)  # type: ignore[return-value]


def laid_by_token(x: torch.Tensor) -> torch.Tensor:
    """(rows, heads, tokens, dim) whose heads of one token lie end to end, and whose tokens lie equally far apart."""
    rows, heads, tokens, dim = x.shape
    step = x.stride(2)
    ends = x.stride(3) == 1 and (heads == 1 or x.stride(1) == dim) and step >= heads * dim and step % 2 == 0
    if ends and (rows == 1 or x.stride(0) == tokens * step):
        return x
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
    """x: (rows, heads, tokens, dim) that lies as (rows, tokens, heads, dim), as its answer does; bf16 both."""
    rows, heads, tokens, dim = x.shape
    out = torch.empty((rows, tokens, heads, dim), dtype=torch.bfloat16)
    library().rotate(
        _at(x), _at(cos), _at(sin), _at(out), rows * tokens, heads, dim, x.stride(2), sign, _is_wide(cos),
        torch.get_num_threads(),
    )  # fmt: skip
    return out.transpose(1, 2)


def cross_entropy_(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """-log p of each row's target (fp64); the logits become the slope of its sum: softmax less 1 at the target."""
    targets = targets.long().contiguous()
    if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < logits.shape[-1]:
        raise IndexError(f"a label is outside of the head's {logits.shape[-1]} words")
    losses = torch.empty(len(targets), dtype=torch.float64)
    library().cross_entropy(
        _at(logits), _at(targets), _at(losses), len(targets), logits.shape[-1], torch.get_num_threads()
    )
    return losses


def adds(sums: torch.Tensor, part: torch.Tensor) -> bool:
    """Whether `add_` takes them."""
    return sums.is_contiguous() and part.is_contiguous() and serves(sums, part)


def add_(sums: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """sums += part, fp32 and bf16, both contiguous."""
    library().add(_at(sums), _at(part), sums.numel(), torch.get_num_threads())
    return sums


def drop(x: torch.Tensor, keys: torch.Tensor, place: int, level: int, *, in_place: bool = False) -> torch.Tensor:
    """x (tokens, units) with its dropped units 0, as model/dropout.py counts them."""
    x = x.contiguous()
    out = x if in_place else torch.empty_like(x)
    library().drop(
        _at(x), _at(out), _at(keys), place, keys.numel(), x.numel() // max(1, keys.numel()), level, _is_wide(x),
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def adamw_(
    numbers: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], first: int, key: int, *factors: float
) -> None:
    """One step of (weight, gradient, average, square), contiguous bf16, as optim/narrow.py says it in torch's words."""
    library().adamw(*map(_at, numbers), numbers[0].numel(), first, key, *factors, torch.get_num_threads())


def sum_rows(
    rows: torch.Tensor, order: torch.Tensor, begins: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """(n, width), contiguous: row r is the sum of the rows order[begins[r]:begins[r + 1]], in fp32, each times its
    weight."""
    out = torch.empty((len(begins) - 1, rows.shape[1]), dtype=rows.dtype)
    library().sum_rows(
        _at(rows), _at(order), _at(begins), _at(weights), _at(out), len(out), rows.shape[1], _is_wide(rows),
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def weigh_rows_(one: torch.Tensor, other: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sums of products of both's rows (fp32), contiguous, which are multiplied with their weights (fp32) then."""
    sums = torch.empty(len(weights), dtype=torch.float32)
    library().weigh_rows(
        _at(one), _at(other), _at(weights), _at(sums), len(sums), one.shape[1], _is_wide(one), torch.get_num_threads()
    )
    return sums
