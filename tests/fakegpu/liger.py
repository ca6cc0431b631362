"""Liger's Functions and duoka's kernels as a GPU sees them: one launch each, which computes nothing here."""

from unittest import mock

import torch

from duoka.model import gpu_kernels

_LIKE = {  # what an operator gives, each answer as one of its arguments
    "triton_norm_backward(Tensor grad, Tensor x, Tensor w) -> (Tensor, Tensor)": (1, 2),
    "liger_turn(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor, Tensor)": (0, 1),
    "liger_product(Tensor a, Tensor b) -> Tensor": (0,),
    "liger_product_backward(Tensor grad, Tensor a, Tensor b) -> (Tensor, Tensor)": (1, 2),
    "liger_loss(Tensor logits, Tensor labels) -> Tensor": (),
}


def _like(places, *args):
    found = tuple(torch.empty_like(args[place]) for place in places)
    return (found if len(found) > 1 else found[0]) if found else args[0].new_empty(len(args[0]), dtype=torch.float32)


def _define():
    library = torch.library.Library("duoka_stand_in", "DEF")
    library.define("triton_norm(Tensor x, Tensor w, ScalarType to) -> Tensor")
    library.impl("triton_norm", lambda x, w, to: torch.empty_like(x, dtype=to), "Meta")
    for schema, places in _LIKE.items():
        library.define(schema)
        library.impl(schema.partition("(")[0], lambda *args, places=places: _like(places, *args), "Meta")
    _define.kept = library


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, dtype):
        ctx.save_for_backward(x, weight)
        return torch.ops.duoka_stand_in.triton_norm(x, weight, dtype)

    @staticmethod
    def backward(ctx, grad):
        slopes = torch.ops.duoka_stand_in.triton_norm_backward(grad.contiguous(), *ctx.saved_tensors)
        return *slopes, None, None


class Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        return torch.ops.duoka_stand_in.liger_turn(q, k, cos, sin)

    @staticmethod
    def backward(ctx, dq, dk):
        return *torch.ops.duoka_stand_in.liger_turn(dq, dk, *ctx.saved_tensors), None, None


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return torch.ops.duoka_stand_in.liger_product(a, b)

    @staticmethod
    def backward(ctx, grad):
        return torch.ops.duoka_stand_in.liger_product_backward(grad.contiguous(), *ctx.saved_tensors)


_FUNCTIONS = {"RmsNorm": Norm, "LigerRopeFunction": Turn, "LigerSiLUMulFunction": Product}


def installed(parts):
    """While this is on, these parts of the kernels' table were tried and found right."""
    if not hasattr(_define, "kept"):
        _define()
    return mock.patch.multiple(
        gpu_kernels,
        TRIED=gpu_kernels.Tried(dict.fromkeys(parts, "")),
        find_function=lambda name: _FUNCTIONS[name],
        cross_entropy_=lambda logits, labels: torch.ops.duoka_stand_in.liger_loss(logits, labels),
    )
