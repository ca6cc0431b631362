"""What DeepSpeed holds and sends in place of duoka's own engines (parallel.engine: deepspeed), fp32 weights throughout.

Stages 1 and 2 keep fp32 masters beside weights that are whole, and sum gradients by all-reduce, of which each rank
keeps its part. Stage 3 keeps its part of the weights twice. bf16 is autocast here, as everywhere in duoka.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from duoka.config.schema import ParallelConfig
from duoka.config.schema_running import DeepSpeedConfig
from duoka.errors import Fault
from duoka.plan.sizes import ModelShape


class Work(Protocol):
    """What is asked of recipe.Work, which asks this file."""

    @property
    def deepspeed(self) -> DeepSpeedConfig | None: ...

    @property
    def device(self) -> str: ...

    @property
    def node_ranks(self) -> int: ...

    @property
    def state_bytes(self) -> float: ...


class ModelShare(Protocol):
    """And of recipe.ModelShare: numbers of parameters."""

    @property
    def trainable(self) -> int: ...

    @property
    def frozen(self) -> int: ...

    @property
    def per_layer(self) -> int: ...

    @property
    def embedding(self) -> int: ...

    @property
    def head(self) -> int: ...


IMPORTED_BYTES = 50 * 2**20  # what the package takes when it is imported
WEIGHT_BUFFERS = 3  # of a module with one matrix; DeepSpeed writes back through one of a group's size
SIZE = 4  # bytes of a weight, and of a gradient, however it was computed
PACKED_AT_ONCE = 8  # numbers that ZeRO++'s kernels read at once, of one group
NATIVELY = "engine: native   (which packs any weight, and gradients in any world)"


def static_parts(
    work: Work, strategy: str, ranks: int, share: ModelShare, frozen_bytes: int
) -> tuple[int, int, int, str]:
    """(weights, gradients, optimizer state) in bytes per rank, and the formula."""
    train, state = share.trainable, work.state_bytes
    whole, part = SIZE * train, SIZE * train // ranks
    if strategy in ("single", "ddp"):
        return whole + frozen_bytes, whole, int(state * train), f"4Pt + 4Pt + {state:.3g}Pt"
    own_state = int((SIZE + state) * train) // ranks
    if strategy == "zero1":
        return whole + frozen_bytes, whole, own_state, f"4Pt + 4Pt + {SIZE + state:.3g}Pt/N"
    if strategy == "zero2":
        return whole + frozen_bytes, part, own_state, f"4Pt + 4Pt/N + {SIZE + state:.3g}Pt/N"
    return (whole + frozen_bytes) // ranks, part, own_state, f"(4Pt + 4Pt + {SIZE + state:.3g}Pt)/N"


def on_disk(work: Work, ranks: int, share: ModelShare, frozen_bytes: int, disk: str) -> int:
    """Stage 3: masters and moments, and with `params` the weights that passes use; gradients stay in memory."""
    own = int((SIZE + work.state_bytes) * share.trainable) // ranks
    return own + ((SIZE * share.trainable + frozen_bytes) // ranks if disk == "params" else 0)


def disk_buffers(work: Work, ranks: int, share: ModelShare, disk: str) -> int:
    """Through which the optimizer's groups pass (weights, two moments, gradients), and weights on their way."""
    own = work.deepspeed
    assert own is not None
    largest = max(share.embedding, share.head, share.per_layer // 4) // ranks
    group = min(max(own.sub_group_size, largest), share.trainable // ranks)
    weights = WEIGHT_BUFFERS * largest + group if disk == "params" else 0
    return SIZE * (4 * group + weights)


def bucket_bytes(work: Work, strategy: str, share: ModelShare) -> int:
    """Gradients on their way in a backward pass: the buckets, and copies of one, in single pieces.

    Stages 1 and 2 lay a bucket end to end again for its all-reduce. Stage 3 lays it out by rank, and on a CPU gloo's
    reduce-scatter sums up in a copy of that. Small pieces (gradients that were moved into it, weights that were let go
    of) stay with the allocator meanwhile: they count as they did.
    """
    if strategy in ("single", "ddp"):
        return SIZE * share.trainable  # laid end to end for the all-reduce
    copies = 2 if strategy == "fsdp" and work.device != "cuda" else 1
    return _buckets(work, share) + copies * _bucket(work, share)


def _bucket(work: Work, share: ModelShare) -> int:
    own = work.deepspeed
    assert own is not None
    # On a CPU, pages that nobody touches take no memory.
    return SIZE * (own.reduce_bucket_size if work.device == "cuda" else min(own.reduce_bucket_size, share.trainable))


def _buckets(work: Work, share: ModelShare) -> int:
    """One, or two where exchanges run beside the backward pass."""
    own = work.deepspeed
    assert own is not None
    return _bucket(work, share) * (2 if own.overlap_comm else 1)


def offload_buffers(strategy: str, ranks: int, share: ModelShare, *, accumulates: bool) -> int:
    """In host memory, beside masters, state and gradients that the optimizer steps on, each a rank's part.

    Stages 1 and 2: weights on their way back, and gradients of earlier micro-batches. Stage 3: gradients as they come.
    """
    parts = 1 if strategy == "fsdp" else 1 + accumulates
    return parts * SIZE * share.trainable // ranks


def step_bytes(work: Work, strategy: str, ranks: int, share: ModelShare, offloads: bool) -> int:
    """Beside what lasts, while the optimizer steps: the gradients end to end; stage 3 keeps its buckets for good."""
    if strategy in ("single", "ddp"):
        return 0
    again = 0 if offloads else SIZE * share.trainable // ranks
    return again + (_buckets(work, share) if strategy == "fsdp" else 0)


def forward_bytes(work: Work, ranks: int, share: ModelShare) -> int:
    """Stage 3, beside whole weights: what was gathered end to end, of which they are copies, and the buckets."""
    own = work.deepspeed
    assert own is not None
    whole = share.trainable + share.frozen
    fetched = min(whole, own.stage3_prefetch_bucket_size + max(share.per_layer, share.embedding, share.head))
    return SIZE * (fetched if ranks > 1 else 0) + _buckets(work, share)


def gathered_bytes(work: Work, ranks: int, share: ModelShare) -> int:
    """Stage 3: weights that are whole at once, beside the part that lasts."""
    own = work.deepspeed
    assert own is not None
    largest = max(share.per_layer, share.embedding, share.head)
    window = own.stage3_max_live_parameters + own.stage3_prefetch_bucket_size + largest
    whole = share.trainable + share.frozen
    copy = whole // work.node_ranks if 1 < work.node_ranks < ranks else 0  # that lasts from pass to pass
    return SIZE * (min(whole, window) + copy)


def gathers_twice(work: Work, share: ModelShare) -> bool:
    """Stage 3: whether weights are let go after the forward pass, and gathered again for the backward one."""
    own = work.deepspeed
    assert own is not None
    whole = share.trainable + share.frozen
    return whole > min(own.stage3_max_live_parameters, own.stage3_max_reuse_distance)


def packed_gradients(share: ModelShare, width: int) -> float:
    """ZeRO++: bytes of all gradients in 4 bits, with a scale for each row or column of a matrix."""
    return share.trainable * (0.5 + SIZE / width)


def head_again(work: Work, head: int, tensor_ranks: int) -> float:
    """AutoTP: operations of a forward pass for each token beyond a rank's equal part, for it has the whole head."""
    return 2.0 * head * (tensor_ranks - 1) / tensor_ranks if work.deepspeed is not None else 0.0


def sums_of_layer(num_products: int, again: float) -> float:
    """AutoTP: of a layer's activations. Forward behind its two products by rows, of which the first is made again with
    the layer (`again`: the part of the layers for which it is); backward before each product by columns, where duoka's
    own axis has one sum for all that read the same.
    """
    return 2 + again + num_products - 2


def check_parts(parallel: ParallelConfig, shape: ModelShape, num_ranks: int) -> list[Fault]:
    """Weights that DeepSpeed would have to pack and cannot, of a model that is not there yet; see why_not_packed."""
    if parallel.engine != "deepspeed" or not parallel.compression.weight_bits:
        return []
    sizes = {
        "the embedding": shape.vocab_size * shape.hidden_size,
        "the embedding of positions": shape.num_positions * shape.hidden_size,
        "the head": shape.num_head,
    }
    sizes |= {linear.name: linear.num_in * linear.num_out for linear in (*shape.linears, *shape.dense_linears)}
    kept = parallel.deepspeed.stage3_param_persistence_threshold
    fault = why_not_packed({name: size for name, size in sizes.items() if size > kept}, num_ranks)
    return [] if fault is None else [fault]


def why_not_packed(sizes: Mapping[str, int], num_ranks: int) -> Fault | None:
    """Where a matrix that travels in 8 bits is no multiple of 8 numbers for each rank.

    DeepSpeed asserts it in a step; where only the last rank's part is shorter it would read scales of other groups.
    """
    wrong = {name: size for name, size in sizes.items() if size % (PACKED_AT_ONCE * num_ranks)}
    if num_ranks == 1 or not wrong:
        return None
    name, size = next(iter(wrong.items()))
    fewer = [n for n in range(1, num_ranks) if not any(one % (PACKED_AT_ONCE * n) for one in sizes.values())]
    start = f"start   --nproc {fewer[-1]}   or   " if fewer else ""
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return Fault(
        f"parallel.compress has weights: int8, which DeepSpeed packs in parts of a multiple of {PACKED_AT_ONCE} "
        f"numbers, and {name}{more} has {size:,}: {size / num_ranks:,.10g} for each of {num_ranks} processes",
        key="parallel.compress",
        fix=f"{start}write   {NATIVELY}   or   weights: none",
    )
