"""Communication volume of one optimizer step: bytes in theory, per collective, and the seconds that they take.

The same table that a run's ledger of counted bytes is held against. Sizes are logical: an all-gather's payload is what
each rank has in the end, an all-reduce's or reduce-scatter's what each has in the beginning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from duoka.plan import deepspeed, packed_base
from duoka.plan.activations import held_kv_size
from duoka.plan.axes import deals_heads
from duoka.plan.catalog import Cluster
from duoka.plan.layout import Layout
from duoka.plan.model_share import ModelShare
from duoka.plan.recipe import Work, layers_of_backward, shares
from duoka.plan.recompute import part_of_layers
from duoka.plan.trained_weights import layer_numbers, trained_at_ends

Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"]
When = Literal["forward", "backward", "end", "between"]  # `between`: nothing of this rank's work can hide it

# What collectives reach of a link's each-way figure: bus bandwidth of large messages, as public measurements give it
# (NVLink 3: 230 of 300 GB/s, NVLink 4: 360 of 450; InfiniBand and RoCE 80 to 90%).
LINK_SHARE = 0.78
NETWORK_SHARE = 0.80
# By bits in which weights or gradients travel: how many neighbors share a scale of 4 bytes.
PACKED_BLOCKS = {8: 256, 4: 64}
BUCKET_BYTES = 25 * 2**20  # DDP's


@dataclass(frozen=True)
class Group:
    """Ranks that exchange: `members` of them lie on each of `nodes` nodes, beside `others` such groups per node."""

    members: int
    nodes: int
    others: int = 1

    @property
    def size(self) -> int:
        return self.members * self.nodes


@dataclass(frozen=True)
class Exchange:
    """One kind of collective of a step: `times` of them, of `payload_bytes` each."""

    what: str
    kind: Kind
    payload_bytes: float
    times: float
    group: Group
    when: When
    messages: float = 1  # that each is sent as: a layer's, or a bucket's

    @property
    def sent_bytes(self) -> float:
        """Per rank and step, by the ring algorithms: all-reduce 2(N-1)/N, the others (N-1)/N, a send all of it."""
        share = (self.group.size - 1) / self.group.size
        factor = {"all-reduce": 2 * share, "send": 1.0}.get(self.kind, share)
        return self.times * factor * self.payload_bytes

    def seconds(self, cluster: Cluster) -> float:
        """Of one step. Hierarchical: what leaves a node shares its network cards, the rest goes over its links."""
        group, size = self.group, self.payload_bytes
        passes = 2 if self.kind == "all-reduce" else 1
        if self.kind == "send":
            return self.times * (_latency(cluster, group) + size / _speed(cluster, group))
        inside = passes * size * (group.size - 1) / group.size / (cluster.link.bytes_per_s * LINK_SHARE)
        across = 0.0
        if group.nodes > 1:
            cards = cluster.num_nics * cluster.network.bytes_per_s * NETWORK_SHARE / group.others
            across = passes * size * (group.nodes - 1) / group.nodes / cards
        if self.kind == "all-to-all":  # of each member all that is meant for other nodes leaves, none of it summed
            across *= group.members
        rounds = min(passes * (group.size - 1), 2 * math.log2(group.size)) if group.size > 1 else 0
        return self.times * (max(inside, across) + self.messages * rounds * _latency(cluster, group))


def _latency(cluster: Cluster, group: Group) -> float:
    return cluster.network.latency_s if group.nodes > 1 else cluster.link.latency_s


def _speed(cluster: Cluster, group: Group) -> float:
    if group.nodes > 1:
        return cluster.num_nics * cluster.network.bytes_per_s * NETWORK_SHARE / cluster.per_node
    return cluster.link.bytes_per_s * LINK_SHARE


def dp_root_bytes(work: Work, num_devices: int) -> tuple[float, float]:
    """(received, sent) by the first card of nn.DataParallel in every micro-batch: gradients in, fp32 weights out."""
    others = num_devices - 1
    return others * 4.0 * work.num_trainable, others * 4.0 * work.shape.num_parameters


def place_group(size: int, stride: int, per_node: int) -> Group:
    """`size` ranks that lie `stride` apart, when a node holds `per_node` neighbors."""
    members = max(1, min(size, per_node // stride))
    return Group(members, -(-size // members), max(1, min(stride, per_node)) if size > members else 1)


def traffic(
    work: Work,
    layout: Layout,
    per_node: int,
    *,
    accumulation: int = 1,
    tokens: int = 0,
) -> tuple[Exchange, ...]:
    """All that one rank exchanges in an optimizer step of `accumulation` micro-batches of `tokens` tokens.

    Ranks are laid out with tensor neighbors innermost, then sequence, then data, and stages outermost.
    """
    share = shares(work, layout, accumulation)[0]
    found = _data_traffic(work, layout, share, per_node, accumulation)
    size = 4 if layout.precision == "fp32" else 2
    hidden = size * work.shape.hidden_size * -(-tokens // layout.sp)
    if layout.tp > 1 and work.deepspeed is not None:
        sums = deepspeed.sums_of_layer(len(work.shape.linears), _exchanged_again(layout, share)) * share.num_layers
        group = place_group(layout.tp, 1, per_node)
        found.append(
            Exchange("AutoTP: activations", "all-reduce", hidden, round(sums) * accumulation, group, "between")
        )
    elif layout.tp > 1:
        passes = 4 + 2 * part_of_layers(layout.recompute, share.num_layers)
        if work.program is None:  # the last sum of a layer is not made again: nothing behind it needs it
            passes = 4 + _exchanged_again(layout, share)
        group = place_group(layout.tp, 1, per_node)
        mixed = 0.0
        if share.experts and not any("shared" in linear.name for linear in work.shape.linears):
            assert work.shape.experts is not None
            # Experts' answers are joined instead (_expert_traffic).
            mixed = work.shape.experts.num_layers / work.shape.num_layers
        times = (passes - 2 * mixed) * share.num_layers * accumulation
        found.append(Exchange("tensor parallel: activations", "all-reduce", hidden, times, group, "between"))
        width = _joined_width(work, layout, share, size)
        if width:
            payload, count = size * width * -(-tokens // layout.sp), share.num_layers * accumulation
            found.append(Exchange("tensor parallel: joined products", "all-gather", payload, count, group, "between"))
        if work.program is None:  # what the embedding gives, and the gradient of what the head reads
            ends = 4 * work.shape.hidden_size * -(-tokens // layout.sp) * (share.has_head + 1)
            found.append(Exchange("tensor parallel: ends", "all-reduce", ends, accumulation, group, "end"))
    if layout.sp > 1:
        found += _sequence_traffic(work, layout, share, accumulation, size, tokens, per_node)
    if share.experts:
        found += _expert_traffic(work, layout, share, accumulation, size, tokens, per_node)
    if layout.pp > 1:
        stride = layout.tp * layout.sp * layout.dp
        group = place_group(2, stride, per_node)
        # Between any two stages once there and once back; the mean over ranks, of which those at the ends send less.
        cuts = layout.pp * layout.virtual - 1 - (layout.schedule == "zbv")  # whose middle two are of one rank
        sends = 2 * accumulation * cuts / layout.pp
        # Each tensor rank sends all of what it has whole; Megatron's send a part, and gather it again on arrival.
        sent = hidden if work.program is None else hidden / layout.tp
        found.append(Exchange("pipeline: between stages", "send", sent, sends, group, "end"))
    return tuple(found)


def _joined_width(work: Work, layout: Layout, share: ModelShare, size: int) -> float:
    """Numbers of a token and layer that ranks put together: products, and gradients of what a product reads a part of.
    An adapter beside it asks for the latter too, in fp32."""
    shape, parts = work.shape, work.shape.parts
    given = parts.joins_heads * (shape.q_size + 2 * shape.kv_size) + 2 * parts.joined_gate * shape.intermediate_size
    read = parts.joins_heads * shape.q_size + parts.joined_gate * shape.intermediate_size
    beside = 4 / size if work.lora is not None else 0.0
    return given * (1 + _exchanged_again(layout, share)) + read * (1 + beside)


def _exchanged_again(layout: Layout, share: ModelShare) -> float:
    """The part of the layers whose exchanges are made again: no recompute keeps what they gave."""
    return 1.0 if layout.recompute == "selective" else part_of_layers(layout.recompute, share.num_layers)


def _sequence_traffic(
    work: Work, layout: Layout, share: ModelShare, accumulation: int, size: int, tokens: int, per_node: int
) -> list[Exchange]:
    """Of attention, once a layer and micro-batch and pass (payloads are whole buffers of one rank)."""
    shape, group = work.shape, place_group(layout.sp, layout.tp, per_node)
    stretch, times = -(-tokens // layout.sp), share.num_layers * accumulation
    passes = 2 + _exchanged_again(layout, share)
    if deals_heads(shape.num_heads // layout.tp, layout.sp):
        held = 2 * held_kv_size(shape, layout)
        asked_for = shape.q_size // layout.tp  # heads are cut by tensor ranks first
        asked, answered = size * stretch * (asked_for + held), size * stretch * asked_for
        name = "sequence parallel: queries, keys, values"
        return [
            Exchange(name, "all-to-all", asked, passes * times, group, "between"),
            Exchange("sequence parallel: outputs", "all-to-all", answered, passes * times, group, "between"),
        ]
    whole = 2 * size * shape.kv_size // layout.tp * stretch * layout.sp
    return [
        Exchange("sequence parallel: keys, values", "all-gather", whole, (passes - 1) * times, group, "between"),
        Exchange("sequence parallel: their gradients", "reduce-scatter", whole, times, group, "between"),
    ]


def _expert_traffic(
    work: Work, layout: Layout, share: ModelShare, accumulation: int, size: int, tokens: int, per_node: int
) -> list[Exchange]:
    """Tokens to their experts and back in each layer that has some, as if these were chosen equally often."""
    experts, group = work.shape.experts, place_group(layout.ep, 1, per_node)
    assert experts is not None
    stretch = -(-tokens // layout.sp)
    rows = -(-stretch // layout.tp) * experts.num_active
    passes = 4 + 2 * _exchanged_again(layout, share)
    layers = experts.num_layers * share.num_layers / work.shape.num_layers
    payload, times = size * work.shape.hidden_size * rows, passes * layers * accumulation
    found = [Exchange("expert parallel: tokens", "all-to-all", payload, times, group, "between")]
    if layout.tp > 1:  # each sends a part of the tokens: answers are joined, and gradients of what experts read
        joined, neighbors = size * work.shape.hidden_size * stretch, place_group(layout.tp, 1, per_node)
        found.append(
            Exchange("expert parallel: joined", "all-gather", joined, 2 * layers * accumulation, neighbors, "between")
        )
    copies = layout.dp * layout.sp * layout.tp // layout.ep
    if copies > 1 and work.lora is None and work.train_only is None:
        others = place_group(copies, layout.ep, per_node)
        found.append(Exchange("expert parallel: gradients", "all-reduce", 4.0 * share.experts, 1, others, "end"))
    return found


def _packed_bytes(bits: int) -> float:
    """Per number, with its part of its block's scale; 0 where numbers travel as they are."""
    return bits / 8 + 4 / PACKED_BLOCKS[bits] if bits else 0.0


def _scattered(work: Work, payload: float, times: int, group: Group, layers: int) -> list[Exchange]:
    """Gradients of `payload` bytes; packed ones are added inside each node first, then between nodes."""
    if not work.gradient_bits:
        return [Exchange("gradients", "reduce-scatter", payload, times, group, "backward", layers)]
    payload *= _packed_bytes(work.gradient_bits) / 4.0
    if group.members == 1 or group.nodes == 1:
        return [Exchange("gradients", "reduce-scatter", payload, times, group, "backward", layers)]
    inside, across = Group(group.members, 1), Group(1, group.nodes, group.members)
    return [
        Exchange("gradients, in a node", "reduce-scatter", payload, times, inside, "backward", layers),
        Exchange(
            "gradients, between nodes", "reduce-scatter", payload / group.members, times, across, "backward", layers
        ),
    ]


def _data_traffic(work: Work, layout: Layout, share: ModelShare, per_node: int, accumulation: int) -> list[Exchange]:
    if layout.dp * layout.sp == 1:
        return []
    stride = layout.tp
    half = 4 if layout.precision == "fp32" else 2
    trained, micro, layers = share.trainable, accumulation, share.num_layers + 2
    everyone = place_group(layout.dp * layout.sp, stride, per_node)
    grads, wide = "gradients", 4.0
    if work.program is not None:
        half, wide = int(work.program.weights), work.program.gradients
    if layout.strategy == "ddp":
        buckets = max(1.0, wide * trained / BUCKET_BYTES)
        return [Exchange(grads, "all-reduce", wide * trained, 1, everyone, "backward", buckets)]
    if work.deepspeed is not None:
        is_near = work.reshard == "node" and 1 < everyone.members < everyone.size
        near = Group(everyone.members, 1) if is_near else everyone
        return _of_deepspeed(work, layout, share, everyone, near, micro)
    sent = _packed_bytes(work.weight_bits) or half  # per number, forward
    if layout.strategy in ("zero1", "zero2"):
        times = micro if layout.strategy == "zero2" else 1
        learns = share if work.train_only is None else _what_learns(work, share)
        payload = _gather_bytes(work, learns, trained, half, sent)
        gather = Exchange("weights", "all-gather", payload, 1, everyone, "end", layers)
        return [gather, *_scattered(work, wide * trained, times, everyone, layers)]
    group = place_group(layout.state_ranks, stride, per_node)
    whole = _gather_bytes(work, share, trained + share.frozen, half, sent)
    below = share.num_layers - len(layers_of_backward(work, share))
    if work.reshard and below:  # one below, fetched for a backward pass that ends above it, is there at the next pass
        whole -= sent * share.per_layer * (micro - 1) / micro
    found = [Exchange("weights, forward", "all-gather", whole, micro, group, "forward", layers)]
    if work.reshard:
        near = group
        if work.reshard == "node" and 1 < group.members < group.size:
            near, sent = Group(group.members, 1), half
        again = _gather_bytes(work, share, trained + share.frozen, half, sent, root=False)
        again -= sent * share.per_layer * max(0, below - 1)
        found.append(Exchange("weights, backward", "all-gather", again, micro, near, "backward", layers))
    found += _scattered(work, wide * trained, micro, group, layers)
    if layout.num_replicas > 1:
        across = place_group(layout.num_replicas, stride * layout.state_ranks, per_node)
        part = wide * trained / layout.state_ranks
        found.append(Exchange("gradients, between copies", "all-reduce", part, 1, across, "backward", layers))
    return found


def _what_learns(work: Work, share: ModelShare) -> ModelShare:
    """The part of it that train_only trains, which alone is gathered where each rank has the whole model."""
    assert work.train_only is not None
    numbers = set(layer_numbers(work.train_only, work.shape.num_layers)) if work.train_only.modules == "all" else set()
    own = numbers.intersection(share.layers)
    ends = trained_at_ends(work.shape, work.train_only, has_input=share.embedding > 0, has_output=False)
    return replace(share, num_layers=len(own), embedding=min(share.embedding, ends))


def _gather_bytes(work: Work, share: ModelShare, numbers: int, half: int, sent: float, *, root: bool = True) -> float:
    """Of weights that travel in `sent` bytes each. The embedding and norms of what is trained compute in fp32.

    Not the root's, which stays gathered from one pass to the next: a tied embedding, and norms wider than their layer.
    """
    is_wider = half < work.trained_size and work.program is None and work.lora is None
    tied = 0 if share.head else share.embedding
    with_root = tied + (work.shape.num_norm_parameters_per_layer * share.num_layers if is_wider else 0)
    apart = share.embedding - tied
    wide = work.trained_size if is_wider and sent >= half else sent
    # Packed blocks travel as they are.
    packed = packed_base.numbers(work.frozen_bits, work.shape, share.block_linear, share.frozen)
    narrower = packed * (sent - work.frozen_bits / 8)
    return sent * (numbers - with_root - apart) + wide * (apart + (with_root if root else 0)) - narrower


def _of_deepspeed(
    work: Work, layout: Layout, share: ModelShare, everyone: Group, near: Group, micro: int
) -> list[Exchange]:
    """Stages 1 to 3: weights travel as wide as they are unless ZeRO++ packs them; 1 and 2 sum gradients by all-reduce.

    `near`: the ranks that share a copy of the weights, from a step's first forward pass to its last backward pass.
    """
    assert work.deepspeed is not None
    wide = deepspeed.SIZE
    trained, messages = wide * share.trainable, max(1.0, share.trainable / work.deepspeed.reduce_bucket_size)
    if layout.strategy in ("zero1", "zero2"):
        times = micro if layout.strategy == "zero2" else 1
        return [
            Exchange("weights", "all-gather", trained, 1, everyone, "end", messages),
            Exchange("gradients", "all-reduce", trained, times, everyone, "backward", messages),
        ]
    held, layers = share.trainable + share.frozen, share.num_layers + 2
    weights = (wide if not work.weight_bits else 1) * held
    again = weights if near is everyone else wide * held  # a node's copy travels in it as it is
    first = micro if near is everyone else 1
    found = [Exchange("weights, forward", "all-gather", weights, first, everyone, "forward", layers)]
    if micro > first:
        found.append(Exchange("weights, forward again", "all-gather", again, micro - first, near, "forward", layers))
    if deepspeed.gathers_twice(work, share):
        found.append(Exchange("weights, backward", "all-gather", again, micro, near, "backward", layers))
    if not work.gradient_bits or everyone.nodes == 1:  # inside a node it sends them as they are
        return [*found, Exchange("gradients", "reduce-scatter", trained, micro, everyone, "backward", messages)]
    packed = deepspeed.packed_gradients(share, work.shape.hidden_size)
    inside, across = Group(everyone.members, 1), Group(1, everyone.nodes, everyone.members)
    return [
        *found,
        Exchange("gradients, in a node", "reduce-scatter", packed, micro, inside, "backward", layers),
        Exchange(
            "gradients, between nodes", "reduce-scatter", packed / everyone.members, micro, across, "backward", layers
        ),
    ]
