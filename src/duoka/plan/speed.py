"""Seconds per optimizer step from arithmetic: products at a share of the peak, the rest at memory's speed, exchanges.

The shares are few and physical, one per device generation, and calibrated on public runs: `duoka plan --validate`
prints how far off they are. What was measured on a user's machine (`duoka bench hardware`) replaces the peaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from duoka.plan import deepspeed
from duoka.plan.activations import activation_bytes_per_token, has_own_attention, is_narrow
from duoka.plan.catalog import Cluster
from duoka.plan.flops import (
    ATTENTION_BACKWARD,
    OWN_FORMULA,
    backward_shares,
    forward_flops_per_token,
    model_flops_per_token,
    products,
)
from duoka.plan.fp8 import fp8_share, fp8_weights, rounding_bytes
from duoka.plan.layout import Layout
from duoka.plan.moments import moved_activations
from duoka.plan.offload import disk_seconds, moved_bytes
from duoka.plan.overheads import MEMORY_SHARE, launch_s, micro_batches_s
from duoka.plan.pipeline import PassTimes, bubble
from duoka.plan.recipe import Work, shares, slowest_stage
from duoka.plan.recompute import part_of_layers
from duoka.plan.shape import adapted_linears
from duoka.plan.traffic import Exchange, traffic


@dataclass(frozen=True)
class Rates:
    """The constants that were fitted to published runs; crossval.py fits them anew, without one source at a time."""

    # Share of the data sheet's peak that matrix products of training reach, by generation. ampere: fitted to the rows
    # of published.csv that are marked `fit`; hopper: between two public figures (MPT-7B at 46.4% and Llama-3-8B at
    # 33.7% MFU on 8 H100); others: ampere's ratio of training to best product, times their best published product.
    # A card by its name: measured in runs of duoka on it (benchmarks/gpu.md).
    matmul: Mapping[str, float]
    # Attention kernels are further from the peak than plain products, the more so on newer cards.
    attention: Mapping[str, float]
    # Small micro-batches reach less: half of the best share at so many tokens (waves that don't fill a card, gaps
    # between kernels), as (best share) / (1 + half_tokens / tokens).
    half_tokens: float = 300.0
    # A tensor that autograd keeps was written once and read once or twice in the forward pass; twice that backwards.
    touches: float = 2.5


RATES = Rates(
    matmul={
        "volta": 0.60, "turing": 0.50, "ampere": 0.75, "ada": 0.75, "hopper": 0.53, "blackwell": 0.55,
        "blackwell-rtx": 0.65, "cdna2": 0.40, "cdna3": 0.40, "cpu": 0.80, "H200-141G": 0.66,
    },
    attention={"ampere": 0.35, "hopper": 0.30, "cpu": 0.36},
)  # fmt: skip
MEASURED_SHARE = 0.80  # of products that were measured on the machine itself: training's are smaller
# On CPUs they lose less (docs/decisions.md has the steps behind both): a model's products beside the best ones, and
# attention by the compiled kernels (model/attention.cpp, attention_wide.cpp) where it was not measured itself.
CPU_MEASURED_SHARE = 0.92
NARROW_ATTENTION, WIDE_ATTENTION = 0.47, 0.60
TOUCHES_BACKWARD = 2.0  # times those of the forward pass
COMPILED_TOUCHES = 0.5  # fused kernels keep intermediate values in registers
OPTIMIZER_BYTES = 28  # read and written per parameter by AdamW: weight, gradient, two moments
PCIE_BYTES_PER_S = 12e9  # to host memory and back
RANGE = (0.75, 1.35)
EACH = "per micro-batch"  # the part of a step that does not grow with its tokens
LAUNCHES = "launches"  # while a GPU waits for its host


@dataclass(frozen=True)
class Speed:
    """One step's seconds by what it waits for; `exposed` is what no computation hides."""

    step_s: float
    parts: Mapping[str, float]
    tokens_per_step: float
    tokens_per_s: float
    mfu: float
    exchanges: tuple[Exchange, ...]
    exchange_s: float  # hidden or not
    exposed_s: float
    limit: str
    is_measured: bool
    efficiency: float  # share of the peak that matrix products are taken to reach
    formula: str = OWN_FORMULA

    @property
    def scaling_efficiency(self) -> float:
        """Speed of a device beside its speed without exchange: of a step, what is not spent waiting for others."""
        return 1 - (self.exposed_s + self.parts.get("pipeline bubble", 0.0)) / self.step_s

    @property
    def low_s(self) -> float:
        return RANGE[0] * self.step_s

    @property
    def high_s(self) -> float:
        return RANGE[1] * self.step_s

    def to_json(self) -> dict[str, Any]:
        return {
            "step_s": self.step_s,
            "low_s": self.low_s,
            "high_s": self.high_s,
            "tokens_per_step": self.tokens_per_step,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "mfu_formula": self.formula,
            "limit": self.limit,
            "parts": dict(self.parts),
            "exchange_s": self.exchange_s,
            "exposed_s": self.exposed_s,
            "matmul_share": self.efficiency,
            "scaling_efficiency": self.scaling_efficiency,
            "is_measured": self.is_measured,
            "exchanges": [
                {
                    "what": one.what,
                    "kind": one.kind,
                    "payload_bytes": one.payload_bytes,
                    "times": one.times,
                    "ranks": one.group.size,
                    "sent_bytes": one.sent_bytes,
                }
                for one in self.exchanges
            ],
        }


@dataclass(frozen=True)
class Load:
    """What one rank gets through in a step."""

    accumulation: float  # micro-batches, of `tokens` tokens each
    tokens: float
    length: float  # of the sequences that attention sees
    tokens_per_step: float  # of all ranks
    varies: bool = False  # each micro-batch has another number of tokens
    shared: float = 0.0  # of its tokens: computed once with others (plan/prefixes.py)

    @property
    def computed(self) -> float:
        """Tokens of a micro-batch that are computed."""
        return self.tokens * (1 - self.shared)


def activations_moved(work: Work, layout: Layout, load: Load) -> float:
    """Bytes of a rank that leave and come back in a step."""
    one = moved_activations(work, layout, shares(work, layout)[0], round(load.computed), round(load.length))
    return 2.0 * load.accumulation * one


def _moving_seconds(work: Work, layout: Layout, cluster: Cluster, load: Load) -> float:
    kept = activations_moved(work, layout, load)
    return disk_seconds(kept, cluster) if layout.activations == "disk" else kept / PCIE_BYTES_PER_S


class _Passes(NamedTuple):
    """Seconds of one micro-batch's passes; how often its products and its attention are computed in both."""

    matmul: float
    attention: float
    forward: float
    backward: float
    again: float
    waiting: float  # of both, while a GPU waits for its host
    products: float
    attentions: float
    products_again: float


def _passes(work: Work, layout: Layout, cluster: Cluster, load: Load, rates: Rates) -> _Passes:
    matmul_s, attention_s, touch_s = _pass_seconds(work, layout, cluster, load, rates)
    busy, launching = matmul_s + attention_s + touch_s, launch_s(work, layout, cluster.device.kind)
    forward = max(busy, launching)
    # Of a pipeline, the stage that learns is waited for.
    double, passed = (2.0, 1.0) if work.train_only and layout.pp > 1 else backward_shares(work)
    products_again, attention_again = (passed * part for part in _computed_again(work, layout))
    again = products_again * forward
    if layout.recompute == "selective":  # operators: products that are kept, and what lies between them
        again = passed * attention_s if attention_again else passed * touch_s + products_again * matmul_s
    busy_back = double * matmul_s + passed * (ATTENTION_BACKWARD * attention_s + touch_s * TOUCHES_BACKWARD)
    backward = max(busy_back, 2 * passed * launching)
    return _Passes(
        matmul_s, attention_s, forward, backward, again,
        waiting=(forward - busy) * (1 + work.looks) + backward - busy_back,
        products=1 + double + products_again + work.looks,
        attentions=1 + ATTENTION_BACKWARD * passed + attention_again + work.looks,
        products_again=products_again,
    )  # fmt: skip


def estimate_speed(work: Work, layout: Layout, cluster: Cluster, load: Load, *, rates: Rates = RATES) -> Speed:
    """Seconds of one optimizer step of the slowest rank."""
    device = cluster.device
    cores = cluster.per_node if device.kind == "cpu" else 1  # CPU ranks of a node share it
    passes = _passes(work, layout, cluster, load, rates)
    matmul_s, attention_s, forward, backward, again = passes[:5]
    exchanges = traffic(
        work, layout, cluster.per_node, accumulation=max(1, round(load.accumulation)), tokens=round(load.computed)
    )  # fmt: skip
    count = load.accumulation
    share = shares(work, layout)[0]
    compute = count * (forward * (1 + work.looks) + backward + again)
    each = micro_batches_s(work, layout, cluster, count, passes.products_again + work.looks, load.varies)
    exposed, whole = _exposed(exchanges, cluster, layout, count, forward, backward + again, work.shape.num_layers)
    later = _weights_seconds(work, matmul_s)
    times = PassTimes(forward * (1 + work.looks), backward + again - later, later)
    waits = (compute + each) * bubble(layout.schedule, layout.pp, layout.virtual, count, times)
    state = share.trainable / (layout.state_ranks if layout.is_sharded else 1)
    optimizer = OPTIMIZER_BYTES * state * cores / (device.memory_bytes_per_s * MEMORY_SHARE)
    if layout.offload != "none" and device.kind == "cuda":
        optimizer += 16 * layout.offload_share * state / PCIE_BYTES_PER_S  # over PCIe and back, and host memory's speed
    moved = moved_bytes(work, layout, count, cluster)
    disk = max(0.0, disk_seconds(moved, cluster) - optimizer)  # it reads and writes while others are updated
    moving = max(0.0, _moving_seconds(work, layout, cluster, load) - compute)  # beside both passes
    parts = {
        "matrix products": count * matmul_s * passes.products,
        "attention": count * attention_s * passes.attentions,
        "exchange": exposed,
        "pipeline bubble": waits,
        "optimizer": optimizer,
        "disk": disk,
        "moving activations": moving,
        EACH: each,
        LAUNCHES: count * passes.waiting,
    }
    others = parts["matrix products"] + parts["attention"] + parts[LAUNCHES]
    parts["memory traffic"] = max(0.0, compute - others)
    step = compute + each + exposed + waits + optimizer + disk + moving
    flops = model_flops_per_token(work, round(load.length)) * load.tokens_per_step * (1 - load.shared)
    peak = device.peak_flops(layout.precision) * cluster.num_devices / cores
    return Speed(
        step_s=step,
        parts={name: seconds for name, seconds in parts.items() if seconds > 0},
        tokens_per_step=load.tokens_per_step,
        tokens_per_s=load.tokens_per_step / step,
        mfu=flops / (step * peak),
        exchanges=exchanges,
        exchange_s=whole,
        exposed_s=exposed,
        limit=_limit(parts, exchanges, cluster, step),
        is_measured=cluster.is_measured,
        efficiency=_matmul_share(work, layout, cluster, load.computed, rates),
    )


def _matmul_share(work: Work, layout: Layout, cluster: Cluster, tokens: float, rates: Rates) -> float:
    """Share of the peak that products of a micro-batch of so many tokens reach."""
    device = cluster.device
    measured = CPU_MEASURED_SHARE if device.kind == "cpu" else MEASURED_SHARE
    reached = 0.0 if layout.precision == "fp32" else device.half_frozen if work.lora else device.half_trained
    if reached:
        measured = min(measured, reached / device.half_flops)
    fitted = rates.matmul.get(device.name) or rates.matmul.get(device.generation, 0.5)
    best = measured if device.measured else fitted
    best *= device.threads_share
    return best / (1 + rates.half_tokens / max(1.0, tokens)) if device.kind == "cuda" else best


def _pass_seconds(work: Work, layout: Layout, cluster: Cluster, load: Load, rates: Rates) -> tuple[float, float, float]:
    """(matrix products, attention, element-wise) of the forward pass of one micro-batch on one rank."""
    device = cluster.device
    cores = cluster.per_node if device.kind == "cpu" else 1
    matmul, attention = forward_flops_per_token(work.shape, round(load.length))
    if work.shape.writes_scores:  # of all pairs, and what lies to the right is thrown away
        attention *= 2
    cut = layout.tp * layout.pp * layout.sp / slowest_stage(work, layout)
    head = work.shape.num_head or work.shape.num_embedding
    matmul += cut * deepspeed.head_again(work, head, layout.tp)
    kept, _ = activation_bytes_per_token(work, layout, round(load.length), with_remade=True)
    touches = rates.touches * (COMPILED_TOUCHES if layout.compile else 1.0)
    if device.kind == "cpu" and work.lora is not None:
        kept += _thin_bytes(work, layout) / touches
    touched = touches * kept * work.shape.num_layers * slowest_stage(work, layout) / layout.pp / layout.sp
    if layout.precision == "fp8":
        per_token, per_pass = rounding_bytes(work.shape)
        # Both passes' together, of which the backward pass is counted below as twice the forward pass.
        rounded = (per_token + per_pass / max(1.0, load.computed)) / (1 + TOUCHES_BACKWARD)
        touched += rounded * (COMPILED_TOUCHES if layout.compile else 1.0) / cut
    share = _matmul_share(work, layout, cluster, load.computed / layout.sp, rates)
    return (
        load.computed * _products(work, layout, cluster, matmul) / cut / share,
        load.computed * attention / cut / _attention_flops(work, layout, cluster, rates, share),
        load.computed * touched * cores / (device.memory_bytes_per_s * MEMORY_SHARE),
    )


def _thin_bytes(work: Work, layout: Layout) -> float:
    """Of a token in a layer: adapters' products read what comes in, and what goes out is read and written once more.
    On GPUs the rates fitted to published runs have that in them."""
    assert work.lora is not None
    adapted = adapted_linears(work.shape, work.lora) + work.shape.expert_adapters(work.lora.targets)
    numbers = sum(one.num_in + 2 * one.num_out for one in adapted)
    return (4.0 if layout.precision == "fp32" else 2.0) * numbers


def _attention_flops(work: Work, layout: Layout, cluster: Cluster, rates: Rates, share: float) -> float:
    """What one rank's attention reaches per second: as it was measured, else as a share of products' peak."""
    device = cluster.device
    cores = cluster.per_node if device.kind == "cpu" else 1
    narrow = is_narrow(work, layout)
    near = rates.attention.get(device.generation, 0.5 * share)
    if work.shape.writes_scores:  # by products alone, not by the kernels that were measured
        return device.peak_flops(layout.precision) * near / cores
    measured = device.half_attention if narrow else device.fp32_attention if layout.precision == "fp32" else 0.0
    if has_own_attention(work, layout):
        near = NARROW_ATTENTION if narrow else WIDE_ATTENTION
    return (measured or device.peak_flops(layout.precision) * near) / cores


def _products(work: Work, layout: Layout, cluster: Cluster, flops: float) -> float:
    """Seconds per token of products with weights on one rank, at the peak. In fp8 those of the layers have their own
    peak: H100's is 1,979 TFLOP/s beside 989."""
    device = cluster.device
    cores = cluster.per_node if device.kind == "cpu" else 1
    inside = min(flops, 2.0 * fp8_weights(work.shape)) if layout.precision == "fp8" else 0.0
    rest = (flops - inside) / device.peak_flops(layout.precision)
    reached = fp8_share(work.shape) if device.fp8_flops else 1.0
    return cores * (rest + inside / (device.linear_flops(layout.precision) * reached))


def _weights_seconds(work: Work, matmul_s: float) -> float:
    """Of a backward pass, what split schedules put off: products of layers' matrices; adapters' and the head's not."""
    if work.lora is not None or not work.num_total:
        return 0.0
    shape = work.shape
    head = shape.num_head or shape.num_embedding
    share = shape.num_block_linear / max(1, shape.num_block_linear + head)
    return matmul_s * share * work.num_trainable / work.num_total


def _computed_again(work: Work, layout: Layout) -> tuple[float, float]:
    """Of a forward pass, the parts of products with weights and of attention that the backward pass computes again."""
    if layout.recompute != "selective":
        whole = part_of_layers(layout.recompute, shares(work, layout)[0].num_layers)
        return whole, whole
    meant, shape = work.program.selective if work.program else "products", work.shape
    if meant == "all but scores":
        return 0.0, 1.0
    again = sum(linear.num_in * linear.num_out for linear in shape.linears[1::2])
    return (again * shape.num_layers / products(shape) if meant == "every second product" else 0.0), 0.0


def _exposed(
    exchanges: tuple[Exchange, ...],
    cluster: Cluster,
    layout: Layout,
    count: float,
    forward: float,
    backward: float,
    layers: int,
) -> tuple[float, float]:
    """(seconds that nothing hides, seconds in all). Each pass hides its own exchanges, all but the first layer's."""
    total = dict.fromkeys(("forward", "backward", "end", "between"), 0.0)
    for exchange in exchanges:
        total[exchange.when] += exchange.seconds(cluster)
    # DDP and ZeRO-1 exchange once per step, so only the last micro-batch's backward pass can hide it.
    passes = 1.0 if layout.strategy in ("ddp", "zero1") else count
    hidden_forward = min(total["forward"] * (1 - 1 / layers), count * forward)
    hidden_backward = min(total["backward"] * (1 - 1 / layers), passes * backward)
    whole = sum(total.values())
    if cluster.device.kind == "cpu":
        return whole, whole  # the cores that exchange are those that compute
    return whole - hidden_forward - hidden_backward, whole


def _limit(parts: Mapping[str, float], exchanges: tuple[Exchange, ...], cluster: Cluster, step: float) -> str:
    """The step's bottleneck, in words."""
    largest = max(parts, key=lambda name: parts[name])
    if parts["exchange"] > 0.25 * step and exchanges:
        worst = max(exchanges, key=lambda exchange: exchange.seconds(cluster))
        where = cluster.network.name if worst.group.nodes > 1 else cluster.link.name
        return f"the exchange of {worst.what} over {where}"
    if largest == "memory traffic":
        return "memory bandwidth (element-wise kernels); torch.compile helps"
    if parts["pipeline bubble"] > 0.25 * step:
        return "the pipeline's bubble: more micro-batches per step help"
    if largest == "disk":
        return "the disk, where the optimizer's state lies"
    if largest == LAUNCHES:
        how = "train.compile: reduce-overhead helps, or more tokens at once"
        return f"the host, which launches kernels one by one; {how}"
    if largest == EACH:
        return "what each micro-batch costs whatever its size: larger ones help"
    return {"matrix products": "matrix products (compute-bound)"}.get(largest, largest)
