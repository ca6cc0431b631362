"""FSDP of one rank on a CPU: weights are read where they lie, and gradients are summed with nobody's."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from duoka.parallel.one_rank import SumOfOne, compute_alone
from duoka.plan.layout import Layout


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def build(mesh, **policy):
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    model = copy.deepcopy(plain)
    for one in (model[0], model[2], model):
        fully_shard(one, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))
    units = [one for one in model.modules() if isinstance(one, FSDPModule)]
    for unit in units:
        unit.set_force_sum_reduction_for_comms(True)
    return plain, model, compute_alone(units)


def learn(plain, model, sums):
    """Three micro-batches on both; the addresses that a layer computed with."""
    seen = []
    model[2].register_forward_hook(lambda module, *_: seen.append(module.weight.data_ptr()), prepend=True)
    for number in range(3):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(number))
        plain(x).square().sum().backward()
        sums.begin()
        model(x).square().sum().backward()
    return seen


def test_weights_are_used_where_they_lie_and_gradients_are_the_plain_ones(mesh):
    plain, model, sums = build(mesh)
    shards = [parameter.to_local() for parameter in model.parameters()]
    seen = learn(plain, model, sums)
    assert seen == [model[2].weight.to_local().data_ptr()] * 3 == [shards[2].data_ptr()] * 3
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.detach(), other.to_local()), "a shard was changed, or its memory was given back"
        assert torch.equal(one.grad, other.grad.to_local())
    with torch.no_grad():  # a step in place is what the next pass computes with
        for parameter in (*plain.parameters(), *model.parameters()):
            parameter.mul_(2)
    x = torch.ones(1, 6)
    assert torch.equal(plain(x), model(x))


def test_layers_in_half_precision_cast_their_weights(mesh):
    plain, model, sums = build(mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    seen = learn(plain, model, sums)
    assert model[2].weight.to_local().data_ptr() not in seen
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.detach(), other.to_local()) and other.grad.to_local().dtype is torch.float32
        assert (one.grad - other.grad.to_local()).norm() < 0.02 * one.grad.norm()


def test_a_weight_that_is_a_piece_of_a_larger_memory_is_copied(mesh):
    plain, model, sums = build(mesh)
    room = torch.zeros(100)
    place = room[10:34].view(3, 8).copy_(model[2].weight.to_local())
    whole = torch.nn.Parameter(dist.tensor.DTensor.from_local(place, mesh, model[2].weight.placements))
    model.load_state_dict({"2.weight": whole}, strict=False, assign=True)
    assert model[2].weight.to_local().data_ptr() == place.data_ptr()
    seen = learn(plain, model, sums)
    assert place.data_ptr() not in seen
    assert torch.equal(plain[2].weight.grad, model[2].weight.grad.to_local())


def test_a_pass_that_ended_in_the_middle_leaves_nothing_for_the_next():
    sums = SumOfOne()
    ask = {"dtype": torch.float32, "device": torch.device("cpu")}
    first = sums.allocate((4,), **ask)
    assert sums.allocate((4,), **ask) is first and sums.allocate((4,), **ask) is not first
    sums.begin()
    second = sums.allocate((4,), **ask)
    assert sums.allocate((4,), **ask) is second


def test_which_layouts_have_one_shard():
    assert Layout(strategy="fsdp").has_one_shard and Layout(strategy="hsdp").has_one_shard
    assert not any(Layout(strategy=name).has_one_shard for name in ("single", "zero1", "zero2"))
    assert not any(Layout(strategy="fsdp", **axis).has_one_shard for axis in ({"dp": 2}, {"tp": 2}, {"sp": 2}))
