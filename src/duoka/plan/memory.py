"""Bytes per rank, by part, and the peak as the largest of a few moments of a step (never the sum of all maxima).

Static memory comes from `recipe.py`, activations and temporaries from `activations.py`; here they are added up at each
moment. Other families and kernels differ from what was measured, hence the range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from duoka.plan import deepspeed
from duoka.plan.activations import (
    activation_bytes_per_token,
    boundary_bytes,
    kept_for_both,
    loss_bytes,
    selective_bytes,
    unread_bytes,
)
from duoka.plan.fp8 import fp8_weights
from duoka.plan.layout import Layout
from duoka.plan.offload import LAYERS_HERE, buffer_bytes
from duoka.plan.recipe import (
    ModelShare,
    StaticMemory,
    Work,
    copy_bytes,
    layers_of_backward,
    shares,
    static_memory,
)
from duoka.plan.recompute import is_share, whole_layers

# A process before it holds any model: interpreter, torch, transformers, peft, what kernels keep (385 to 395 MiB when
# measured). The upper end has what glibc keeps of freed blocks, up to 250 MiB more, from run to run others.
CPU_FRAMEWORK_BYTES = (370 * 2**20, 390 * 2**20, 700 * 2**20)  # low, likely, high
# CUDA context and NCCL's buffers on a GPU; not measured by us.
CUDA_FRAMEWORK_BYTES = (600 * 2**20, 1200 * 2**20, 1800 * 2**20)
# NCCL's buffers for each of a tensor, pipeline or sequence axis: its communicators, and those that cross it.
AXIS_BYTES = 1200 * 2**20
# Factors on the estimate: what other kernels and families keep, and the allocator's fragmentation.
RANGE = (0.85, 1.30)
# Of activations and logits, measured of 135M (full and LoRA, fp32 and bf16) beside tcmalloc: 0.17 to 0.36.
HEAP = 0.28
# Of an update that rounds at random in torch's own functions (optim/narrow.py): one chunk's temporaries.
NARROW_STEP_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
# Where layers are gathered and freed on a CPU, malloc's heap fragments between tensors of different sizes: temporaries
# took 1.4 (adapters) to 2.1 times (all weights) their own size (benchmarks/scaling.md).
HOLES = 1.90

# By what is meant by it: duoka's, and those of other programs.
_SELECTIVE = {
    "products": "what products and attention give",
    "every second product": "what every second product and attention give",
    "all but scores": "all but attention's scores",
}

_LAST_OF_PASS = "end of the backward pass"

FITS, TIGHT = 0.90, 0.97  # shares of the available memory below which a run fits, or is tight


@dataclass(frozen=True)
class Memory:
    """One rank's memory: parts that make up the peak, all moments, and the range."""

    parts: Mapping[str, int]  # at the moment of the peak
    moments: Mapping[str, int]
    peak_moment: str
    low_bytes: int
    high_bytes: int
    tokens: int  # in the fullest micro-batch
    later: int  # in the fullest of those that find gradients; 0: a step has one micro-batch
    peak_tokens: int  # of the one that makes the peak
    formula: str
    formulas: Mapping[str, str] = field(default_factory=dict)  # of each part of the peak, by its name
    host_bytes: int = 0  # of this rank, in host memory
    disk_bytes: int = 0  # of this rank, in files

    @property
    def peak_bytes(self) -> int:
        return self.moments[self.peak_moment]

    def largest_parts(self, count: int = 3) -> list[tuple[str, int]]:
        return sorted(self.parts.items(), key=lambda part: -part[1])[:count]


def estimate_memory(
    work: Work,
    layout: Layout,
    tokens: int,
    *,
    later: int | None = None,
    accumulation: int = 1,
    length: int = 0,
    eval_tokens: int = 0,
    cache: int = 0,
) -> Memory:
    """The peak of one rank that computes `tokens` at once, then `later` tokens beside its gradients; 0: nothing more.

    Of a pipeline, the fullest stage; `accumulation` micro-batches feed it. `length` is the longest sequence, which
    matters only where attention keeps its scores. Evaluations measure up to `eval_tokens` at once. `cache`: bytes of
    keys and values while answers are drawn.
    """
    sizes = -(-tokens // layout.sp), -(-(tokens if later is None else later) // layout.sp)
    aside = -(-eval_tokens // layout.sp), cache
    stages = [_estimate(work, layout, share, sizes, length, aside) for share in shares(work, layout, accumulation)]
    return max(stages, key=lambda memory: memory.peak_bytes)


def _estimate(
    work: Work, layout: Layout, share: ModelShare, sizes: tuple[int, int], length: int, aside: tuple[int, int]
) -> Memory:
    """`sizes`: tokens of the first micro-batch, and of the fullest later one; `aside`: evaluations', and the cache."""
    static = static_memory(work, layout, share)
    low, framework, high = _framework_bytes(work, layout)
    held = _on_device(static, layout, work.deepspeed is not None)
    base = {"weights": held["weights"], "optimizer": held["optimizer"], "framework": framework}
    copied = copy_bytes(work, layout)
    copy = copied if work.device == "cpu" else 0
    base |= {"checkpoint copy": copy} if copy else {}
    slots = _slot_bytes(work, layout, share, static, sizes[1] > 0)
    passes = "disk buffers" if layout.disk != "none" else "offload buffers"
    base |= {passes: slots} if slots and work.device == "cpu" else {}
    gathered = _gathered_bytes(work, layout, share) if layout.strategy in ("fsdp", "hsdp") or work.deepspeed else {}
    gradients = {"gradients": held["gradients"]}
    # DDP's gradients live in its buckets for good; others appear in the backward pass, as activations go.
    buckets = gradients if layout.strategy == "ddp" else {}
    one_layer, _, formula = _activations(work, layout, share, sizes[0], length)
    moments = {"optimizer step": base | gradients | {"temporaries": _optimizer_bytes(work, layout, share)}}
    tokens_of = {"optimizer step": sizes[0]}
    for tokens, before in ((sizes[0], buckets), (sizes[1], gradients)):
        passing = _pass_moments(work, layout, share, tokens, length) if tokens else {}
        for moment, own in passing.items():
            kept_free = _heap_bytes(work, layout, own)
            whole = base | (gradients if moment == _LAST_OF_PASS else before) | own | kept_free
            if sum(whole.values()) > sum(moments.get(moment, {}).values()):
                moments[moment], tokens_of[moment] = whole, tokens
    for moment, own in _without_gradients(work, layout, share, aside, one_layer / max(1, sizes[0])).items():
        moments[moment], tokens_of[moment] = base | buckets | own, aside[0] or sizes[0]
        gathered |= {moment: gathered.get("loss", 0)} if gathered else {}
    for moment, size in gathered.items():
        moments[moment] = moments[moment] | {"gathered": size}
    sums = {name: sum(parts.values()) for name, parts in moments.items()}
    peak = max(sums, key=lambda name: sums[name])
    parts = {name: size for name, size in moments[peak].items() if size}
    fixed = sum(held.values()) + copy + base.get(passes, 0)
    fixed -= 0 if "gradients" in moments[peak] else held["gradients"]
    loose = sums[peak] - fixed - framework
    moved = moved_activations(work, layout, share, max(sizes), length)
    on_host = layout.activations == "host"
    put_away = static.gradients_bytes if work.deepspeed is not None and layout.disk != "none" else 0  # in files too
    return Memory(
        parts=parts,
        moments=sums,
        peak_moment=peak,
        low_bytes=int(fixed + low + RANGE[0] * loose),
        high_bytes=int(fixed + high + (HOLES if work.device == "cpu" and gathered else RANGE[1]) * loose),
        tokens=sizes[0],
        later=sizes[1],
        peak_tokens=tokens_of[peak],
        formula=formula,
        formulas=_name_formulas(work, layout, static, formula, share),
        host_bytes=static.host_bytes + copied - copy + slots - base.get(passes, 0) + (moved if on_host else 0),
        disk_bytes=static.disk_bytes + put_away + (0 if on_host else moved),
    )


def _without_gradients(
    work: Work, layout: Layout, share: ModelShare, aside: tuple[int, int], per_token: float
) -> dict[str, dict[str, int]]:
    """Transient memory where nothing is kept for a backward pass: one layer's tensors, `per_token`, and logits."""
    eval_tokens, cache = aside
    found: dict[str, dict[str, int]] = {}
    if eval_tokens:
        logits = loss_bytes(work, layout, share, eval_tokens)[0]
        found["evaluation"] = {"activations": int(per_token * eval_tokens), "loss": logits}
    if cache:
        found["drawing of answers"] = {"cache": cache}
    return found


def _slot_bytes(work: Work, layout: Layout, share: ModelShare, static: StaticMemory, accumulates: bool) -> int:
    """Through which what is offloaded passes; of host memory, DeepSpeed's."""
    if layout.disk == "none":
        if work.deepspeed is None or layout.offload == "none":
            return 0
        return deepspeed.offload_buffers(layout.strategy, layout.state_ranks, share, accumulates=accumulates)
    if work.deepspeed is not None:
        return deepspeed.disk_buffers(work, layout.state_ranks, share, layout.disk)
    return buffer_bytes(static.disk_bytes if layout.disk == "optimizer" else static.optimizer_bytes)


def _pass_moments(work: Work, layout: Layout, share: ModelShare, tokens: int, length: int) -> dict[str, dict[str, int]]:
    """Transient memory at the loss and at both ends of the backward pass of one micro-batch."""
    one_layer, kept, _ = _activations(work, layout, share, tokens, length)
    loss, head_gradient = loss_bytes(work, layout, share, tokens)
    working = _working_bytes(work, layout, tokens)
    again = one_layer if whole_layers(layout.recompute, share.num_layers)[-1:] == (True,) else 0
    if layout.recompute == "selective":
        again = max(0, one_layer - int(kept_for_both(work, layout) * tokens))
    casts = {"casts": _cast_bytes(work, layout, share)}
    if layout.pp > 1:
        # Hidden states that leave, and gradients that come and leave; received states are their layer's kept input.
        casts["pipeline"] = 3 * boundary_bytes(work, layout) * tokens
    return {
        "loss": casts | {"activations": kept, "loss": loss + head_gradient},
        "start of the backward pass": casts | {"activations": kept + again, "loss": head_gradient, "working": working},
        _LAST_OF_PASS: casts | {"activations": one_layer, "working": working},
    }


def _activations(work: Work, layout: Layout, share: ModelShare, tokens: int, length: int) -> tuple[int, int, str]:
    """(of one whole layer, kept of all layers until the backward pass, the formula)."""
    per_layer, formula = activation_bytes_per_token(work, layout, length)
    # Below what is trained, nothing is kept, and above it less of layers that are frozen.
    passed = layers_of_backward(work, share)
    unread = [0.0] * len(passed)
    if work.train_only is not None:
        unread = [unread_bytes(work, layout, number) for number in passed]
    of_layers = [int((per_layer - one) * tokens) for one in unread]
    one_layer = max(of_layers, default=int(per_layer * tokens))
    edge = boundary_bytes(work, layout)
    if layout.recompute == "selective":
        of_layers = [int(selective_bytes(work, layout) * tokens)] * len(of_layers)
        formula = (
            f"{_SELECTIVE[work.program.selective if work.program else 'products']}, and one layer whole: {formula}"
        )
    again = whole_layers(layout.recompute, share.num_layers)[share.num_layers - len(passed) :]
    layers = [edge * tokens if whole else usual for whole, usual in zip(again, of_layers, strict=True)]
    kept = sum(layers) * share.in_flight
    if layout.recompute == "full":
        formula = f"{edge // work.shape.hidden_size}h per token and layer, and one layer whole: {formula}"
    elif is_share(layout.recompute):
        formula = f"{edge // work.shape.hidden_size}h of {layout.recompute} of the layers, of the others {formula}"
    if layout.activations != "none":
        kept = max(sum(layers[at : at + LAYERS_HERE]) for at in range(max(1, share.num_layers - LAYERS_HERE + 1)))
    if work.program is not None and work.program.offloads_kept:
        kept = one_layer if layout.recompute == "none" else 0
    return one_layer, kept, formula


def moved_activations(work: Work, layout: Layout, share: ModelShare, tokens: int, length: int) -> int:
    """What one micro-batch's layers have elsewhere before its backward pass: of all but the last."""
    if layout.activations == "none":
        return 0
    here = replace(layout, activations="none")
    return _activations(work, here, share, tokens, length)[1] // max(1, share.num_layers) * (share.num_layers - 1)


def _framework_bytes(work: Work, layout: Layout) -> tuple[int, int, int]:
    """(low, likely, high). On a GPU every further axis brings communicators, and buffers with them."""
    if work.device != "cuda":
        more = deepspeed.IMPORTED_BYTES if work.deepspeed is not None else 0
        return tuple(size + more for size in CPU_FRAMEWORK_BYTES)  # type: ignore[return-value]
    return tuple(size + len(layout.axes) * AXIS_BYTES for size in CUDA_FRAMEWORK_BYTES)  # type: ignore[return-value]


def _name_formulas(
    work: Work, layout: Layout, static: StaticMemory, activations: str, share: ModelShare
) -> Mapping[str, str]:
    flight = f", {share.in_flight} micro-batches in the pipeline" if share.in_flight > 1 else ""
    whole = work.program is not None and work.program.logits
    context = "CUDA context, NCCL" if work.device == "cuda" else "interpreter and libraries"
    return {
        "weights": static.formula,
        "gradients": static.formula,
        "optimizer": static.formula,
        "activations": f"{activations}, x {share.num_layers} layers{flight}",
        "gathered": "whole layers and ends that compute or are fetched, gradients on their way",
        "casts": "P of the layers: weights in 8 bits"
        if layout.precision == "fp8"
        else "2P of the layers: autocast's half-precision copies",
        "loss": "tokens x V: whole logits and their gradients" if whole else "logits in chunks, the head's gradient",
        "working": "gradients of one layer's activations",
        "pipeline": "hidden states and gradients that travel between stages, one micro-batch of each",
        "temporaries": "of the optimizer's step",
        "cache": "keys and values of the answers that are drawn at once",
        "framework": f"{context}, a constant",
        "heap": "free pieces that the C library's heap keeps; tcmalloc and jemalloc keep few",
        "offload buffers": "weights on their way back, and gradients on their way there",
        "disk buffers": "slices of what lies on the disk, read ahead and written behind",
    }


def _heap_bytes(work: Work, layout: Layout, own: Mapping[str, int]) -> dict[str, int]:
    """What the C library's heap keeps of a pass's tensors that are gone; where a disk is used, it is told not to."""
    if work.device != "cpu" or work.has_allocator or layout.disk != "none" or layout.activations == "disk":
        return {}
    return {"heap": int(HEAP * (own.get("activations", 0) + own.get("loss", 0)))}


def _on_device(static: StaticMemory, layout: Layout, is_deepspeeds: bool) -> dict[str, int]:
    """The parts of `static` that lie where the model computes: all on a CPU, less what is offloaded on a GPU."""
    parts = {
        "weights": static.weights_bytes,
        "gradients": static.gradients_bytes,
        "optimizer": static.optimizer_bytes - static.disk_bytes,
    }
    if layout.disk == "params" and layout.strategy in ("fsdp", "hsdp"):
        return dict.fromkeys(parts, 0) | ({"gradients": static.gradients_bytes} if is_deepspeeds else {})
    if not static.host_bytes:
        return parts
    if layout.offload == "optimizer":
        return parts | {"optimizer": parts["optimizer"] - static.host_bytes}
    if layout.strategy in ("zero1", "zero2"):
        whole = static.gradients_bytes if layout.strategy == "zero1" else 0
        return parts | {"optimizer": 0, "gradients": whole}
    return dict.fromkeys(parts, 0)


def _gathered_bytes(work: Work, layout: Layout, share: ModelShare) -> dict[str, int]:
    """What FSDP holds whole at each moment: layers that compute and are fetched, the ends, gradients on their way."""
    size = 4 if layout.precision == "fp32" else 2
    if work.deepspeed is not None:
        live = deepspeed.gathered_bytes(work, layout.state_ranks, share) if layout.strategy == "fsdp" else 0
        buckets = deepspeed.bucket_bytes(work, layout.strategy, share)
        there = deepspeed.forward_bytes(work, layout.state_ranks, share) if layout.strategy == "fsdp" else 0
        return {"loss": live + there, "start of the backward pass": live + buckets, _LAST_OF_PASS: live + buckets}
    if work.program is not None:
        whole = int(work.program.window * (2 + 2) * share.per_layer)
        return dict.fromkeys(("loss", "start of the backward pass", "end of the backward pass"), whole)
    trains = work.lora is None
    # A layer's gradients, and the fp32 buffer in which they are reduced.
    gradients = (size + 4) * share.per_layer if trains else 0
    if layout.has_one_shard and work.device == "cpu" and layout.precision == "fp32" and layout.disk != "params":
        return {"start of the backward pass": gradients, _LAST_OF_PASS: 8 * share.embedding if trains else 0}
    # Tied ends belong to the root, which stays gathered in fp32; of untied ones each is there when it computes.
    wide = work.trained_size if trains else size
    root = 0 if share.head else wide * share.embedding
    embedding = 0 if not share.head else wide * share.embedding
    held = share.trainable + share.frozen
    near = work.node_ranks // layout.tp  # ranks of a node that have the same rows of matrices
    if 1 < near < layout.state_ranks:  # a copy that lasts from one pass to the next
        root += size * held // near
    # What is not given back stays whole from one pass to the other.
    whole = 0 if work.reshard else wide * share.embedding + size * (held - share.embedding)
    return {
        "loss": max(whole, root + size * share.per_layer + size * share.head),
        "start of the backward pass": max(whole, root + 2 * size * share.per_layer) + gradients,
        _LAST_OF_PASS: root + size * share.per_layer + embedding + (8 * share.embedding if trains else 0),
    }


def _cast_bytes(work: Work, layout: Layout, share: ModelShare) -> int:
    """Copies of weights that products keep: autocast's in half precision, those of fp8 in 8 bits, and of experts with
    adapters what PEFT makes of both."""
    merged = _merged_experts(work, layout, share)
    comes_narrow = (layout.is_sharded and work.deepspeed is None) or work.narrow_weights
    if layout.precision == "fp32" or comes_narrow or work.program is not None:
        return merged  # what is gathered comes in half precision
    linear = share.block_linear * len(layers_of_backward(work, share)) // max(1, share.num_layers)
    if layout.precision == "fp8":
        part = fp8_weights(work.shape) / max(1, work.shape.num_block_linear)
        kept = 0 if layout.activations != "none" else 1  # where activations go elsewhere, they are rounded again
        return int((2 - (2 - kept) * part) * linear)
    return 2 * (linear if work.lora is None else share.trainable) + merged


def _merged_experts(work: Work, layout: Layout, share: ModelShare) -> int:
    shape, lora = work.shape, work.lora
    if lora is None or work.program is not None or shape.experts is None or not shape.num_expert_adapters(lora.targets):
        return 0
    again = whole_layers(layout.recompute, share.num_layers)  # these are merged again, one after the other
    layers = min(share.num_layers, share.num_layers - sum(again) + any(again))
    part = shape.experts.num_layers / shape.num_layers / layout.ep
    weights = shape.experts.num_experts * shape.experts.num_parameters_each
    return int((4 if layout.precision == "fp32" else 2) * weights * layers * part)


def _working_bytes(work: Work, layout: Layout, tokens: int) -> int:
    """Gradients of one layer's activations while its backward pass runs: three f-wide and three h-wide tensors."""
    size = 4 if layout.precision == "fp32" else 2
    if work.program is not None:  # which shares them along the sequence too
        return 3 * size * tokens * (work.shape.intermediate_size + work.shape.hidden_size) // layout.tp
    return 3 * size * tokens * (work.shape.intermediate_size // layout.tp + work.shape.hidden_size)


def _optimizer_bytes(work: Work, layout: Layout, share: ModelShare) -> int:
    """Temporaries of an optimizer that is not fused: of one tensor at a time on CPU, of all at once on CUDA."""
    if work.deepspeed is not None:
        return deepspeed.step_bytes(work, layout.strategy, layout.state_ranks, share, layout.offload != "none")
    if work.narrow_weights:
        return 0 if work.has_kernels else NARROW_STEP_BYTES[work.device]
    if work.program is not None or work.optimizer == "adamw":
        return 0
    if work.device == "cuda":
        return 4 * share.trainable // layout.state_ranks
    return 8 * (share.embedding if work.lora is None else 0) // layout.state_ranks
