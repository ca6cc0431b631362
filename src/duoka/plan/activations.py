"""Bytes that a step keeps beside weights and state: activations by rule, the loss's logits, a layer's working space.

Dropout keeps nothing: its masks are counted anew in the backward pass (model/dropout.py).
Notation: h hidden size, f feed-forward size, a heads, V vocabulary. What a layer's parts keep is counted in
layer_parts.py; `memory.py` uses both.
"""

from __future__ import annotations

from dataclasses import replace

from duoka.plan.axes import deals_heads, key_value_heads
from duoka.plan.layer_parts import (
    Means,
    kept_by_attention,
    kept_by_last_norm,
    kept_by_mlp,
    kept_by_norms,
)
from duoka.plan.layout import Layout
from duoka.plan.model_share import ModelShare
from duoka.plan.recipe import Program, Work
from duoka.plan.shape import adapted_linears
from duoka.plan.sizes import ModelShape
from duoka.plan.trained_weights import is_trained, layer_numbers, trains_head

# Logits of one chunk of the loss in fp32. model/chunks.py has the same chunks; a test holds the two together.
LOSS_CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 2**30}
LOSS_CHUNK_ROWS = 512  # on a CPU
LOSS_PRODUCT_BYTES = {"cpu": 8 * 2**20, "cuda": 256 * 2**20}
LOSS_MOST_PRODUCTS = 16


def is_narrow(work: Work, layout: Layout) -> bool:
    """Whether compiled kernels compute what lies between products."""
    return layout.precision in ("bf16", "fp8") and _is_compiled_for(work, layout)


def has_own_attention(work: Work, layout: Layout) -> bool:
    """Whether a compiled kernel attends to all documents of a row in one call."""
    is_known = layout.precision in ("fp32", "bf16", "fp8") and layout.recompute != "selective"
    return is_known and _is_compiled_for(work, layout)


def has_one_launch(work: Work, layout: Layout) -> bool:
    """Whether torch attends to all documents of a row in one launch, on a GPU."""
    return has_flash(work, layout) and layout.packing and not work.shape.parts.bends_scores


def has_flash(work: Work, layout: Layout) -> bool:
    return work.device == "cuda" and work.has_flash and layout.precision != "fp32"


def _is_compiled_for(work: Work, layout: Layout) -> bool:
    return work.program is None and work.device == "cpu" and work.has_kernels and not layout.compile


def activation_bytes_per_token(
    work: Work, layout: Layout, length: int = 0, number: int | None = None, *, with_remade: bool = False
) -> tuple[float, str]:
    """What one layer keeps of one token until its backward pass, on one rank, and the formula in words.

    `number`: of that layer, under train_only; without one, of a layer of which all is trained. `with_remade`: also
    what it does not keep, and makes again.
    """
    if work.program is not None:
        return _kept_by_program(work, work.program, layout, length)
    if (measured := _measured(work, layout)) is not None:
        return measured / layout.tp, f"per token and layer {measured:,.0f} bytes, measured without numbers"
    how = means_of(work, layout, number)
    whole, cut, formula = _kept_by_duoka(work, layout, length, replace(how, remakes=how.remakes and not with_remade))
    if layout.tp > 1:
        formula += f", / {layout.tp} but for what norms read and give, which every tensor-parallel rank has"
    return whole + cut / layout.tp, formula


def measured_bytes(work: Work, layout: Layout, what: str = "") -> float | None:
    """Of a token in a layer of a type in no table. `what`: "working " for what its backward pass holds beside.

    Compiled layers and selective recompute keep at most that: states are computed by many products.
    """
    kept, precision = dict(work.shape.kept), "fp32" if layout.precision == "fp32" else "bf16"
    asked = f"{what}{'full' if work.lora is None else 'lora'} {precision}"
    if asked in kept or not kept:
        return kept.get(asked)
    # One way was measured. Another keeps about as much, in fp32 up to twice as much.
    other = next((size for name, size in kept.items() if name.startswith("working ") == bool(what)), 0.0)
    was_half = any(name.endswith("bf16") for name in kept)
    return other * (2 if was_half and precision == "fp32" else 1)


def _measured(work: Work, layout: Layout) -> float | None:
    found = measured_bytes(work, layout)
    if found is None or work.lora is None:
        return found
    beside = work.lora.rank - 16  # that of the measured ones
    return found + (4 if layout.precision == "fp32" else 2) * beside * len(adapted_linears(work.shape, work.lora))


def _kept_by_program(work: Work, program: Program, layout: Layout, length: int) -> tuple[float, str]:
    shape, tp = work.shape, layout.tp
    split = program.kept_hidden_split * shape.hidden_size + program.kept_ffn * shape.intermediate_size
    split += program.kept_kv * shape.kv_size + program.kept_scores * shape.num_heads * length
    words = (
        f"{program.kept_hidden:g}h + ({program.kept_hidden_split:g}h + {program.kept_ffn:g}f + {program.kept_kv:g}kv"
    )
    words += f" + {program.kept_scores:g}as)/{tp}" if program.kept_scores else f")/{tp}"
    rows = tp if program.shares_rows else 1
    return program.kept_hidden * shape.hidden_size / rows + split / tp, f"{program.name}: {words}"


def boundary_bytes(work: Work, layout: Layout) -> int:
    """Per token and layer under full recompute: the layer's input."""
    if work.program is not None:
        rows = layout.tp if work.program.shares_rows else 1
        return int(work.program.boundary * work.shape.hidden_size) // rows
    return (2 if has_narrow_stream(work, layout) else 4) * work.shape.hidden_size


def has_narrow_stream(work: Work, layout: Layout) -> bool:
    """Whether the residual stream is as narrow as the embedding's weights: of adapters' base, and where all are."""
    return layout.precision != "fp32" and (work.lora is not None or work.narrow_weights)


def means_of(work: Work, layout: Layout, number: int | None = None) -> Means:
    """What computes the layers of such a run; `number` as in activation_bytes_per_token."""
    on_gpu, half = work.device == "cuda", layout.precision != "fp32"
    at_once = has_own_attention(work, layout) or has_one_launch(work, layout)
    return Means(
        size=2 if half else 4,
        stream=2 if has_narrow_stream(work, layout) else 4,
        on_gpu=on_gpu,
        kernels=is_narrow(work, layout),
        at_once=at_once,
        repeats=on_gpu and not has_flash(work, layout),
        joins=layout.sp > 1 or (layout.packing and not at_once),
        learns=work.lora is None,
        experts_learn=work.lora is None or bool(work.shape.num_expert_adapters(work.lora.targets)),
        in_8_bits=layout.precision == "fp8",
        mixes_at_once=mixes_at_once(work, layout),
        readers=_readers(work, number),
        remakes=_has_fused_adapters(work, layout) and not _is_hooked(work, layout),
        hooked=_is_hooked(work, layout),
        compiled=on_gpu and bool(layout.compile),
    )


def mixes_at_once(work: Work, layout: Layout) -> bool:
    """Whether experts are one function, on a CPU (model/mixed_experts.py)."""
    is_left = layout.compile or layout.recompute == "selective" or layout.ep > 1
    return work.device == "cpu" and work.program is None and not is_left


def _has_fused_adapters(work: Work, layout: Layout) -> bool:
    is_left = layout.compile or layout.recompute == "selective" or layout.precision == "fp8"
    return work.lora is not None and not is_left and work.shape.packed_by in ("", "bitsandbytes")


def _is_hooked(work: Work, layout: Layout) -> bool:
    return work.deepspeed is not None and layout.strategy == "fsdp"


def _readers(work: Work, number: int | None) -> frozenset[str] | None:
    """The products of a layer that keep what they read, for a gradient of their weight's or an adapter's; None: all."""
    shape, chosen = work.shape, work.train_only
    if work.lora is not None:  # PEFT puts adapters on experts, or on what is dense beside them
        beside = shape.num_expert_adapters(work.lora.targets) is None
        adapted = adapted_linears(shape, work.lora)
        return frozenset(one.name for one in adapted if beside or not one.name.startswith("mlp."))
    if chosen is None or number is None:
        return None
    learns = number in layer_numbers(chosen, shape.num_layers)
    return frozenset(one.name for one in shape.linears if learns and is_trained(one.name, chosen))


def _kept_by_duoka(work: Work, layout: Layout, length: int, how: Means) -> tuple[float, float, str]:
    """(what tensor-parallel ranks each keep whole, what they share, the formula)."""
    shape = work.shape
    norms, attention = kept_by_norms(shape, how), kept_by_attention(shape, how)
    apart, shared = kept_by_mlp(shape, how)
    # Two numbers a row for the norms.
    whole: float = norms * shape.hidden_size + 8 + apart
    cut = attention + shared
    if layout.tp > 1 and work.deepspeed is None:  # what is put together again; a rank's part of it goes on
        if shape.parts.joins_heads:
            whole, cut = whole + attention, cut - attention + how.size * shape.q_size
        if shape.parts.joined_gate:
            whole, cut = whole + shared, cut - shared + how.size * shape.intermediate_size
    formula = f"{norms:g}h of norms, {attention / shape.hidden_size:.3g}h of attention"
    formula += f" ({'packed' if layout.packing else 'exchanged'})" if how.joins else ""
    formula += f", {(apart + shared) / shape.intermediate_size:.3g}f of {'experts' if shape.experts else 'the MLP'}"
    if shape.writes_scores:  # their softmax, in fp32 and as it is multiplied
        scores = 6 if how.is_half else 4
        cut += scores * shape.num_heads * length
        formula += f" + {scores}as (a heads, s tokens of a row)"
    if how.in_8_bits and shape.experts is not None:
        whole += shape.hidden_size  # experts, in 16 bits, keep what they read
        formula += " + 1h (experts)"
    if layout.sp > 1:
        cut += 2 * how.size * (held_kv_size(shape, layout) - shape.kv_size)
        formula += f" + {2 * how.size} for what of keys and values other ranks hold too"
    if work.lora is not None:
        rank = how.size * work.lora.rank
        whole += rank * len(adapted_linears(shape, work.lora) + shape.expert_adapters(work.lora.targets))
        formula += f" + {rank} per adapter"
    return whole, cut, f"per token and layer {formula}"


def ranks_of_mlp(work: Work, layout: Layout) -> int:
    """How many share what lies inside of an MLP."""
    return 1 if work.shape.parts.joined_gate and work.deepspeed is None else layout.tp


def learns_head(work: Work) -> bool:
    return work.lora is None and (work.train_only is None or trains_head(work.shape, work.train_only))


def tail_bytes(work: Work, layout: Layout) -> int:
    """Per token, on the last stage: what the norm behind all layers keeps."""
    if work.program is not None:
        return 0
    return work.shape.hidden_size * kept_by_last_norm(work.shape, means_of(work, layout))


def held_kv_size(shape: ModelShape, layout: Layout) -> int:
    """How many keys (and as many values) a rank attends to for each token of its own: some heads of whole rows."""
    if layout.sp == 1:
        return shape.kv_size
    heads, held = shape.num_heads // layout.tp, max(1, shape.num_kv_heads // layout.tp)
    sent = key_value_heads(heads, held, layout.sp) if deals_heads(heads, layout.sp) else range(held * layout.sp)
    return len(sent) * shape.head_dim


def selective_bytes(work: Work, layout: Layout) -> float:
    """Per token and layer: its input, and the outputs of seven products and of attention with its row sums."""
    if work.program is not None:
        return _selective_of_program(work, work.program, layout)
    if (measured := _measured(work, layout)) is not None:
        return measured / layout.tp
    shape, half = work.shape, layout.precision != "fp32"
    size = 2 if half else 4
    cut = shape.q_size + 2 * shape.kv_size + (1 + shape.gated) * shape.intermediate_size
    adapters = 0 if work.lora is None else sum(one.num_out for one in adapted_linears(shape, work.lora))
    ranks = 0 if work.lora is None else work.lora.rank * len(adapted_linears(shape, work.lora))
    entry = (2 if has_narrow_stream(work, layout) else 4) * shape.hidden_size
    cut = size * (cut + shape.q_size + adapters) + 4 * shape.num_heads
    return entry + size * (2 * shape.hidden_size + ranks) + cut / layout.tp


def _selective_of_program(work: Work, program: Program, layout: Layout) -> float:
    """What others mean by it: all but attention's scores, or of the layer's products each second one."""
    shape = work.shape
    if program.selective == "all but scores":
        return _kept_by_program(work, replace(program, kept_scores=0), layout, 0)[0]
    # In the order in which they are computed: q, k, v, attention's output, gate, up, down.
    inside = [shape.q_size, shape.kv_size, shape.kv_size, 0, *[shape.intermediate_size] * (1 + shape.gated), 0]
    whole = [0, 0, 0, shape.hidden_size, *[0] * (1 + shape.gated), shape.hidden_size]
    step = 2 if program.selective == "every second product" else 1
    cut = 2 * (sum(inside[::step]) + shape.q_size) + 4 * shape.num_heads
    rows = layout.tp if program.shares_rows else 1
    return (program.boundary * shape.hidden_size + 2 * sum(whole[::step])) / rows + cut / layout.tp


def kept_for_both(work: Work, layout: Layout) -> float:
    """Per token of a layer that is computed again under selective recompute: what is there already.

    Its products and its attention gave it, and the backward pass reads it as it is.
    """
    shape, size = work.shape, 4 if layout.precision == "fp32" else 2
    if work.program is not None and work.program.selective == "all but scores":
        return selective_bytes(work, layout)
    if work.program is not None and work.program.selective == "every second product":
        return (2 * (shape.intermediate_size + shape.q_size) + 4 * shape.num_heads) / layout.tp
    return (size * ((1 + shape.gated) * shape.intermediate_size + shape.q_size) + 4 * shape.num_heads) / layout.tp


def loss_bytes(work: Work, layout: Layout, share: ModelShare, tokens: int) -> tuple[int, int]:
    """(while the loss is computed, what stays of it until its backward pass)."""
    shape, half = work.shape, layout.precision != "fp32"
    if not share.has_head:
        return 0, 0
    if work.program is not None:
        return int(work.program.logits * tokens * shape.vocab_size / layout.tp), 0
    size = 2 if half else 4
    tp = layout.tp if work.deepspeed is None else 1  # AutoTP's ranks each have the whole head
    row_gradient = size * tokens * shape.hidden_size
    rows = min(tokens, LOSS_CHUNK_ROWS) if work.device == "cpu" else tokens
    by_triton = work.device == "cuda" and work.has_kernels and half
    narrow = (is_narrow(work, layout) or by_triton) and not shape.bent_logits and tp == 1
    chunk = min((2 if narrow else 4) * rows * shape.vocab_size // tp, LOSS_CHUNK_BYTES[work.device])
    # Beside the logits: their half-precision form, and a soft cap's slope.
    chunk += (chunk // 2 if half and not narrow else 0) + (chunk if shape.bent_logits else 0)
    if work.lora is not None:
        return chunk, 2 * row_gradient
    head = shape.vocab_size * shape.hidden_size // tp
    # Untied and sharded, the head is gathered in half precision; else a half copy of fp32 weights is made.
    comes_narrow = work.narrow_weights or (layout.is_sharded and not shape.tied)
    weight_copy = 2 * head if half and not comes_narrow else 0
    if not learns_head(work):
        return chunk + weight_copy, 2 * row_gradient
    # The head's gradient is summed over chunks; in half precision some words' own product stands beside the sum.
    product = min(2 * head, max(LOSS_PRODUCT_BYTES[work.device], 2 * head // LOSS_MOST_PRODUCTS)) if half else 0
    return chunk + weight_copy + product, 2 * row_gradient + 4 * head
