"""What autograd keeps of one layer until its backward pass, part by part, in bytes per token.

A part keeps what its gradient asks for, and that depends on what computes it: a norm in one kernel keeps its input, one
that the model writes in steps keeps those. Counted, and held to measured bytes: tests/unit/test_plan_layers.py.
Notation: h hidden size, kv key-value size, f feed-forward size, a heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from duoka.plan.sizes import Experts, Linear, ModelShape

_WIDE = 4  # bytes of a number in fp32


@dataclass(frozen=True)
class Means:
    """What computes a layer."""

    size: int  # bytes of a number that products give
    stream: int  # and of one of the residual stream
    on_gpu: bool
    kernels: bool  # compiled ones of a CPU, in half precision
    at_once: bool  # attention over all documents of a row in one launch
    repeats: bool  # keys that heads share, for each head: of a GPU's fused kernels FlashAttention alone shares them
    joins: bool  # documents' outputs, or what was exchanged, into a tensor of their own
    learns: bool  # norms' weights do
    experts_learn: bool
    in_8_bits: bool
    mixes_at_once: bool = False  # a mixture is one function
    readers: frozenset[str] | None = None  # products that keep what they read: they learn, or adapters do; None: all
    remakes: bool = False  # adapters do not keep what they read where that is made again of what is kept
    hooked: bool = False  # what a module is given is another tensor to it: DeepSpeed's stage 3 hands it on so
    compiled: bool = False  # torch.compile chooses what it keeps, on a GPU

    @property
    def is_half(self) -> bool:
        return self.size < _WIDE

    def keeps_input(self, product: Linear) -> bool:
        return self.readers is None or product.name in self.readers


def kept_by_norms(shape: ModelShape, how: Means) -> float:
    """Of width h: what norms read, and what they give to products; also where products read the stream itself."""
    parts = shape.parts
    attention, mlp = linears_of(shape)
    readers = [one for one in attention[:-1] if one.num_in == shape.hidden_size] or attention[:1]
    inside = sum(how.keeps_input(one) for one in mlp if one.num_in == shape.hidden_size and one not in mlp[-1:])
    if shape.experts is not None:  # a router, and experts that all tokens visit; one that widens is counted with those
        # What experts read that learn is there whoever else reads it.
        dense = [one for one in mlp if not one.name.endswith("down_proj")]
        inside = sum(how.experts_learn or how.keeps_input(one) for one in dense)
        inside += how.experts_learn and not shape.experts.wide_router
    count = sum(how.keeps_input(one) for one in readers)
    before, behind = shape.block_norms - parts.post_norms, parts.post_norms
    kept = behind * _norm_reads(parts.norm, how.size, how)
    if before == 0:
        return kept + _products_keep(count, how.stream, how) + _products_keep(inside, how.stream, how)
    given = _norm_gives(parts.norm, how.stream, how)
    if _is_remade(parts.norm, how):
        count, inside = 0, inside if shape.experts is not None else 0  # experts read rows in another shape
    kept += before * _norm_reads(parts.norm, how.stream, how)
    if how.compiled and how.in_8_bits:  # norms are computed again, and what they give is rounded again
        count = inside = 0
    if before == 1:  # attention and MLP, side by side, read what one norm gives
        return kept + _products_keep(count + inside, given, how)
    if parts.parallel and _norm_reads(parts.norm, how.stream, how) == how.stream:
        kept -= how.stream  # two norms of one input
    elif how.compiled and before == 2:
        kept -= how.stream - how.size  # the second one's input is summed up again, from what attention gave
    return kept + _products_keep(count, given, how) + _products_keep(inside, given, how)


def linears_of(shape: ModelShape) -> tuple[list[Linear], list[Linear]]:
    """(attention's, the MLP's), in the order of their products."""
    mlp = [one for one in shape.linears if one.name.startswith("mlp.")]
    return [one for one in shape.linears if one not in mlp], mlp


def kept_by_last_norm(shape: ModelShape, how: Means) -> int:
    """Behind all layers, per number: what it reads, and what it gives where the head has a narrow copy of that."""
    given = _norm_gives(shape.parts.norm, how.stream, how)
    return _norm_reads(shape.parts.norm, how.stream, how) + (given if given != how.size else 0)


def _norm_reads(kind: str, width: int, how: Means) -> int:
    """Of an input of `width` bytes a number."""
    if how.compiled:  # whatever it is made of is computed again
        return width
    if kind in _LAYER_NORMS:
        return _layer_norm_width(kind, width, how)
    if _is_one_kernel(width, how):
        return width
    return _WIDE + (2 if kind == "rms" else _WIDE) * how.learns  # x.float(), and what its weight is multiplied with


_LAYER_NORMS = ("layer", "narrow")


def _layer_norm_width(kind: str, width: int, how: Means) -> int:
    return width if not how.on_gpu else how.size if kind == "narrow" else _WIDE


def _norm_gives(kind: str, width: int, how: Means) -> int:
    if how.compiled:
        return how.size
    if kind in _LAYER_NORMS:
        return _layer_norm_width(kind, width, how)
    return how.size if how.on_gpu or how.kernels else width


def _is_one_kernel(width: int, how: Means) -> bool:
    """An RMS norm: everywhere but on a CPU without compiled kernels, of what is narrow already."""
    return how.on_gpu or how.kernels or width == _WIDE


def _is_remade(kind: str, how: Means) -> bool:
    """What a norm gives, where adapters alone read it."""
    return how.remakes and kind not in _LAYER_NORMS and _is_one_kernel(how.stream, how)


def _products_keep(count: int, width: int, how: Means) -> int:
    """So many products of one input: the input, or each one's own narrow copy of a wide one; in 8 bits one for all."""
    if how.in_8_bits or not count:
        return min(1, count)
    if how.compiled:  # one narrow copy serves all
        return how.size
    return how.size if width == how.size else how.size * count


def kept_by_attention(shape: ModelShape, how: Means) -> float:
    """From the products of queries, keys and values to the product behind; all of it is shared by heads."""
    size, parts = how.size, shape.parts
    keeps_output = how.keeps_input(linears_of(shape)[0][-1])
    if is_latent(shape):
        return _kept_by_latent_attention(shape, how)
    # Rotations are as wide as the stream where no kernel turns, and what is written out narrows nothing.
    turns, is_written = (how.on_gpu or how.kernels) and not parts.own_rotation, parts.bends_scores and not how.at_once
    wide = max(size, how.stream) if is_written and not turns else size
    cut: float = wide * shape.q_size
    if how.repeats and shape.num_kv_heads < shape.num_heads and not is_written:
        cut += 2 * size * shape.q_size
    else:
        cut += (wide + size) * shape.kv_size
    cut += size * shape.q_size  # the output
    if not is_written:
        cut += _WIDE * shape.num_heads
        cut += size * shape.q_size if how.joins and not how.in_8_bits and keeps_output else 0
    by_peft = how.compiled or (parts.conv1d and how.at_once and how.is_half)
    if by_peft and not how.learns and keeps_output:  # PEFT widens it and autocast narrows it: a copy of its own
        cut += size * shape.q_size
    if how.in_8_bits and keeps_output:
        cut += shape.q_size
    if shape.qk_norm:
        cut += _norm_reads(parts.norm, size, how) * (shape.q_size + shape.kv_size)
        cut += _WIDE * (shape.num_heads + shape.num_kv_heads)
    return cut


def is_latent(shape: ModelShape) -> bool:
    return any(one.name.endswith("kv_b_proj") for one in shape.linears)


def _kept_by_latent_attention(shape: ModelShape, how: Means) -> float:
    """Queries, keys and values through narrow products with norms (DeepSeek)."""
    out = {one.name.rsplit(".", 1)[-1]: one for one in shape.linears}
    keys, up = (out.get("q_b_proj") or out["q_proj"]).num_out, out["kv_b_proj"]
    # What each norm reads, and what it gives; of keys and values it reads a part, and what it gives is turned.
    kept = _norm_reads(shape.parts.norm, how.size, how) * out["kv_a_proj_with_mqa"].num_out + how.size * up.num_in
    if "q_b_proj" in out:
        given = 0 if _is_remade(shape.parts.norm, how) else how.size
        kept += (_norm_reads(shape.parts.norm, how.size, how) + given) * out["q_b_proj"].num_in
    # torch's attention: values are filled up to keys' size, and outputs joined, or cut out of filled heads.
    heads = 2 * (keys + shape.q_size) if how.at_once and not how.on_gpu else 4 * keys + shape.q_size
    return float(kept + how.size * heads + _WIDE * shape.num_heads)


# Tensors of an MLP without a gate: the product and its activation, of which one is enough.
_PLAIN = {"relu": 1}
_OWN_GATES = ("silu", "gelu", "gelu_pytorch_tanh")  # model/gates.py
_OWN_ACTS = (*_OWN_GATES, "gelu_new", "gelu_fast", "relu2")  # of those without a gate: model/fused.py
_GATED = 4  # with a gate, as the model writes it: gate, its activation, the other product, both multiplied
_CLAMPED = 7  # and cut off, as gpt-oss does


def adapts_gated(shape: ModelShape, how: Means) -> bool:
    """Whether adapters read what a gate gave."""
    mlp = linears_of(shape)[1]
    down = mlp[-1:] if shape.experts is None else [one for one in mlp if one.name.endswith("down_proj")]
    return not how.learns and any(how.keeps_input(one) for one in down)


def _keeps_gated(shape: ModelShape, how: Means) -> bool:
    """Whether it is kept for the product behind; computed with it, it is computed again."""
    return how.hooked or (adapts_gated(shape, how) and not how.remakes)


def kept_by_mlp(shape: ModelShape, how: Means) -> tuple[float, float]:
    """(what each rank of a tensor axis keeps whole, what they share)."""
    if shape.experts is not None:
        return _kept_by_experts(shape, shape.experts, how)
    parts, size = shape.parts, how.size
    is_read = how.keeps_input(linears_of(shape)[1][-1])
    if not shape.gated:
        kept = _PLAIN.get(parts.act, 2)
        is_left = not is_read or (how.remakes and parts.act in _OWN_ACTS and not parts.conv1d)
        return 0.0, size * (kept - (is_left and parts.act != "relu")) * shape.intermediate_size
    if how.compiled:  # gate, the other product, and both multiplied where it is read: the activation is computed again
        return 0.0, (2 + (is_read and not how.in_8_bits)) * size * shape.intermediate_size
    if parts.act not in _OWN_GATES:
        return 0.0, (_GATED - (not is_read)) * size * shape.intermediate_size
    return 0.0, (2 + _keeps_gated(shape, how)) * size * shape.intermediate_size


def _kept_by_experts(shape: ModelShape, experts: Experts, how: Means) -> tuple[float, float]:
    """Each expert that a token visits reads a row of its own, and what it gives is kept to be weighed.

    Ranks of a tensor axis send some of the tokens each, and all know what routers read.
    """
    size, active = how.size, experts.num_active
    width = active * (experts.num_parameters_each // (3 * shape.hidden_size))
    shared = max(0, shape.intermediate_size - width)
    whole = size * any(one.name.endswith("shared_expert_gate") for one in shape.linears)
    whole += size * (experts.wide_router and how.is_half and how.learns)  # a copy by way of fp32
    if how.mixes_at_once:  # model/mixed_experts.py: what the first products give, and where each choice's row is
        once = (1 + shape.gated) * size * width
        whole += size * (experts.wide_router and how.is_half and how.experts_learn and not how.learns)
        # What all tokens are to experts, where the norm before gives something wider.
        whole += size * (how.experts_learn and _norm_gives(shape.parts.norm, how.stream, how) != size)
        return whole * shape.hidden_size + 16 * active, once + (2 + _keeps_gated(shape, how)) * size * shared
    rows = (1 + how.experts_learn) * active * size * shape.hidden_size
    inside = (_CLAMPED if shape.parts.bends_scores else _GATED) - (not how.experts_learn)
    return whole * shape.hidden_size, rows + inside * size * width + (2 + _keeps_gated(shape, how)) * size * shared
