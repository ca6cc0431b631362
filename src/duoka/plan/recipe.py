"""What a training program keeps of each parameter, and what one rank holds of the model under a layout.

`static_memory` gives weights, gradients and optimizer state per rank; `memory.py` adds what passes by. duoka's own
way is the default; other programs are described as a `Program` only where published runs are compared with.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from duoka.config.schema import LoraConfig, TrainOnlyConfig
from duoka.config.schema_running import DeepSpeedConfig
from duoka.plan import deepspeed, packed_base
from duoka.plan.layout import Layout
from duoka.plan.model_share import Learns, ModelShare, share_experts
from duoka.plan.pipeline import Costs, cut_layers, most_in_flight, rank_of, stages_of
from duoka.plan.shape import ModelShape, lora_parameters
from duoka.plan.trained_weights import (
    layers_passed,
    trained_at_ends,
    trained_in_layers,
    trained_parameters,
    trains_words,
)

# Bytes of optimizer state per trained parameter; Muon keeps one moment of matrices and two of the rest.
STATE_BYTES: Mapping[str, float] = {
    "adamw": 8, "lamb": 8, "muon": 4, "lars": 4, "sgd": 4, "adamw8bit": 2.06, "adafactor": 0.02,
}  # fmt: skip
Reshard = bool | Literal["node"]


@dataclass(frozen=True)
class Program:
    """How a program other than duoka keeps numbers, bytes per parameter and per token; for published runs."""

    name: str
    weights: float = 2
    gradients: float = 2
    masters: float = 4
    state: float = 8
    # Per token and layer: of width h, of width f, of width kv; and of each head and token looked at (no fused kernel).
    kept_hidden: float = 10
    kept_ffn: float = 4
    kept_kv: float = 4
    kept_hidden_split: float = 8  # further bytes of width h that tensor parallelism divides; the first are not
    kept_scores: float = 0
    boundary: float = 2  # what full recompute keeps of each layer
    # What selective recompute keeps: outputs of products and attention, or all but scores (Megatron's).
    selective: Literal["products", "every second product", "all but scores"] = "products"
    logits: float = 10  # per token and word of the vocabulary, at the loss
    window: float = 2.0  # layers that are gathered at once
    shares_rows: bool = False  # tensor ranks share what norms read, too: each has some rows (sequence parallelism)
    in_place: bool = False  # the optimizer steps in the backward pass: gradients never exist together
    offloads_kept: bool = False


@dataclass(frozen=True)
class Work:
    """What memory depends on beside the layout: the model, the trained weights, the device, the optimizer."""

    shape: ModelShape
    lora: LoraConfig | None
    device: str = "cpu"
    bucket_view: bool = True
    adds_in_buckets: bool = True  # ddp's micro-batches; not where it looks for parameters without a part in the loss
    optimizer: str = "adamw"
    frozen_bits: int = 0  # 4 or 8: a quantized frozen base
    program: Program | None = None
    train_only: TrainOnlyConfig | None = None
    saves_beside: bool = False  # checkpoints are written while training goes on
    is_new: bool = False  # begins from random weights, beside which adapters make no sense
    references: int = 0  # frozen copies of the model that a stage reads beside the trained one
    value_head: int = 0  # parameters of a head that says what reward is still to come, trained beside the model
    keeps_start: bool = False  # a copy of what is trained, as it was when the run began
    looks: int = 0  # passes without gradients that come before a step's loss, each over as many tokens as it has
    narrow_weights: bool = False  # trained weights, gradients and moments are bf16
    weight_bits: int = 0  # in which weights travel, 0: as they compute
    gradient_bits: int = 0
    node_ranks: int = 0  # that share a copy of gathered weights until the backward pass
    reshard: Reshard = True  # FSDP: whether weights are given back after each layer's forward pass
    deepspeed: DeepSpeedConfig | None = None  # its switches, where it is the engine
    has_kernels: bool = True  # compiled ones: on a CPU by a C++ compiler, on a GPU by Triton
    has_flash: bool = True  # torch's FlashAttention, on a GPU
    has_allocator: bool = True  # on a CPU: tcmalloc or jemalloc, in place of the C library's heap
    thin_gradients: bool = False  # PowerSGD: residuals of this step and the one before, each as large as the gradients

    @property
    def may_have_adapters(self) -> bool:
        """True where adapters could take the place of what is trained now."""
        return self.lora is None and self.train_only is None and not self.is_new

    @property
    def trains_embedding(self) -> bool:
        return self.lora is None and (self.train_only is None or trains_words(self.shape, self.train_only))

    @property
    def num_trainable(self) -> int:
        if self.train_only is not None:
            return trained_parameters(self.shape, self.train_only) + self.value_head
        trained = self.shape.num_parameters if self.lora is None else lora_parameters(self.shape, self.lora)
        return trained + self.value_head

    @property
    def num_frozen(self) -> int:
        if self.train_only is not None:
            return self.shape.num_parameters + self.value_head - self.num_trainable
        return 0 if self.lora is None else self.shape.num_parameters

    @property
    def num_total(self) -> int:
        return self.num_trainable + self.num_frozen

    @property
    def trained_size(self) -> int:
        """Bytes of a trained weight, and of its gradient."""
        return 2 if self.narrow_weights else 4

    @property
    def state_bytes(self) -> float:
        """Optimizer bytes per trained parameter."""
        if self.program is not None:
            return self.program.state
        if self.narrow_weights:
            return STATE_BYTES[self.optimizer] / 2
        per = STATE_BYTES[self.optimizer]
        if self.optimizer == "muon" and self.lora is None:
            ends = self.shape.num_embedding + self.shape.num_head
            return per + 4 * ends / self.shape.num_parameters
        return per


def layers_of_backward(work: Work, share: ModelShare) -> tuple[int, ...]:
    """The numbers of the rank's layers through which its backward pass goes: the last ones."""
    if work.train_only is None:
        return share.layers
    first = work.shape.num_layers - layers_passed(work.shape, work.train_only)
    return tuple(number for number in share.layers if number >= first)


def shares(work: Work, layout: Layout, accumulation: int = 1) -> tuple[ModelShare, ...]:
    """The stages that may be the fullest: the first holds most micro-batches, the last has the loss."""
    shape, tp, pp = work.shape, layout.tp, layout.pp
    # AutoTP cuts neither end.
    ends, cut_ends = (shape.num_embedding + shape.num_head, 1) if work.deepspeed is not None else (0, tp)
    trained_ends, frozen_ends = (0, ends) if work.num_frozen else (ends, 0)
    whole = ModelShare(
        num_layers=shape.num_layers,
        embedding=shape.num_embedding // cut_ends,
        head=shape.num_head // cut_ends,
        has_head=True,
        in_flight=1,
        trainable=(work.num_trainable - trained_ends) // tp + trained_ends,
        frozen=(work.num_frozen - frozen_ends) // tp + frozen_ends,
        per_layer=shape.num_per_layer // tp,
        block_linear=shape.num_block_linear // tp,
        layers=tuple(range(shape.num_layers)),
    )
    if pp == 1:
        return (_share_experts(work, layout, whole),)
    stages = [
        _share_experts(work, layout, _stage(work, layout, whole, rank, layers, accumulation))
        for rank, layers in _stages_asked(work, layout)
    ]
    # What learns lies where it lies: the first is taken for all where only one is looked at.
    return tuple(sorted(stages, key=lambda one: -one.trainable) if work.train_only else stages)


def _share_experts(work: Work, layout: Layout, whole: ModelShare) -> ModelShare:
    is_ours = work.program is None and work.deepspeed is None
    learns: Learns = "adapters" if work.lora is not None else "all" if work.train_only is None else "some"
    return share_experts(work.shape, layout, whole, learns) if is_ours or layout.ep > 1 else whole


def _stages_asked(work: Work, layout: Layout) -> list[tuple[int, tuple[int, ...]]]:
    """(rank, its layers) of the first and the last; of all where only some layers learn, which may be anyone's."""
    by_rank = list(enumerate(_layers_by_rank(work, layout)))
    return by_rank if work.train_only is not None else [by_rank[0], by_rank[-1]]


def _stage(
    work: Work, layout: Layout, whole: ModelShare, rank: int, layers: tuple[int, ...], accumulation: int
) -> ModelShare:
    shape, tp, pp, at_head = work.shape, layout.tp, layout.pp, _place_of_head(layout)
    has_head = rank == at_head
    embedding = whole.embedding if rank == 0 else 0
    # Both ends on the first rank: a tied weight is one.
    head = 0 if not has_head else whole.head if rank == 0 else (shape.num_head or shape.num_embedding) // tp
    part = len(layers) / shape.num_layers
    inside = int(part * shape.num_in_layers) // tp + embedding + head
    trained = inside if work.lora is None else int(part * work.num_trainable) // tp
    if work.train_only is not None:
        ends = trained_at_ends(shape, work.train_only, has_input=rank == 0, has_output=has_head)
        trained = (trained_in_layers(shape, work.train_only, layers) + ends) // tp
    frozen = inside if work.lora is not None else max(0, inside - trained)
    return replace(
        whole,
        num_layers=len(layers),
        trainable=trained,
        frozen=frozen,
        block_linear=int(part * whole.block_linear),
        embedding=embedding,
        head=head,
        has_head=has_head,
        in_flight=ceil(most_in_flight(layout.schedule, pp, layout.virtual, accumulation, rank)),
        layers=layers,
    )


def _layers_by_rank(work: Work, layout: Layout) -> list[tuple[int, ...]]:
    """The layers' numbers. Other programs give every rank as many; ours leaves some out where the head is, if it knows
    the layers."""
    shape, stages = work.shape, layout.pp * layout.virtual
    if work.program is not None or not shape.exact or stages > shape.num_layers:
        each, last = -(-shape.num_layers // layout.pp), shape.num_layers
        return [tuple(min(rank * each + at, last - 1) for at in range(each)) for rank in range(layout.pp)]
    cuts = list(itertools.pairwise(cut_layers(shape.num_layers, stages, _costs(shape))))
    own = [stages_of(rank, layout.schedule, layout.pp, layout.virtual) for rank in range(layout.pp)]
    return [tuple(number for stage in some for number in range(*cuts[stage])) for some in own]


def _costs(shape: ModelShape) -> Costs:
    return Costs(shape.num_per_layer, shape.num_head or shape.num_embedding, shape.num_embedding)


def _place_of_head(layout: Layout) -> int:
    return rank_of(layout.pp * layout.virtual - 1, layout.schedule, layout.pp)


def slowest_stage(work: Work, layout: Layout) -> float:
    """What the slowest rank of a pipeline computes, in shares of the mean: layers are not divided."""
    if layout.pp == 1 or work.program is not None or not work.shape.exact:
        return 1.0
    costs = _costs(work.shape)
    sums = [len(layers) * costs.layer for layers in _layers_by_rank(work, layout)]
    sums[_place_of_head(layout)] += costs.head
    return max(sums) * layout.pp / sum(sums)


@dataclass(frozen=True)
class StaticMemory:
    """Weights, gradients and optimizer state of one rank under one strategy; fp32 masters beside gathered weights
    count as optimizer state. `host_bytes` of these lie in host memory, not in the GPU's, `disk_bytes` in files."""

    strategy: str
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    formula: str
    host_bytes: int = 0
    disk_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes


def static_memory(work: Work, layout: Layout, share: ModelShare | None = None) -> StaticMemory:
    """What a rank holds at the end of a step's backward passes, activations and what passes by apart."""
    share = share or shares(work, layout)[0]
    if work.program is not None:
        return _static_of_program(work.program, layout, share)
    # Weights that train_only leaves alone stay fp32, as those beside them; a base under adapters is only read.
    frozen_size: float = work.trained_size if work.train_only is not None else 4 if layout.precision == "fp32" else 2
    train, ranks, state, size = share.trainable, layout.state_ranks, work.state_bytes, work.trained_size
    packed, frozen, note = _frozen(work, share, frozen_size)
    start = size * train if work.keeps_start else 0
    if start:
        frozen += start
        note += f" + {size}Pt of the start"
    axes = "" if layout.tp * layout.pp == 1 else f", P of a rank's 1/{layout.tp * layout.pp}"
    if work.deepspeed is not None:
        *parts, formula = deepspeed.static_parts(work, layout.strategy, ranks, share, frozen)
        own = (parts[0], parts[1], parts[2])
        formula += note + (f", P of a rank's 1/{layout.tp} and both ends whole" if layout.tp > 1 else "")
        host = {"params": sum(own), "optimizer": own[2] + own[1]}.get(layout.offload, 0)
    elif layout.strategy in ("zero1", "zero2"):
        gathered, formula = gathered_whole(work, layout.precision, share)
        first = layout.strategy == "zero1"
        # Until zero1 exchanges them at the end of a step, gradients are added up in fp32 whatever weights are.
        gradients = 4 * train if first else size * train // ranks
        formula += f" + {'4Pt' if first else f'{size}Pt/N'} + {size + state:.3g}Pt/N{note}{axes}"
        own = (gathered + frozen - start + start // ranks, gradients, int((size + state) * train) // ranks)
        host = own[2] + size * train // ranks if layout.offload == "params" else 0
    elif layout.strategy in ("fsdp", "hsdp"):
        divisor = "N" if layout.strategy == "fsdp" else "S"
        scales, note_sharded = 0, ""
        if frozen > start:
            scales, note_sharded = packed_base.shared(work.frozen_bits, work.shape, packed, frozen_size, divisor)
        note_sharded += f" + {size}Pt/{divisor} of the start" if start else ""
        formula = f"({size}Pt + {size}Pt + {state:.3g}Pt)/{divisor}{note_sharded}{axes}"
        shared = (size * train + frozen - scales) // ranks
        own = (shared + scales, size * train // ranks, int(state * train) // ranks)
        host = sum(own) - scales if layout.offload == "params" else 0
    else:
        copies = 1 + (not work.bucket_view) + 2 * work.thin_gradients if layout.strategy == "ddp" else 1
        formula = f"{size}Pt + {size * copies}Pt + {state:.3g}Pt{note}{axes}"
        own = (size * train + frozen, size * copies * train, int(state * train))
        host = 0
    if share.experts:
        trained = work.lora is None and work.train_only is None
        held = (size if trained else frozen_size, size * trained, state * trained)
        own = tuple(size + int(each * share.experts) for size, each in zip(own, held, strict=True))  # type: ignore[assignment]
        formula += f" + {sum(held):.3g} of the experts/{layout.ep}"
    beside, term = _beside(work, layout, share, frozen_size)
    own, formula = (own[0] + beside, *own[1:]), formula + term
    moments = int(layout.offload_share * state * train) // ranks
    if layout.offload == "optimizer" and work.deepspeed is None:
        host = moments
    # Weights that are whole on each rank stay in memory, where another strategy is only compared with.
    all_of_it = sum(own) if layout.strategy in ("fsdp", "hsdp") else moments
    disk = {"none": 0, "optimizer": moments, "params": all_of_it}[layout.disk]
    if disk and work.deepspeed is not None:
        disk = deepspeed.on_disk(work, ranks, share, frozen, layout.disk)
    return StaticMemory(layout.strategy, *own, formula, host - disk if work.device == "cuda" else 0, disk)


def _frozen(work: Work, share: ModelShare, frozen_size: float) -> tuple[int, int, str]:
    """(numbers that are packed, bytes of all that is only read, its terms): a frozen base, references."""
    packed = packed_base.numbers(work.frozen_bits, work.shape, share.block_linear, share.frozen)
    packed_size = packed_base.BYTES.get(work.frozen_bits, frozen_size)
    size = int(packed * packed_size + (share.frozen - packed) * frozen_size)
    unpacked = packed_base.unpacked(work.frozen_bits, work.shape, frozen_size)
    terms = f" + {packed_size:g}(P-Pt){unpacked}" if size else ""
    if work.references:
        size += int(work.references * frozen_size * (share.trainable + share.frozen))
        terms += f" + {work.references * frozen_size:g}P of references"
    return packed, size, terms


def _beside(work: Work, layout: Layout, share: ModelShare, frozen_size: float) -> tuple[int, str]:
    """Bytes of towers that no text reaches, and their term."""
    if not work.shape.num_beside or not share.embedding:  # of a pipeline, the first stage has them
        return 0, ""
    size = work.trained_size if work.lora is None else frozen_size
    ranks = layout.state_ranks if layout.strategy in ("fsdp", "hsdp") else 1
    return int(size * work.shape.num_beside) // ranks, f" + {size:g} of what is beside{'/N' if ranks > 1 else ''}"


def gathered_whole(work: Work, precision: str, share: ModelShare) -> tuple[int, str]:
    """Weights whole in the type that computes; what begins the residual stream, the embedding, stays fp32."""
    if precision == "fp32":
        return 4 * share.trainable, "4Pt"
    if work.narrow_weights or not work.trains_embedding:
        return 2 * share.trainable, "2Pt"
    return 2 * share.trainable + 2 * share.embedding, "2Pt + 2 of the embedding"


def _static_of_program(program: Program, layout: Layout, share: ModelShare) -> StaticMemory:
    """The same families with the program's own bytes: which of weights, gradients and state are shared out."""
    ranks, train = layout.state_ranks, share.trainable
    split = {"zero1": (1, 1, ranks), "zero2": (1, ranks, ranks), "fsdp": (ranks,) * 3, "hsdp": (ranks,) * 3}
    by = split.get(layout.strategy, (1, 1, 1))
    frozen = share.frozen * program.weights
    own = (
        int((program.weights * train + frozen) / by[0]),
        int(program.gradients * train / by[1]) if not program.in_place else 0,
        int((program.masters + program.state) * train / by[2]),
    )
    host = sum(own) if layout.offload == "params" else 0
    sizes = f"{program.weights:g} + {program.gradients:g} + {program.masters + program.state:g}"
    return StaticMemory(layout.strategy, *own, f"{program.name}: {sizes} bytes per parameter", host)


def static_table(work: Work, layout: Layout) -> tuple[StaticMemory, ...]:
    """Every strategy for the same ranks."""
    ranks = layout.dp
    plain = replace(layout, offload="none", disk="none", ep=1)
    rows = [replace(plain, strategy="single", dp=1, shard=1, sp=1), replace(plain, strategy="ddp", shard=1)]
    rows += [replace(plain, strategy=strategy, shard=ranks) for strategy in ("zero1", "zero2", "fsdp")]
    rows = [layout if row.strategy == layout.strategy else row for row in rows]
    return tuple(static_memory(work, row) for row in [*rows, *([layout] if layout.strategy == "hsdp" else [])])
