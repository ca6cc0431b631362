"""What 8-bit products change in a plan: which weights have them, how fast they are, what rounding reads and writes.

Which and what is counted from model/fp8.py, operator by operator.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from duoka.plan.sizes import Linear, ModelShape

# Of the share that 16-bit products reach of their peak, what 8-bit ones reach of theirs: torchtitan's Llama 3.1 8B on
# 8 H100, compiled, at 6,667 and 8,532 tokens/s a GPU (its page on performance). Two more pairs judge it in the tests.
FP8_SHARE = 0.82
# Narrower models reach less, by the root of their width: one of 2,048 numbers gained 9% on an H200 (benchmarks/gpu.md),
# where 4,096 and 8,192 gained 28% and 36%.
_WHOLE_WIDTH = 4096
STEP = 16  # as in model/fp8.py; a test holds the two together
# Of a number in 16 bits: read for the largest, read again and written in 8.
_ROUND = 5
_TURN = 2  # read and written in 8 bits, for the kernel wants columns


def fp8_weights(shape: ModelShape) -> int:
    """Weights of the layers' linear modules that are multiplied in 8 bits: not experts, routers, head."""
    if shape.experts is None:
        return shape.num_layers * _fitting(shape.linears)
    dense = shape.num_dense_layers * _fitting(shape.dense_linears or shape.linears)
    return shape.experts.num_layers * _fitting(shape.linears) + dense


def fp8_share(shape: ModelShape) -> float:
    return FP8_SHARE * min(1.0, math.sqrt(shape.hidden_size / _WHOLE_WIDTH))


def _fitting(linears: Iterable[Linear]) -> int:
    return sum(one.num_in * one.num_out for one in linears if one.num_in % STEP == one.num_out % STEP == 0)


def rounding_bytes(shape: ModelShape) -> tuple[float, float]:
    """(per token, per micro-batch) in both passes over all layers: read and written to make 8-bit operands.

    Of activations and their gradients per token, each turned over for the weights' gradients; of weights, which become
    bf16 first (4 + 2), are rounded, and turned over for the inputs' gradients, per micro-batch.
    """
    hidden, query, ffn = shape.hidden_size, shape.q_size, shape.intermediate_size
    gates = 1 + shape.gated
    inputs = 2 * hidden + query + ffn  # q, k and v read one tensor, gate and up too
    gradients = query + 2 * shape.kv_size + hidden + gates * ffn + hidden
    per_token = (_ROUND + _TURN) * (inputs + gradients) + _ROUND * ffn  # the MLP's inside is rounded again
    return shape.num_layers * per_token, (6 + _ROUND + _TURN) * fp8_weights(shape)
