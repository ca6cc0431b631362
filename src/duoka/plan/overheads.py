"""What each micro-batch costs whatever its size: kernels' launches on GPUs; on CPUs Python and dispatch, weights that
are laid out anew or unpacked, and programs that a library writes for numbers of rows it has not met.

Measured on SmolLM2-135M and on 30 layers of width 64, at 16 to 2,048 tokens (docs/decisions.md).
"""

from __future__ import annotations

import math

from duoka.config.schema import GRAPHS
from duoka.plan import packed_base
from duoka.plan.catalog import Cluster, Device
from duoka.plan.flops import products
from duoka.plan.layout import Layout
from duoka.plan.recipe import Work, shares, slowest_stage
from duoka.plan.shape import ModelShape, adapted_linears

MEMORY_SHARE = 0.80  # of the data sheet's bandwidth, by element-wise kernels
# Of one kernel in eager mode, with the Python around it: below that a GPU waits for the host. Measured of 30 layers of
# SmolLM2-135M's sizes beside one H200: 2.0 to 2.4 ms a layer and forward pass, 2.3 to 3.1 backward, on a slow host; of
# 16 layers on another at most 2.1 (benchmarks/gpu.md). Other programs: as their published runs of small models say.
LAUNCH_S, LAUNCH_OF_OTHERS_S = 35e-6, 6e-6
KERNELS_PER_LAYER, KERNELS_PER_ADAPTER = 45, 4
FP8_KERNELS = 64  # more, to round: counted on the fake GPU (tests/unit/test_gpu_budgets.py), a third of both passes'
# A CPU's layer, both passes, and what each adapter in it adds.
LAYER_S, ADAPTER_S = 2.5e-3, 0.35e-3
# Of each expert that somebody visits, both passes (0.38 ms frozen, 0.56 learning), and of an adapter on one of its two
# products: measured of 8 and 64 experts of width 64.
EXPERT_S, EXPERT_ADAPTER_S = 0.4e-3, 0.2e-3
# For one new number of rows, of all 16-bit products of a model whose head and one layer have so many weights; as the
# root of these: 26, 72, 165 and 300 ms of LoRA at widths of 64, 512, 576 and 2,048, of full fine-tuning less.
PROGRAMS_S, PROGRAMS_OF = 0.15, 30e6
LAID_OUT_BYTES = 6.0  # of a weight in 16 bits: read, written as the product's kernel reads it, and read
CPU_UNPACKED_BYTES = 10.0  # as many are moved in the time that one packed number takes


def launch_s(work: Work, layout: Layout, kind: str) -> float:
    """Of one forward pass: what the host takes to launch its kernels."""
    if kind != "cuda" or layout.compile == GRAPHS:  # one launch a layer and pass
        return 0.0
    per_layer = KERNELS_PER_LAYER + (FP8_KERNELS if layout.precision == "fp8" else 0)
    per_layer += 0 if work.lora is None else KERNELS_PER_ADAPTER * len(adapted_linears(work.shape, work.lora))
    kernels = per_layer * (0.4 if layout.compile else 1.0) * work.shape.num_layers / layout.pp
    return kernels * (LAUNCH_S if work.program is None else LAUNCH_OF_OTHERS_S)


def micro_batches_s(work: Work, layout: Layout, cluster: Cluster, count: float, again: float, is_new: bool) -> float:
    """Of a step's `count` micro-batches, where that part of the forward pass is computed again. `is_new`: each has
    another number of tokens."""
    device, passes = cluster.device, 2 + again
    moved = count * passes * _unpacked_bytes(work, layout, device)
    if device.kind != "cpu":
        return moved / (device.memory_bytes_per_s * MEMORY_SHARE)
    layers = work.shape.num_layers * slowest_stage(work, layout) / layout.pp
    adapters = 0 if work.lora is None else len(adapted_linears(work.shape, work.lora))
    seconds = count * passes / 2 * (layers * (LAYER_S + adapters * ADAPTER_S) + _experts_s(work, layout))
    moved += _widened_bytes(work, layout, count)
    if has_narrow_products(device, layout):
        seconds += count * is_new * PROGRAMS_S * math.sqrt(_kinds_of_weights(work) / PROGRAMS_OF)
        moved += count * passes * LAID_OUT_BYTES * _laid_out(work.shape) / (layout.tp * layout.pp)
    # Ranks of a machine share its memory.
    return seconds + moved * cluster.per_node / (device.memory_bytes_per_s * MEMORY_SHARE)


def _experts_s(work: Work, layout: Layout) -> float:
    """Of all layers that a rank has, once."""
    experts = work.shape.experts
    if experts is None:
        return 0.0
    adapted = 0 if work.lora is None else len({one.name for one in work.shape.expert_adapters(work.lora.targets)})
    each = EXPERT_S + adapted * EXPERT_ADAPTER_S
    return experts.num_layers * experts.num_experts * each / (layout.pp * layout.ep)


def _laid_out(shape: ModelShape) -> int:
    """Weights that a micro-batch multiplies with: some token visits each expert."""
    return products(shape) + (shape.experts.num_layers * shape.experts.num_idle if shape.experts else 0)


def _kinds_of_weights(work: Work) -> float:
    """Those of the head and of one layer: others have the same shapes."""
    shape, head = work.shape, work.shape.vocab_size * work.shape.hidden_size
    return head + (products(shape) - head) / shape.num_layers


def _unpacked_bytes(work: Work, layout: Layout, device: Device) -> float:
    """Of a pass over a base that is packed: each number is read in a few bits and written whole."""
    share = shares(work, layout)[0]
    packed = packed_base.numbers(work.frozen_bits, work.shape, share.block_linear, share.frozen)
    return packed * (CPU_UNPACKED_BYTES if device.kind == "cpu" else work.frozen_bits / 8 + 2.0)


def _widened_bytes(work: Work, layout: Layout, count: float) -> float:
    """Of trained weights in a step: each micro-batch narrows them and widens their gradients, and adds these to the sum
    but for the first. On GPUs the fitted rates have that in them."""
    if work.lora is not None or work.narrow_weights:
        return 0.0
    each = (0.0 if layout.precision == "fp32" else 12.0 * count) + 12.0 * max(0.0, count - 1)
    return each * shares(work, layout)[0].trainable


def has_narrow_products(device: Device, layout: Layout) -> bool:
    """Whether 16-bit products have instructions of their own."""
    return layout.precision not in ("fp32", "fp8") and device.half_flops > device.fp32_flops
