"""Bytes per rank, by part, and the peak as the largest of a few moments of a step (never the sum of all maxima).

Notation of the formulas: P parameters, Pt trainable, N ranks, h hidden size, kv key-value size, f feed-forward size,
a heads, r rank of adapters, V vocabulary. The activation formulas are exact counts of what autograd keeps for
transformers' Llama with fused attention, measured; other families and kernels differ, hence the range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from duoka.config.schema import LoraConfig, TrainOnlyConfig
from duoka.plan.layout import Layout
from duoka.plan.shape import ModelShape, adapted_linears, lora_parameters
from duoka.plan.trained import trained_parameters

# Logits of one chunk of the loss in fp32. model/loss.py works in the same chunks; a test holds the two together.
LOSS_CHUNK_BYTES = 64 * 2**20
# A process before it holds any model: interpreter, torch, transformers, peft (343 MiB when measured, and its pools).
CPU_FRAMEWORK_BYTES = (360 * 2**20, 420 * 2**20, 640 * 2**20)  # low, likely, high
# CUDA context and NCCL's buffers on a GPU; not measured by us.
CUDA_FRAMEWORK_BYTES = (600 * 2**20, 1200 * 2**20, 1800 * 2**20)
# What other kernels and families keep, and what an allocator wastes, as factors on the estimate.
RANGE = (0.85, 1.30)

FITS, TIGHT = 0.90, 0.97  # shares of the available memory below which a run fits, or is tight


@dataclass(frozen=True)
class Work:
    """What memory depends on beside the layout: who is trained, on which device, how much at once."""

    shape: ModelShape
    lora: LoraConfig | None
    device: str = "cpu"
    bucket_view: bool = True
    train_only: TrainOnlyConfig | None = None

    @property
    def num_trainable(self) -> int:
        if self.train_only is not None:
            return trained_parameters(self.shape, self.train_only)
        return self.shape.num_parameters if self.lora is None else lora_parameters(self.shape, self.lora)

    @property
    def num_frozen(self) -> int:
        if self.train_only is not None:
            return self.shape.num_parameters - self.num_trainable
        return 0 if self.lora is None else self.shape.num_parameters

    @property
    def num_total(self) -> int:
        return self.num_trainable + self.num_frozen


@dataclass(frozen=True)
class StaticMemory:
    """Weights, gradients and optimizer state of one rank under one strategy; fp32 masters beside gathered weights
    count as optimizer state. `host_bytes` of these lie in host memory, not in the GPU's."""

    strategy: str
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    formula: str
    host_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes


def static_memory(work: Work, layout: Layout) -> StaticMemory:
    """What a rank holds at the end of a step's backward passes, activations and what passes by apart."""
    frozen_size = 4 if layout.precision == "fp32" or work.lora is None else 2
    frozen, train, ranks = work.num_frozen * frozen_size, work.num_trainable, layout.shard
    note = f" + {frozen_size}(P-Pt)" if frozen else ""
    if layout.strategy in ("zero1", "zero2"):
        gathered, formula = _gathered_whole(work, layout.precision)
        first = layout.strategy == "zero1"
        gradients = 4 * train if first else 4 * train // ranks
        formula += f" + {'4Pt' if first else '4Pt/N'} + 12Pt/N{note}"
        own = (gathered + frozen, gradients, 12 * train // ranks)
        host = 12 * train // ranks + 4 * train // ranks if layout.offload == "params" else 0
    elif layout.strategy in ("fsdp", "hsdp"):
        divisor = "N" if layout.strategy == "fsdp" else "S"
        note_sharded = f" + {frozen_size}(P-Pt)/{divisor}" if frozen else ""
        formula = f"(4Pt + 4Pt + 8Pt)/{divisor}{note_sharded}"
        own = ((4 * train + frozen) // ranks, 4 * train // ranks, 8 * train // ranks)
        host = sum(own) if layout.offload == "params" else 0
    else:
        copies = 2 if layout.strategy == "ddp" and not work.bucket_view else 1
        formula = f"4Pt + {4 * copies}Pt + 8Pt{note}"
        own = (4 * train + frozen, 4 * copies * train, 8 * train)
        host = 0
    if layout.offload == "optimizer":
        host = 8 * train // ranks
    return StaticMemory(layout.strategy, *own, formula, host if work.device == "cuda" else 0)


def _gathered_whole(work: Work, precision: str) -> tuple[int, str]:
    """Weights whole in the type that computes; what begins the residual stream, the embedding, stays fp32."""
    train = work.num_trainable
    if precision == "fp32":
        return 4 * train, "4Pt"
    if work.lora is not None:
        return 2 * train, "2Pt"
    return 2 * train + 2 * work.shape.num_embedding, "2Pt + 2 of the embedding"


def static_table(work: Work, layout: Layout) -> tuple[StaticMemory, ...]:
    """Every strategy for the same ranks."""
    ranks = layout.dp
    rows = [replace(layout, strategy="single", dp=1, shard=1, offload="none")]
    rows += [replace(layout, strategy="ddp", shard=1, offload="none")]
    rows += [replace(layout, strategy=strategy, shard=ranks, offload="none") for strategy in ("zero1", "zero2", "fsdp")]
    rows = [layout if row.strategy == layout.strategy else row for row in rows]
    return tuple(static_memory(work, row) for row in [*rows, *([layout] if layout.strategy == "hsdp" else [])])


@dataclass(frozen=True)
class ActivationRule:
    """Bytes that autograd keeps per token and layer: `hidden` h + `key_value` kv + `ffn` f + 4a + 8."""

    hidden: int
    key_value: int
    ffn: int
    dropped_hidden: int = 0  # more when adapters have dropout: a mask and a copy of each adapted input
    dropped_ffn: int = 0
    rank: int = 0  # per adapted layer and rank of the adapter


_RULES: Mapping[tuple[bool, bool], ActivationRule] = {  # (adapters, half precision)
    (False, False): ActivationRule(32, 8, 16),
    (False, True): ActivationRule(30, 4, 8),
    (True, False): ActivationRule(24, 8, 16, dropped_hidden=40, dropped_ffn=4, rank=4),
    (True, True): ActivationRule(24, 4, 8, dropped_hidden=24, dropped_ffn=4, rank=2),
}
_NUM_HIDDEN_INPUTS = 6  # q, k, v, o, gate, up read a tensor of width h; down reads one of width f


def activation_bytes_per_token(work: Work, layout: Layout) -> tuple[float, str]:
    """What one layer keeps of one token until its backward pass, and the formula in words."""
    shape, half = work.shape, layout.precision != "fp32"
    rule = _RULES[work.lora is not None, half]
    size = 2 if half else 4
    # Two of the h-wide tensors (rotated queries, attention's output) are as wide as all heads together.
    wide_bytes = rule.hidden * shape.hidden_size + 2 * size * (shape.q_size - shape.hidden_size)
    formula = f"{rule.hidden}h + {rule.key_value}kv + {rule.ffn}f + 4a + 8"
    total: float = wide_bytes + rule.key_value * shape.kv_size + rule.ffn * shape.intermediate_size
    total += 4 * shape.num_heads + 8
    if layout.packing:
        total += size * shape.q_size  # documents' outputs are joined into one more tensor
        formula += f" + {size}h (packed)"
    if shape.block_norms > 2 or shape.qk_norm:
        total += 12 * (shape.block_norms - 2) * shape.hidden_size
        total += 12 * (shape.q_size + shape.kv_size) * shape.qk_norm
        formula += " + 12 per extra norm"
    if work.lora is not None:
        adapted = adapted_linears(shape, work.lora)
        total += rule.rank * work.lora.rank * len(adapted)
        formula += f" + {rule.rank}r per adapter"
        if work.lora.dropout > 0:
            total += _dropout_bytes(work, rule, len(adapted))
            formula += ", and dropout's masks"
    return total, f"per token and layer {formula}"


def _selective_bytes(work: Work, layout: Layout) -> float:
    """Per token and layer: its input, and the outputs of seven products and of attention with its row sums."""
    shape, half = work.shape, layout.precision != "fp32"
    size = 2 if half else 4
    products = 2 * shape.hidden_size + shape.q_size + 2 * shape.kv_size + 2 * shape.intermediate_size
    adapters = 0 if work.lora is None else sum(one.num_out for one in adapted_linears(shape, work.lora))
    ranks = 0 if work.lora is None else work.lora.rank * len(adapted_linears(shape, work.lora))
    entry = (size if half and work.lora is not None else 4) * shape.hidden_size
    return entry + size * (products + shape.q_size + adapters + ranks) + 4 * shape.num_heads


def _dropout_bytes(work: Work, rule: ActivationRule, num_adapted: int) -> float:
    # A CUDA mask is one byte, a CPU mask an fp32 number.
    saved = 3 if work.device == "cuda" else 0
    hidden = (rule.dropped_hidden - saved * _NUM_HIDDEN_INPUTS) * work.shape.hidden_size
    whole = hidden + (rule.dropped_ffn - saved) * work.shape.intermediate_size
    return whole * num_adapted / len(work.shape.linears)


@dataclass(frozen=True)
class Memory:
    """One rank's memory: parts that make up the peak, all moments, and the range."""

    parts: Mapping[str, int]  # at the moment of the peak
    moments: Mapping[str, int]
    peak_moment: str
    low_bytes: int
    high_bytes: int
    tokens: int  # in one micro-batch
    formula: str

    @property
    def peak_bytes(self) -> int:
        return self.moments[self.peak_moment]

    def largest_parts(self, count: int = 3) -> list[tuple[str, int]]:
        return sorted(self.parts.items(), key=lambda part: -part[1])[:count]


def estimate_memory(work: Work, layout: Layout, tokens: int, *, accumulates: bool = True) -> Memory:
    """The peak of one rank that computes `tokens` at once, and `accumulates` gradients over micro-batches or not."""
    static = static_memory(work, layout)
    per_layer, formula = activation_bytes_per_token(work, layout)
    layers = work.shape.num_layers
    one_layer = int(per_layer * tokens)
    kept, again = one_layer * layers, 0
    if layout.recompute == "full":
        size = 2 if layout.precision != "fp32" and work.lora is not None else 4
        kept, again = size * work.shape.hidden_size * tokens * layers, one_layer
        formula = f"{size}h per token and layer, and one layer whole: {formula}"
    elif layout.recompute == "selective":
        kept, again = int(_selective_bytes(work, layout) * tokens) * layers, one_layer
        formula = f"what products and attention give, and one layer whole: {formula}"
    low, framework, high = CUDA_FRAMEWORK_BYTES if work.device == "cuda" else CPU_FRAMEWORK_BYTES
    held = _on_device(static, layout)
    base = {"weights": held["weights"], "optimizer": held["optimizer"], "framework": framework}
    base |= {"gathered": _window_bytes(work, layout)} if layout.strategy in ("fsdp", "hsdp") else {}
    gradients = {"gradients": held["gradients"]}
    # DDP's gradients live in its buckets for good; others appear in the backward pass, as activations go.
    before = gradients if accumulates or layout.strategy == "ddp" else {}
    casts = _cast_bytes(work, layout)
    loss, head_gradient = _loss_bytes(work, layout, tokens)
    working = _working_bytes(work, layout, tokens)
    moments = {
        "loss": base | before | {"casts": casts, "activations": kept, "loss": loss + head_gradient},
        "start of the backward pass": base
        | before
        | {"casts": casts, "activations": kept + again, "loss": head_gradient, "working": working},
        "end of the backward pass": base | gradients | {"casts": casts, "activations": one_layer, "working": working},
        "optimizer step": base | gradients | {"working": _optimizer_bytes(work, layout)},
    }
    sums = {name: sum(parts.values()) for name, parts in moments.items()}
    peak = max(sums, key=lambda name: sums[name])
    parts = {name: size for name, size in moments[peak].items() if size}
    fixed = sum(held.values()) - (0 if "gradients" in moments[peak] else held["gradients"])
    loose = sums[peak] - fixed - framework
    return Memory(
        parts=parts,
        moments=sums,
        peak_moment=peak,
        low_bytes=int(fixed + low + RANGE[0] * loose),
        high_bytes=int(fixed + high + RANGE[1] * loose),
        tokens=tokens,
        formula=formula,
    )


def _on_device(static: StaticMemory, layout: Layout) -> dict[str, int]:
    """The parts of `static` that lie where the model computes: all on a CPU, less what is offloaded on a GPU."""
    parts = {
        "weights": static.weights_bytes,
        "gradients": static.gradients_bytes,
        "optimizer": static.optimizer_bytes,
    }
    if not static.host_bytes:
        return parts
    if layout.offload == "optimizer":
        return parts | {"optimizer": static.optimizer_bytes - static.host_bytes}
    if layout.strategy in ("zero1", "zero2"):
        whole = static.gradients_bytes if layout.strategy == "zero1" else 0
        return parts | {"optimizer": 0, "gradients": whole}
    return dict.fromkeys(parts, 0)


def _window_bytes(work: Work, layout: Layout) -> int:
    """What FSDP has gathered at once: the layer that computes and the next, embedding and head, a layer's gradients."""
    shape, size = work.shape, 4 if layout.precision == "fp32" else 2
    gradients = (size + 4) * shape.num_per_layer if work.lora is None else 0
    wide = 4 if work.lora is None else size
    return 2 * size * shape.num_per_layer + wide * shape.num_embedding + size * shape.num_head + gradients


def _cast_bytes(work: Work, layout: Layout) -> int:
    """Half-precision copies that autocast keeps of the fp32 weights it multiplies with."""
    if layout.precision == "fp32" or layout.is_sharded:
        return 0  # what is gathered comes in half precision
    return 2 * (work.shape.num_block_linear if work.lora is None else work.num_trainable)


def _loss_bytes(work: Work, layout: Layout, tokens: int) -> tuple[int, int]:
    """(while the loss is computed, what stays of it until its backward pass)."""
    shape, half = work.shape, layout.precision != "fp32"
    size = 2 if half else 4
    row_gradient = size * tokens * shape.hidden_size
    if shape.bent_logits:
        # The model's own logits, an fp32 copy, log-probabilities, and gradients of the two.
        return tokens * shape.vocab_size * (size + 4 + 4 + 4), tokens * shape.vocab_size * (size + 4 + 4)
    chunk = min(4 * tokens * shape.vocab_size, LOSS_CHUNK_BYTES)
    chunk += chunk // 2 if half else 0
    if work.lora is not None:
        return chunk, 2 * row_gradient
    weight_copy = 2 * shape.num_embedding if half else 0
    # The head's gradient is summed over chunks; each chunk's own product stands beside the sum.
    return chunk + weight_copy + size * shape.num_embedding, 2 * row_gradient + 4 * shape.num_embedding


def _working_bytes(work: Work, layout: Layout, tokens: int) -> int:
    """Gradients of one layer's activations while its backward pass runs: three f-wide and three h-wide tensors."""
    size = 4 if layout.precision == "fp32" else 2
    return 3 * size * tokens * (work.shape.intermediate_size + work.shape.hidden_size)


def _optimizer_bytes(work: Work, layout: Layout) -> int:
    """Temporaries of AdamW: of one tensor at a time on CPU, of all tensors at once on CUDA (foreach)."""
    if work.device == "cuda":
        return 4 * work.num_trainable // layout.shard
    return 8 * (work.shape.num_embedding if work.lora is None else 0) // layout.shard
