"""Weights that DeepSpeed gathered and let go of between the passes: kept as views to be taken again, not as memory."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from duoka.parallel.deepspeed_saved import KeptViews


def test_a_weight_that_is_let_go_between_the_passes_takes_no_memory_and_gives_the_same_gradients():
    weight = torch.nn.Parameter(torch.randn(6, 4))
    rows = torch.randn(3, 4, requires_grad=True)
    wanted = torch.autograd.grad(torch.nn.functional.linear(rows, weight).square().sum(), (rows, weight))
    weight.ds_tensor, weight.ds_numel = weight.detach().clone().view(-1), weight.numel()
    with KeptViews():
        loss = torch.nn.functional.linear(rows, weight).square().sum()
    held = StorageWeakRef(weight.untyped_storage())
    values = weight.detach().clone()
    weight.data = torch.empty(0)
    assert held.expired(), "the product still holds the gathered weight"
    weight.data = values
    for found, right in zip(torch.autograd.grad(loss, (rows, weight)), wanted, strict=True):
        assert torch.equal(found, right)
