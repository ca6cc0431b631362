"""Our forward of a mixture's experts, registered into transformers under the name `duoka`.

transformers keeps the experts of a layer as 3-D tensors and asks a function by name to send tokens through them: the
router has chosen already. Ours sorts rows by expert, multiplies once an expert, and puts results back in the order of
tokens, in which they are summed: no order depends on how full an expert is. It computes in autocast's type under every
strategy, where transformers' own takes the weights'. Ranks that share experts exchange rows here (ExpertExchange).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from duoka.model.dtypes import computed_in
from duoka.model.expert_products import Adapter, Product
from duoka.model.head import here
from duoka.model.mixed_experts import ALLOWED, Gate, How, Layout, mix_at_once
from duoka.plan.hardware import has_cpu_bf16
from duoka.torch_private import FakeTensor

NAME = "duoka"
EXCHANGE = "expert_exchange"
ADAPTERS = "expert_adapters"  # on a layer's experts while they compute: by the names of weights (expert_adapters.py)
# oneDNN writes a program of its own for each number of rows of a bf16 product, in milliseconds, and an expert has
# another number each time: rows of zeros make it a multiple. Fewer rows than that are numbers that come again.
_MULTIPLE = 32
_LINE = 8  # numbers in bf16: what the kernel of all experts at once takes lines of


class ExpertExchange(Protocol):
    """How rows come to the ranks that have their experts: parallel/expert.py puts it on modules."""

    def enter(self, *tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of tensors with a row for each token, the rows that this rank sends; others have the same tokens."""
        ...

    def leave(self, out: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """The rows of all tokens, of those that this rank sent."""
        ...

    def compute(
        self, rows: torch.Tensor, counts: torch.Tensor, own: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """What all ranks' experts make of `rows`, which lie expert after expert, `counts` of each.

        `own` computes this rank's experts, of rows and counts laid out alike.
        """
        ...


def use_own_experts(model: torch.nn.Module) -> None:
    """Let the mixtures of a transformers model compute with our function; other models stay as they are. In place."""
    if not any(True for _ in find_experts(model)):
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, mix)
    model.set_experts_implementation(NAME)  # type: ignore[operator]


def find_experts(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, module) of the experts of each layer whose computation transformers lets us choose."""
    for name, module in model.named_modules():
        if is_mixture(module):
            yield name, module


def is_mixture(module: torch.nn.Module) -> bool:
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def computes_here(module: torch.nn.Module) -> bool:
    """Whether these are experts whose forward asks `mix`."""
    return is_mixture(module) and module.config._experts_implementation == NAME  # type: ignore[union-attr, return-value]


def weight_names(module: Any) -> list[str]:
    """The parameters of a layer's experts; all have one row per expert."""
    return [name for name, _ in module.named_parameters(recurse=False)]


def mix(
    module: Any,
    hidden_states: torch.Tensor,  # (tokens, dim)
    top_k_index: torch.Tensor,  # (tokens, chosen)
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The weighted sum of what each token's experts make of it: (tokens, dim)."""
    num_tokens = len(top_k_index)
    exchange: ExpertExchange | None = getattr(module, EXCHANGE, None)
    if exchange is not None:
        hidden_states, top_k_index, top_k_weights = exchange.enter(hidden_states, top_k_index, top_k_weights)
    tokens, chosen = top_k_index.shape
    flat = top_k_index.reshape(-1)
    order = flat.argsort(stable=True)
    counts = flat.new_zeros(module.num_experts).scatter_add_(0, flat, torch.ones_like(flat))
    if exchange is None and _mixes_at_once(module, hidden_states):
        return _mix_at_once(module, hidden_states, order, counts, top_k_weights)
    rows = hidden_states[order // chosen].to(computed_in(hidden_states))

    def own(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return compute_experts(module, rows, counts)

    out = own(rows, counts) if exchange is None else exchange.compute(rows, counts, own)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    weighted = out[back].view(tokens, chosen, out.shape[-1]) * top_k_weights.unsqueeze(-1)
    summed = weighted.sum(dim=1).to(hidden_states.dtype)
    return summed if exchange is None else exchange.leave(summed, num_tokens)


def _mixes_at_once(module: Any, hidden: torch.Tensor) -> bool:
    on_cpu = hidden.device.type == "cpu" and not torch.compiler.is_compiling()
    return on_cpu and hasattr(module, ALLOWED) and not getattr(module, "has_post_expert_norm", False)


def _mix_at_once(
    module: Any, hidden: torch.Tensor, order: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    dtype, given = computed_in(hidden), sizes_of(counts, len(order))
    sizes, own = given, torch.arange(len(order))
    if dtype == torch.bfloat16 and fills_experts():
        sizes = filled(given)
        own = _places_among(given, sizes)
    places = torch.empty_like(order)
    places[order] = own
    names = _first_of(module), "down_proj"
    first, down = (here(getattr(module, name)) for name in names)
    biases = [here(getattr(module, f"{name}_bias")) if module.has_bias else None for name in names]
    adapters = [getattr(module, ADAPTERS, {}).get(name) for name in names]
    layout = Layout(order, places, given, sizes, weights.shape[1])
    gate = Gate(module._apply_gate if module.has_gate else module.act_fn, getattr(module, ALLOWED))
    how = How(layout, gate, module.is_transposed, dtype)
    return mix_at_once(
        hidden, weights, Product(first, biases[0], adapters[0]), Product(down, biases[1], adapters[1]), how
    )


def _first_of(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def compute_experts(module: Any, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Rows that lie expert after expert, `counts` of each, through the experts that this rank has: (rows, dim)."""
    kind, dtype = rows.device.type, computed_in(rows)
    first = _first_of(module)
    weights = {name: here(getattr(module, name)) for name in (first, "down_proj")}
    biases = {name: here(getattr(module, f"{name}_bias")) if module.has_bias else None for name in weights}
    # The kernel of all experts at once takes bf16, lines of 16 bytes, and some rows.
    fits = all(weight.shape[1] % _LINE == weight.shape[2] % _LINE == 0 for weight in weights.values())
    groups = kind == "cuda" and dtype == torch.bfloat16 and fits and len(rows) > 0
    sizes = [] if groups else sizes_of(counts, len(rows))
    out, own = rows, None
    if kind == "cpu" and dtype == torch.bfloat16 and fills_experts():
        out, sizes, own = _fill(rows, sizes)

    def multiply(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, lies: bool) -> torch.Tensor:
        if groups:
            return _multiply_grouped(rows, counts, weight, bias, lies, dtype)
        return _multiply_each(rows, sizes, weight, bias, lies, dtype)

    for name, weight in weights.items():
        adapter: Adapter | None = getattr(module, ADAPTERS, {}).get(name)
        rows, out = out, multiply(out, weight, biases[name], module.is_transposed)
        if adapter is not None:
            a, b, scale = adapter.in_lines(_LINE if groups else 1)
            out = out + scale * multiply(multiply(rows, a, None, False), b, None, True)
        if name == first:
            out = module._apply_gate(out) if module.has_gate else module.act_fn(out)
    out = out if own is None else out[own]
    has_norm = getattr(module, "has_post_expert_norm", False)  # transformers 5.17 knows no such experts
    return module.post_expert_norm(out) if has_norm else out  # type: ignore[no-any-return]


@functools.cache
def fills_experts() -> bool:
    return has_cpu_bf16()


def _fill(rows: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, list[int], torch.Tensor | None]:
    """(rows with zeros behind each expert's, how many each has then, where `rows` are among them)."""
    wide = filled(sizes)
    if wide == sizes:
        return rows, sizes, None
    own = _places_among(sizes, wide)
    return rows.new_zeros(sum(wide), rows.shape[1]).index_copy(0, own, rows), wide, own


def filled(sizes: list[int]) -> list[int]:
    """How many rows each expert has with the zeros behind its own."""
    return [size if size < _MULTIPLE else -(-size // _MULTIPLE) * _MULTIPLE for size in sizes]


def _places_among(sizes: list[int], wide: list[int]) -> torch.Tensor:
    """Of rows that lie one expert after the other, where they are among others behind each."""
    starts = itertools.accumulate(wide, initial=0)
    return torch.cat([torch.arange(start, start + size) for start, size in zip(starts, sizes, strict=False)])


def sizes_of(counts: torch.Tensor, total: int) -> list[int]:
    """How many rows each place has. Nothing is in a fake tensor (of a dry run): there all have as many."""
    if not isinstance(counts, FakeTensor):
        found: list[int] = counts.tolist()
        return found
    each, more = divmod(total, len(counts))
    return [each + (place < more) for place in range(len(counts))]


def _multiply_each(
    rows: torch.Tensor,
    sizes: list[int],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    is_transposed: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """One product an expert. An expert without rows has a gradient of zero, also where none of a rank's has any."""
    # Taken apart at once: each expert's gradient by itself would be as large as that of all.
    weights = weight.unbind()
    biases = [None] * len(sizes) if bias is None else bias.unbind()
    used = [place for place, size in enumerate(sizes) if size] or [0]
    parts = rows.split(sizes)
    out = []
    for place in used:
        own = weights[place].to(dtype)
        own_bias = biases[place]
        product = F.linear(parts[place].to(dtype), own.t() if is_transposed else own)
        out.append(product if own_bias is None else product + own_bias.to(dtype))
    return torch.cat(out)


def _multiply_grouped(
    rows: torch.Tensor,
    counts: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    is_transposed: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """All products in one launch, which does not ask the device how many rows an expert has."""
    own = weight.to(dtype).contiguous()
    ends = counts.cumsum(0).to(torch.int32)
    out = F.grouped_mm(rows.to(dtype), own if is_transposed else own.transpose(-2, -1), offs=ends)
    if bias is None:
        return out
    return out + bias.to(dtype).repeat_interleave(counts, dim=0, output_size=len(rows))
