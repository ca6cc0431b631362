"""What one rank has of a model, and experts in it: each rank's own, or among all that strategies share out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from duoka.plan.layout import Layout
from duoka.plan.sizes import ModelShape, cuts_inside

Learns = Literal["all", "some", "adapters"]


@dataclass(frozen=True)
class ModelShare:
    """What one rank has of the model: a pipeline's stage, cut by the tensor axis. All numbers are of this rank."""

    num_layers: int
    embedding: int
    head: int  # of its own; a tied head on another stage than the embedding is a copy
    has_head: bool
    in_flight: int  # micro-batches whose activations are held at once
    trainable: int
    frozen: int
    per_layer: int
    block_linear: int
    experts: int = 0  # parameters of its experts where ranks share these out: in none of the other numbers
    layers: tuple[int, ...] = ()  # their numbers in the model


def share_experts(shape: ModelShape, layout: Layout, whole: ModelShare, learns: Learns) -> ModelShare:
    """What strategies share out among ranks; where these share experts, each has its own beside that."""
    change = _filled_up if layout.ep == 1 else _without_experts
    return change(shape, layout, whole, learns)


def _filled_up(shape: ModelShape, layout: Layout, whole: ModelShare, learns: Learns) -> ModelShare:
    """With the zeros by which FSDP makes the number of experts a multiple of its ranks, where it shares no rows."""
    experts, ranks = shape.experts, layout.state_ranks
    keeps_frozen = learns == "adapters" and layout.strategy not in ("fsdp", "hsdp")
    if experts is None or keeps_frozen or not layout.is_sharded:
        return whole
    count = experts.num_experts
    if layout.disk != "params" and cuts_inside(count, shape.hidden_size, ranks):
        return whole
    each = -count % ranks * experts.num_parameters_each
    everywhere = each * experts.num_layers * whole.num_layers // shape.num_layers
    trained = learns == "all"
    return replace(
        whole,
        trainable=whole.trainable + (everywhere if trained else 0),
        frozen=whole.frozen + (0 if trained else everywhere),
        per_layer=whole.per_layer + each,
    )


def _without_experts(shape: ModelShape, layout: Layout, whole: ModelShare, learns: Learns) -> ModelShare:
    experts = shape.experts
    if experts is None:
        return whole
    each = experts.num_experts * experts.num_parameters_each
    everywhere = each * experts.num_layers * whole.num_layers // shape.num_layers
    trained = learns == "all"
    cut = everywhere // layout.tp  # as they were counted among what tensor ranks cut
    return replace(
        whole,
        trainable=whole.trainable - (cut if trained else 0),
        frozen=max(0, whole.frozen - (0 if trained else cut)),
        per_layer=whole.per_layer - each // layout.tp,
        block_linear=whole.block_linear - cut,
        experts=everywhere // layout.ep,
    )
