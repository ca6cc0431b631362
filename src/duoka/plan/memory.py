"""Bytes per rank, by part, and the peak as the largest of a few moments of a step (never the sum of all maxima).

Static memory comes from `recipe.py`, what is gone at the end of a pass from `moments.py`; here they are added up at
each moment. Other families and kernels differ from what was measured, hence the range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from duoka.plan import deepspeed
from duoka.plan.layout import Layout
from duoka.plan.model_share import ModelShare
from duoka.plan.moments import (
    EMBEDDING,
    END,
    LOSS,
    activations,
    moved_activations,
    pass_moments,
    without_gradients,
)
from duoka.plan.offload import buffer_bytes
from duoka.plan.recipe import StaticMemory, Work, gathered_whole, shares, static_memory

# A process beside its tensors: interpreter, torch, transformers, what kernels keep, what the heap has free. A toy took
# 368 (fp32) to 404 MiB (bf16), 135M 470 to 590 in eight settings and 727 in one: pages of freed blocks, from run to run
# others. With peft, whose modules are many, a toy took 419 to 455, and 135M 502 to 564 in eight settings.
CPU_FRAMEWORK_BYTES = (370 * 2**20, 460 * 2**20, 800 * 2**20)  # low, likely, high
PEFT_BYTES = 55 * 2**20
# CUDA context and NCCL's buffers on a GPU. One H200, without NCCL, had 1.37 to 1.41 GiB taken beside tensors, with what
# the allocator held unused.
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

_STEP = "optimizer step"
_LASTING = ("weights", "gradients", "optimizer", "checkpoint copy", "offload buffers", "disk buffers")

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
    stages = [
        _estimate(work, layout, share, sizes, length, aside, accumulation)
        for share in shares(work, layout, accumulation)
    ]
    return max(stages, key=lambda memory: memory.peak_bytes)


def _estimate(
    work: Work,
    layout: Layout,
    share: ModelShare,
    sizes: tuple[int, int],
    length: int,
    aside: tuple[int, int],
    accumulation: int,
) -> Memory:
    """`sizes`: tokens of the first micro-batch, and of the fullest later one; `aside`: evaluations', and the cache."""
    static = static_memory(work, layout, share)
    low, framework, high = _framework_bytes(work, layout)
    held = _Held(work, layout, share, static, is_only=not sizes[1])
    base = {"optimizer": held.optimizer, "framework": framework}
    copied = _copy_bytes(work, layout)
    base |= {"checkpoint copy": copied} if copied and work.device == "cpu" else {}
    slots = _slot_bytes(work, layout, share, static, sizes[1] > 0)
    passes = "disk buffers" if layout.disk != "none" else "offload buffers"
    base |= {passes: slots} if slots and work.device == "cpu" else {}
    one_layer, _, formula = activations(work, layout, share, sizes[0], length)
    moments = {_STEP: held.at(_STEP) | base | {"temporaries": _optimizer_bytes(work, layout, share)}}
    tokens_of = {_STEP: sizes[0]}
    # Of a pipeline's micro-batches, one is done when gradients are there.
    others = replace(share, in_flight=max(1, min(share.in_flight, accumulation - 1)))
    for tokens, is_first, there in ((sizes[0], True, share), (sizes[1], False, others)):
        if not tokens:
            continue
        only = held.is_only
        for moment, own in pass_moments(work, layout, there, tokens, length, is_first=is_first, is_only=only):
            whole = held.at(moment, not is_first) | base | own | _heap_bytes(work, layout, own)
            if sum(whole.values()) > sum(moments.get(moment, {}).values()):
                moments[moment], tokens_of[moment] = whole, tokens
    for moment, own in without_gradients(work, layout, share, aside, one_layer / max(1, sizes[0])).items():
        moments[moment], tokens_of[moment] = held.at(LOSS) | base | own, aside[0] or sizes[0]
    sums = {name: sum(parts.values()) for name, parts in moments.items()}
    peak = max(sums, key=lambda name: sums[name])
    parts = {name: size for name, size in moments[peak].items() if size}
    fixed = sum(parts.get(name, 0) for name in _LASTING)
    loose = sums[peak] - fixed - framework
    moved = moved_activations(work, layout, share, max(sizes), length)
    on_host = layout.activations == "host"
    put_away = static.gradients_bytes if work.deepspeed is not None and layout.disk != "none" else 0  # in files too
    # Where layers are gathered and freed.
    holes = work.device == "cpu" and (layout.strategy in ("fsdp", "hsdp") or work.deepspeed is not None)
    host = static.host_bytes + sum(size for size in (copied, slots) if work.device != "cpu")
    return Memory(
        parts=parts,
        moments=sums,
        peak_moment=peak,
        low_bytes=int(fixed + low + RANGE[0] * loose),
        high_bytes=int(fixed + high + (HOLES if holes else RANGE[1]) * loose),
        tokens=sizes[0],
        later=sizes[1],
        peak_tokens=tokens_of[peak],
        formula=formula,
        formulas=_name_formulas(work, layout, static.formula, formula, share, adds_beside=held.beside > 0),
        host_bytes=host + (moved if on_host else 0),
        disk_bytes=static.disk_bytes + put_away + (0 if on_host else moved),
    )


class _Held:
    """Weights and gradients of a rank at a moment of a step; `is_only`: the step has one micro-batch."""

    def __init__(self, work: Work, layout: Layout, share: ModelShare, static: StaticMemory, is_only: bool) -> None:
        self.work, self.layout, self.share, self.is_only = work, layout, share, is_only
        device = _on_device(static, layout, work.deepspeed is not None)
        self.weights, self.gradients, self.optimizer = device["weights"], device["gradients"], device["optimizer"]
        self.is_native = work.deepspeed is None and work.program is None
        self.gathers_once = self.is_native and layout.strategy in ("zero1", "zero2")
        self.ends = share.embedding * work.trained_size if work.trains_embedding else 0
        # zero1 exchanges them in its last backward pass: then, its part is left, where the optimizer is.
        self.exchanged = self.gradients
        if self.gathers_once and layout.strategy == "zero1":
            away = layout.offload == "params" and bool(static.host_bytes)
            self.exchanged = 0 if away else self.gradients // layout.state_ranks
        # Micro-batches add up in DDP's buckets, or, where some parameters may have no gradient, beside them.
        is_ddp = self.is_native and layout.strategy == "ddp" and layout.pp == 1
        adds_beside = is_ddp and work.bucket_view and not work.adds_in_buckets and not is_only
        self.beside = work.trained_size * share.trainable if adds_beside else 0

    def at(self, moment: str, finds_gradients: bool = False) -> dict[str, int]:
        """`finds_gradients`: those of the step's earlier micro-batches."""
        return {"weights": self._weights(moment), "gradients": self._gradients(moment, finds_gradients)}

    def _gradients(self, moment: str, finds_gradients: bool) -> int:
        if moment == _STEP:
            return self.exchanged
        are_there = finds_gradients or moment in (END, EMBEDDING)
        if self.layout.strategy == "ddp":  # buckets are there for good, and are the gradients of an only micro-batch
            return self.gradients + (self.beside if are_there else 0)
        if not are_there:
            return 0
        return self.gradients if finds_gradients else self._own_gradients(moment)

    def _weights(self, moment: str) -> int:
        is_after = moment == _STEP or (moment in (END, EMBEDDING) and self.is_only)
        if not self.gathers_once or not is_after or self.layout.has_one_shard:
            return self.weights
        whole, _ = gathered_whole(self.work, self.layout.precision, self.share)  # let go by the last backward pass
        return self.weights - whole + (0 if moment == _STEP else min(whole, self.ends))

    def _own_gradients(self, moment: str) -> int:
        """At the end of the first micro-batch's backward pass: the embedding's come last."""
        result = self.exchanged if self.is_only else self.gradients
        if not self.is_native:
            return result
        if self.layout.is_sharded and (self.is_only or self.layout.strategy != "zero1"):
            return max(0, result - self.ends // self.layout.state_ranks)  # 0: in host memory, or on a disk
        # A tied one is the head's, which is there, and to which the embedding's is added.
        is_tied = self.share.has_head and not self.share.head
        return max(0, result - (0 if is_tied or moment == EMBEDDING else self.ends))


def _copy_bytes(work: Work, layout: Layout) -> int:
    """The copy from which a checkpoint is written: a rank's equal part of what is trained and its state.

    On a CPU the writer reads the live tensors, unless some of them change in every backward pass (PowerSGD's).
    """
    is_thin = work.thin_gradients and layout.strategy == "ddp"
    if not work.saves_beside or (work.device == "cpu" and not is_thin):
        return 0
    owed = 4 * work.num_trainable if is_thin else 0
    return int((work.trained_size + work.state_bytes) * work.num_trainable) // layout.world_size + owed


def _slot_bytes(work: Work, layout: Layout, share: ModelShare, static: StaticMemory, accumulates: bool) -> int:
    """Through which what is offloaded passes; of host memory, DeepSpeed's."""
    if layout.disk == "none":
        if work.deepspeed is None or layout.offload == "none":
            return 0
        return deepspeed.offload_buffers(layout.strategy, layout.state_ranks, share, accumulates=accumulates)
    if work.deepspeed is not None:
        return deepspeed.disk_buffers(work, layout.state_ranks, share, layout.disk)
    return buffer_bytes(static.disk_bytes if layout.disk == "optimizer" else static.optimizer_bytes)


def _framework_bytes(work: Work, layout: Layout) -> tuple[int, int, int]:
    """(low, likely, high). On a GPU every further axis brings communicators, and buffers with them."""
    if work.device != "cuda":
        more = deepspeed.IMPORTED_BYTES if work.deepspeed is not None else 0
        more += PEFT_BYTES if work.lora is not None else 0
        return tuple(size + more for size in CPU_FRAMEWORK_BYTES)  # type: ignore[return-value]
    return tuple(size + len(layout.axes) * AXIS_BYTES for size in CUDA_FRAMEWORK_BYTES)  # type: ignore[return-value]


def _name_formulas(
    work: Work, layout: Layout, static: str, activations: str, share: ModelShare, *, adds_beside: bool
) -> Mapping[str, str]:
    flight = f", {share.in_flight} micro-batches in the pipeline" if share.in_flight > 1 else ""
    whole = work.program is not None and work.program.logits
    context = "CUDA context, NCCL" if work.device == "cuda" else "interpreter and libraries"
    cast = "the layers" if layout.recompute == "none" else "layers that are not computed again, and of one"
    beside = f" + {work.trained_size}Pt of micro-batches that add up beside DDP's buckets" if adds_beside else ""
    return {
        "weights": static,
        "gradients": static + beside,
        "optimizer": static,
        "activations": f"{activations}, x {share.num_layers} layers{flight}",
        "gathered": "whole layers and ends that compute or are fetched, gradients on their way",
        "casts": f"P of {cast}: weights in 8 bits"
        if layout.precision == "fp8"
        else f"2P of {cast}: autocast's half-precision copies",
        "loss": "tokens x V: whole logits and their gradients" if whole else "logits in chunks, the head's gradient",
        "working": "gradients of one layer's activations",
        "embedding": "what its gradient is made of: of one weight at both ends the head's and the embedding's",
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
    if layout.offload == "optimizer":  # and with DeepSpeed's, gradients
        both = parts["optimizer"] + parts["gradients"] - static.host_bytes
        own = {"optimizer": 0, "gradients": both} if is_deepspeeds else {"optimizer": both - parts["gradients"]}
        return parts | own
    if layout.strategy in ("zero1", "zero2"):
        whole = static.gradients_bytes if layout.strategy == "zero1" else 0
        return parts | {"optimizer": 0, "gradients": whole}
    return dict.fromkeys(parts, 0)


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
    if work.optimizer == "muon":  # of the largest matrix, whose bucket has at least one
        return 12 * max(one.num_parameters for one in work.shape.linears)
    return 8 * (share.embedding if work.lora is None else 0) // layout.state_ranks
