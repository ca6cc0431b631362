"""Floating-point operations of a step, by the formulas that the field uses, each with its name.

MFU compares systems only when both count alike, so every figure carries the formula that it was made with.
N: parameters that a token passes; N-: without the input embedding; A = L * d * s (layers, width of all heads, length).
"""

from __future__ import annotations

from duoka.plan.recipe import Work
from duoka.plan.shape import ModelShape
from duoka.plan.trained_weights import layers_passed

# What duoka prints: products that are really needed, attention only where a token may look.
OWN_FORMULA = "6N- + 6A (no input embedding, causal attention; recompute not counted)"
# Work of attention's backward pass, in forward passes: scores are computed again. MFU counts 2, as the field does.
ATTENTION_BACKWARD = 2.5


def products(shape: ModelShape) -> int:
    """Weights that multiply one token in a forward pass: N- without norms' small ones left out."""
    return shape.num_active - shape.num_embedding + (shape.vocab_size * shape.hidden_size if shape.tied else 0)


def forward_flops_per_token(shape: ModelShape, length: int) -> tuple[float, float]:
    """(matrix products with weights, attention over what a token may look at)."""
    return 2.0 * products(shape), 4.0 * shape.num_layers * shape.q_size * shape.mean_span(length)


def backward_shares(work: Work) -> tuple[float, float]:
    """(products of the backward pass, in forward passes of them; the share of the layers that it goes through)."""
    if work.train_only is None:
        return (2.0 if work.lora is None else 1.0 + 3.0 * work.num_trainable / work.num_frozen), 1.0
    shape, number = work.shape, products(work.shape)
    head = shape.vocab_size * shape.hidden_size
    layers = layers_passed(shape, work.train_only) / shape.num_layers
    is_embedding_trained = any(name.endswith("embed_tokens") for name in work.train_only.extra)
    trained = work.num_trainable - (shape.num_embedding if is_embedding_trained and not shape.tied else 0)
    return (layers * (number - head) + head) / number + min(1.0, trained / number), layers


def model_flops_per_token(work: Work, length: int) -> float:
    """What training one token needs, recompute not counted: forward once, backward twice (once for frozen weights, and
    not at all below the first weights that are trained)."""
    matmul, attention = forward_flops_per_token(work.shape, length)
    beside = (work.references + work.looks) * (matmul + attention)  # forward only
    if work.train_only is not None:
        share, layers = backward_shares(work)
        return (1 + share) * matmul + (1 + 2 * layers) * attention + beside
    if work.lora is None:
        return 3 * (matmul + attention) + beside
    return 2 * matmul + 6.0 * work.num_trainable + 3 * attention + beside


def palm_flops_per_token(shape: ModelShape, length: int, *, input_embedding: bool = True) -> float:
    """6N + 12A, as in PaLM, nanoGPT and llm-foundry; 6N- + 12A (torchtitan) without the input embedding."""
    number = shape.num_active if input_embedding else products(shape)
    return 6.0 * number + 12.0 * shape.num_layers * shape.q_size * length


def megatron_flops_per_token(shape: ModelShape, length: int) -> float:
    """Megatron's of 2021, for GPT with a feed-forward width of 4h: counts full recompute, so it gives HFU, not MFU."""
    hidden, layers = shape.hidden_size, shape.num_layers
    inside = 1 + length / (6 * hidden) + shape.vocab_size / (16 * layers * hidden)
    return 96.0 * layers * hidden**2 * inside
