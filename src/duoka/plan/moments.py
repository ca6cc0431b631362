"""What passes by in a micro-batch's passes and is gone at their end, moment by moment: activations, the loss, casts and
weights that are whole for a while. What lasts beside it, and the peak, is memory.py's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from duoka.plan import deepspeed
from duoka.plan.activations import (
    activation_bytes_per_token,
    boundary_bytes,
    kept_for_both,
    learns_head,
    loss_bytes,
    means_of,
    measured_bytes,
    mixes_at_once,
    ranks_of_mlp,
    selective_bytes,
    tail_bytes,
)
from duoka.plan.fp8 import fp8_weights
from duoka.plan.layer_parts import adapts_gated
from duoka.plan.layout import Layout
from duoka.plan.model_share import ModelShare
from duoka.plan.offload import LAYERS_HERE
from duoka.plan.recipe import Work, layers_of_backward
from duoka.plan.recompute import is_share, whole_layers
from duoka.plan.sizes import cuts_inside
from duoka.plan.trained_weights import trained_in_layers

FORWARD = "start of the forward pass"  # where weights are gathered
AHEAD = "forward pass of the last layers"
HEAD = "gathering of the head"
LOSS = "loss"
ROUNDED = "rounding of the head's gradient"  # which is summed in fp32, to the type that the head was gathered in
START = "start of the backward pass"
END = "end of the backward pass"  # of the first layer
EMBEDDING = "gradient of the embedding"  # after all layers

# By what is meant by it: duoka's, and those of other programs.
_SELECTIVE = {
    "products": "what products and attention give",
    "every second product": "what every second product and attention give",
    "all but scores": "all but attention's scores",
}


def pass_moments(
    work: Work, layout: Layout, share: ModelShare, tokens: int, length: int, *, is_first: bool, is_only: bool
) -> Iterator[tuple[str, dict[str, int]]]:
    """Each moment's transient memory in one micro-batch, the first of its step or a later one."""
    one_layer, kept, _ = activations(work, layout, share, tokens, length)
    loss, head_gradient = loss_bytes(work, layout, share, tokens)
    working = _working_bytes(work, layout, tokens)
    whole = whole_layers(layout.recompute, share.num_layers)
    again = one_layer if whole[-1:] == (True,) else 0
    if layout.recompute == "selective":
        again = max(0, one_layer - int(kept_for_both(work, layout) * tokens))
    gathered = _gathered_bytes(work, layout, share, is_first)
    # Hidden states that leave, and gradients that come and leave; received states are their layer's kept input.
    pipeline = 3 * boundary_bytes(work, layout) * tokens if layout.pp > 1 else 0
    # Of layers that are computed again, autocast casts weights again too, and keeps none in between.
    casts, layers = _cast_bytes(work, layout, share), max(1, share.num_layers)
    cast_kept = 0 if layout.recompute == "selective" else share.num_layers - sum(whole)
    cast_again = layout.recompute == "selective" or any(whole)
    of_others = kept * (share.in_flight - 1) // share.in_flight  # micro-batches of a pipeline that are there already
    cast_by_others = cast_kept * (share.in_flight - 1)
    tail = tail_bytes(work, layout) * tokens if share.has_head else 0
    rows = (4 if layout.precision == "fp32" else 2) * tokens * work.shape.hidden_size if share.has_head else 0
    rounded = _rounded_bytes(work, layout, share)
    # A head of its own that is shared goes on in fp32, as it is summed over ranks.
    narrower = 0 if share.head and layout.is_sharded else rounded
    found = {
        LOSS: {"activations": kept + tail, "loss": loss + head_gradient},
        START: {"activations": kept + again, "loss": head_gradient - narrower, "working": working},
        END: {"activations": of_others + one_layer, "working": working},
    }
    if FORWARD in gathered:
        found[FORWARD] = {"activations": of_others}
        inside = _gated_bytes(work, layout, tokens) if whole[-1:] == (True,) else 0
        found[AHEAD] = {"activations": kept, "working": inside}
        found[HEAD] = {"activations": kept + tail + rows}
    if rounded:
        found[ROUNDED] = {"activations": kept + tail, "loss": head_gradient + rounded}
    cast = {
        FORWARD: 0,
        AHEAD: cast_kept,
        HEAD: cast_kept,
        LOSS: cast_kept,
        ROUNDED: cast_kept,
        START: min(layers, cast_kept + cast_again),
        END: 1,
        EMBEDDING: 0,
    }
    if gradient := _embedding_bytes(work, layout, share, is_first, is_only):
        found[EMBEDDING] = {"activations": of_others, "embedding": gradient}
    for moment, own in found.items():
        copies = {"casts": casts * (cast_by_others + cast[moment]) // layers, "gathered": gathered.get(moment, 0)}
        yield moment, own | copies | {"pipeline": pipeline}


def without_gradients(
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
    gathered = _gathered_bytes(work, layout, share, False).get(LOSS, 0)
    return {moment: own | {"gathered": gathered} for moment, own in found.items()}


def activations(work: Work, layout: Layout, share: ModelShare, tokens: int, length: int) -> tuple[int, int, str]:
    """(of one whole layer, kept of all layers until the backward pass, the formula)."""
    per_layer, formula = activation_bytes_per_token(work, layout, length)
    # Below what is trained, nothing is kept, and above it less of layers that are frozen.
    passed = layers_of_backward(work, share)
    of_layers = [int(per_layer * tokens)] * len(passed)
    if work.train_only is not None:
        of_layers = [int(activation_bytes_per_token(work, layout, length, number)[0] * tokens) for number in passed]
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
    return activations(work, here, share, tokens, length)[1] // max(1, share.num_layers) * (share.num_layers - 1)


def _gathered_bytes(work: Work, layout: Layout, share: ModelShare, is_first: bool) -> dict[str, int]:
    """What is whole at each moment where ranks share the model: layers that compute or are fetched, the ends, and
    gradients on their way."""
    size = 4 if layout.precision == "fp32" else 2
    if work.deepspeed is not None:
        live = deepspeed.gathered_bytes(work, layout.state_ranks, share) if layout.strategy == "fsdp" else 0
        buckets = deepspeed.bucket_bytes(work, layout.strategy, share)
        there = deepspeed.forward_bytes(work, layout.state_ranks, share) if layout.strategy == "fsdp" else 0
        return {LOSS: live + there, START: live + buckets, END: live + buckets}
    if layout.strategy in ("zero1", "zero2") and work.program is None:
        # The step's first pass gathers what learns, and what came of the last unit stays until another comes.
        gathers = is_first and not work.num_frozen and not layout.has_one_shard
        return {} if not gathers else {LOSS: size * (share.head or share.per_layer)}
    if layout.strategy not in ("fsdp", "hsdp"):
        return {}
    if work.program is not None:
        return dict.fromkeys((LOSS, START, END), int(work.program.window * (2 + 2) * share.per_layer))
    trains = work.lora is None
    # A layer's gradients, and the fp32 buffer in which they are reduced, once its weights are let go.
    own = (size + 4) * share.per_layer + _sorted_bytes(work, layout)
    first, last = (own * _trains_layer(work, share.layers[at]) for at in (0, -1))
    last -= 4 * min(share.per_layer, share.head) if last else 0  # a head's own are sent until then
    if layout.has_one_shard and work.device == "cpu" and layout.precision == "fp32" and layout.disk != "params":
        return {START: last, END: first}
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
    # Of a tied weight, the head's gradient waits for the embedding's.
    waiting = work.trained_size * share.embedding if not share.head and work.trains_embedding else 0
    # What came stays beside the weights that are made of it until another unit's is there.
    begin = 2 * root + embedding + max(embedding, 2 * size * share.per_layer)
    # A layer computes beside what came of it and of the next; the head is made beside what came of the last layer.
    ahead = 2 * share.per_layer + max(share.per_layer, share.head)
    return {
        FORWARD: begin,
        AHEAD: max(whole, root + size * ahead),
        HEAD: max(whole, root + size * (share.per_layer + 2 * share.head)),
        LOSS: max(whole, root + size * (share.head + max(share.head, share.per_layer))),
        ROUNDED: max(whole, root + size * (share.head + share.per_layer)),
        START: max(whole, root + size * share.per_layer) + max(size * share.per_layer, last),
        END: root + embedding + size * share.per_layer + first + waiting,
        EMBEDDING: root + embedding,
    }


def _sorted_bytes(work: Work, layout: Layout) -> int:
    """Gradients of a layer's experts in the order in which ranks share their rows, where they share rows."""
    experts, ranks = work.shape.experts, layout.state_ranks
    if experts is None or layout.ep > 1 or not cuts_inside(experts.num_experts, work.shape.hidden_size, ranks):
        return 0
    return (4 if layout.precision == "fp32" else 2) * experts.num_experts * experts.num_parameters_each


def _trains_layer(work: Work, number: int) -> bool:
    if work.lora is not None or work.train_only is None:
        return work.lora is None
    return trained_in_layers(work.shape, work.train_only, [number]) > 0


def _rounded_bytes(work: Work, layout: Layout, share: ModelShare) -> int:
    """Of the head's gradient, as narrow as the head was when the loss was computed."""
    if not share.has_head or work.program is not None or layout.precision == "fp32" or not learns_head(work):
        return 0
    comes_narrow = work.narrow_weights or (bool(share.head) and layout.strategy in ("fsdp", "hsdp"))
    return 2 * work.shape.vocab_size * work.shape.hidden_size // layout.tp if comes_narrow else 0


def _embedding_bytes(work: Work, layout: Layout, share: ModelShare, is_first: bool, is_only: bool) -> int:
    """Beside the gradients of all weights, when the embedding's comes: what it is made of.

    Of one weight at both ends, the head's gradient and the embedding's, whose sum is then added to what was there.
    Where ranks share gradients, they are whole until they are sent, as are the first layer's on their way.
    """
    if not share.embedding or not work.trains_embedding or work.deepspeed is not None or work.program is not None:
        return 0
    is_tied = share.has_head and not share.head
    if layout.is_sharded and (is_only or layout.strategy != "zero1"):
        whole = work.trained_size * (2 if is_tied else 1) * share.embedding + 4 * share.per_layer
        # In fp32 as it is sent, once its weights are let go, which zero2 does in a step's last pass.
        keeps = layout.strategy == "zero2" and not is_only
        return max(whole, (work.trained_size + 4) * share.embedding) if keeps else whole
    return work.trained_size * share.embedding * (is_tied + (not is_first))


def _cast_bytes(work: Work, layout: Layout, share: ModelShare) -> int:
    """Copies of all layers' weights that products keep: autocast's in half precision, those of fp8 in 8 bits, and what
    adapters of experts and routers are made to."""
    merged, turned = _of_expert_adapters(work, layout, share)
    linear = share.block_linear * len(layers_of_backward(work, share)) // max(1, share.num_layers)
    if layout.precision == "fp32" or work.narrow_weights or work.program is not None:
        return merged + turned
    if layout.is_sharded and work.deepspeed is None:  # what is gathered comes in half precision
        if work.train_only is None or layout.strategy not in ("zero1", "zero2"):
            return merged + turned
        # What does not learn lies whole on every rank, as wide as what does.
        return 2 * max(0, linear - trained_in_layers(work.shape, work.train_only, share.layers) // layout.tp)
    if layout.precision == "fp8":
        part = fp8_weights(work.shape) / max(1, work.shape.num_block_linear)
        # Compiled code rounds them again, and so it is where activations go elsewhere.
        kept = 0 if layout.activations != "none" or means_of(work, layout).compiled else 1
        return int((2 - (2 - kept) * part) * linear)
    return 2 * (linear if work.lora is None else share.trainable) + merged


def _of_expert_adapters(work: Work, layout: Layout, share: ModelShare) -> tuple[int, int]:
    """(what PEFT makes of routers and their adapters, B of experts' adapters as these lie one behind the other)."""
    shape, experts, lora = work.shape, work.shape.experts, work.lora
    if lora is None or work.program is not None or experts is None:
        return 0, 0
    adapted = shape.expert_adapters(lora.targets)
    each = (4 if layout.precision == "fp32" else 2) * share.num_layers * experts.num_layers / shape.num_layers
    outs = sum(one.num_out for one in adapted) // experts.num_active * experts.num_experts
    router = experts.num_experts * shape.hidden_size if adapted and lora.targets == "all" else 0
    return int(each * router), int(each * lora.rank * outs)


def _gated_bytes(work: Work, layout: Layout, tokens: int) -> int:
    """What an MLP holds while it computes and nothing of it is kept: gate, its activation, the other product."""
    size = 4 if layout.precision == "fp32" else 2
    return (2 + work.shape.gated) * size * tokens * work.shape.intermediate_size // ranks_of_mlp(work, layout)


def _working_bytes(work: Work, layout: Layout, tokens: int) -> int:
    """Gradients of a layer's activations while its backward pass runs: one to four f-wide and three h-wide tensors."""
    size, shape = 4 if layout.precision == "fp32" else 2, work.shape
    if work.program is not None:  # which shares them along the sequence too
        return 3 * size * tokens * (shape.intermediate_size + shape.hidden_size) // layout.tp
    # What an adapter behind the gate reads is let go before gate and up have theirs; one kernel makes all three.
    how = means_of(work, layout)
    is_let_go = shape.experts is None and adapts_gated(shape, how) and not (how.remakes and how.kernels)
    inside = 3 - is_let_go if shape.gated else 1
    if shape.parts.joined_gate:  # whose gradients lie in one tensor, beside what each is made of
        inside = 4
    own = size * tokens * (inside * shape.intermediate_size // ranks_of_mlp(work, layout) + 3 * shape.hidden_size)
    own = max(own, int((measured_bytes(work, layout, "working ") or 0) * tokens / layout.tp))
    return own + _stacked_bytes(work, layout)


def _stacked_bytes(work: Work, layout: Layout) -> int:
    """Of experts that learn: gradients of gate and up, expert by expert, of which the whole one is made. On GPUs one
    launch makes it, in bf16."""
    experts = work.shape.experts
    at_once = work.device == "cuda" and layout.precision in ("bf16", "fp8")
    if experts is None or work.lora is not None or work.train_only is not None or at_once or work.program is not None:
        return 0
    size = 4 if layout.precision == "fp32" else 2
    if mixes_at_once(work, layout):  # where they are wide and it is not, one expert's before it is widened
        return 0 if layout.precision == "fp32" or layout.is_sharded else size * experts.num_parameters_each
    return size * experts.num_experts // layout.ep * experts.num_parameters_each * 2 // 3
