"""AdamW on bf16 that rounds at random: its hash, its chances and its arithmetic beside ones written anew here."""

import contextlib
import hashlib
import math
import struct

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from duoka.config.schema import OptimConfig
from duoka.model import native
from duoka.model.dropout import place_key
from duoka.optim import narrow
from duoka.optim.build import build_optimizer, make_state
from duoka.optim.clip import clip_gradients
from duoka.optim.narrow import NarrowAdamW
from duoka.torch_private import fake_store

BF16 = torch.bfloat16
LAST_BIT = 2**-7  # of a bf16 number, relative, at most: so far apart are neighbors
FORMS = ("compiled", "torch")


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(native, "serves", lambda *tensors, attention=False: False)
        monkeypatch.setattr(narrow, "CHUNK", {"cpu": 64})  # several chunks of each tensor
    elif native.find() is None:
        pytest.skip("NO C++ COMPILER: the compiled update was not tried")
    return request.param


def draw(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * scale


def optimizer_of(weight, name="layer.weight", **settings):
    config = OptimConfig(**{"lr": 1e-2, "weight_decay": 0.1, **settings})
    made = build_optimizer({name: weight}, config)
    assert isinstance(made, NarrowAdamW)
    return made


def step(weight, grad, times=1, **settings):
    """The weight and its moments after so many steps with the same gradient."""
    parameter = torch.nn.Parameter(weight.clone().to(BF16))
    optimizer = optimizer_of(parameter, **settings)
    for _ in range(times):
        parameter.grad = grad.clone().to(BF16)
        optimizer.step()
    return parameter.detach(), optimizer.state[parameter]


# --- an oracle for the noise: Python's whole numbers, bit by bit ---


def signed(value):
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value


def noise_of(name, step, place):
    key = int.from_bytes(hashlib.blake2b(f"{name}/{step}".encode(), digest_size=8).digest(), "little")
    value = signed(key + place * 0x9E3779B97F4A7C15)
    value = signed((value ^ (value >> 32)) * 0xBF58476D1CE4E5B9)
    value = signed((value ^ (value >> 29)) * 0x94D049BB133111EB) % 2**64
    return value & 0xFFFF, value >> 16 & 0xFFFF, value >> 32 & 0xFFFF


def rounded(value, noise):
    bits = struct.unpack("<I", struct.pack("<f", np.float32(value)))[0]
    return struct.unpack("<f", struct.pack("<I", (bits + noise) >> 16 << 16))[0]


def test_the_first_step_is_what_whole_numbers_say(form):
    """After one step from zero, moments are (1 - beta) g and (1 - beta) g g: no rounding error hides in them."""
    grad = draw(7, 33, seed=1).to(BF16)
    _, state = step(draw(7, 33), grad, betas=[0.75, 0.9375])  # whose complements fp32 has exactly
    got_first, got_second = state["exp_avg"].float().flatten(), state["exp_avg_sq"].float().flatten()
    for place, slope in enumerate(grad.float().flatten().tolist()):
        _, first, second = noise_of("layer.weight", 1, place)
        assert got_first[place] == rounded(np.float32(slope) * np.float32(0.25), first), place
        assert got_second[place] == rounded(np.float32(slope) * np.float32(slope) * np.float32(0.0625), second), place


def test_steps_are_adamw_s_but_for_the_last_bit(form):
    weight, grad = draw(40, 24).to(BF16), draw(40, 24, seed=1).to(BF16)
    exact = torch.nn.Parameter(weight.double())
    told = OptimConfig()
    oracle = torch.optim.AdamW([exact], lr=1e-2, weight_decay=0.1, eps=told.eps, betas=told.betas)
    exact.grad = grad.double()
    oracle.step()
    got, state = step(weight, grad)
    for ours, theirs in (
        (got, exact), (state["exp_avg"], oracle.state[exact]["exp_avg"]),
        (state["exp_avg_sq"], oracle.state[exact]["exp_avg_sq"]),
    ):  # fmt: skip
        far = (ours.double() - theirs.detach()).abs() / theirs.detach().abs().clamp(min=1e-30)
        assert float(far.max()) < LAST_BIT * 1.01


def test_steps_below_the_last_bit_arrive_in_the_mean(form):
    """100 steps of 1e-4 on weights of 1, whose neighbors are 0.996 and 1.008: to the nearest, none would move."""
    weight, grad = torch.ones(64, 64), torch.full((64, 64), 0.5)
    got, _ = step(weight, grad, times=100, lr=1e-4, weight_decay=0.0)
    moved = 1.0 - got.double()
    assert abs(float(moved.mean()) - 100e-4) < 4 * float(moved.std()) / 64  # four standard errors
    assert 0.009 < float(moved.mean()) < 0.011
    nearest = torch.ones(64, 64, dtype=BF16)
    for _ in range(100):
        nearest -= 1e-4
    assert float(nearest.min()) == 1.0


def test_both_forms_round_alike():
    if native.find() is None:
        pytest.skip("NO C++ COMPILER: the compiled update was not tried")
    weight, grad = draw(300, 41), draw(300, 41, seed=1)
    compiled = step(weight, grad, times=3)
    serves, native.serves = native.serves, lambda *tensors, attention=False: False
    try:
        plain = step(weight, grad, times=3)
    finally:
        native.serves = serves
    # Sums of fp32 in another order move a few numbers over the edge of a chance.
    assert float((compiled[0] == plain[0]).float().mean()) > 0.995
    far = (compiled[0].float() - plain[0].float()).abs() / plain[0].float().abs()
    assert float(far.max()) < 2 * LAST_BIT


def test_a_rank_s_rows_round_as_they_do_in_the_whole(form, monkeypatch):
    weight, grad = draw(12, 20), draw(12, 20, seed=1)
    whole, _ = step(weight, grad, times=2)
    monkeypatch.setattr(narrow, "stretches", lambda parameter, numbers: [(5 * 20, numbers)])
    part, _ = step(weight[5:9], grad[5:9], times=2)
    assert torch.equal(part, whole[5:9])


@contextlib.contextmanager
def third_of_four():
    dist.init_process_group("fake", rank=2, world_size=4, store=fake_store())
    try:
        mesh = init_device_mesh("cpu", (4,))
        yield lambda whole, dim: DTensor.from_local(
            whole.chunk(4, dim)[2].contiguous(), mesh, [Shard(dim)], run_check=False
        )
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dim", [0, 1])
def test_stretches_are_where_a_rank_s_part_lies_in_the_whole(dim):
    """Of rows of a matrix's experts too, which are not one behind the other."""
    with third_of_four() as share:
        shared = share(torch.arange(8 * 12 * 5).view(8, 12, 5), dim)
        part = shared.to_local()
        found = list(narrow.stretches(shared, (part, -part)))
    assert len(found) == (1 if dim == 0 else 8)
    for first, (numbers, others) in found:
        assert numbers.flatten().tolist() == list(range(first, first + numbers.numel()))
        assert torch.equal(others, -numbers)
    assert sum(numbers.numel() for _, (numbers, _) in found) == part.numel()


@pytest.mark.parametrize("dim", [0, 1])
def test_a_rank_s_part_of_experts_learns_the_bits_that_it_learns_in_the_whole(form, dim):
    weight, grad = draw(8, 12, 20), draw(8, 12, 20, seed=1)
    whole, _ = step(weight, grad, times=2)
    with third_of_four() as share:
        part, _ = step(share(weight, dim), share(grad, dim), times=2)
        assert torch.equal(part.to_local(), whole.chunk(4, dim)[2])


def test_noise_is_another_in_each_step_and_parameter():
    assert len({place_key(name, step) for name in ("a", "b") for step in range(1, 50)}) == 98


def test_zeros_stay_zeros(form):
    got, state = step(torch.zeros(8, 8), torch.zeros(8, 8), weight_decay=0.0)
    assert not got.any() and not state["exp_avg"].any() and not state["exp_avg_sq"].any()


def test_what_is_not_finite_stays_so():
    no_number = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)  # as GPUs write it
    values = torch.cat([no_number, torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0, 1.001])])
    got = narrow.rounded_at_random(values, torch.full((6,), 0xFFFF)).tolist()
    assert got[1:3] == [math.inf, -math.inf] and math.isnan(got[0]) and math.isnan(got[3])
    assert got[4:] == [1.0, 1.0078125], "what bf16 has stays, what lies between goes up with the largest noise"


def test_wide_parameters_beside_narrow_ones_learn_by_torch_s_own():
    wide, small = torch.nn.Parameter(draw(6, 5)), torch.nn.Parameter(draw(4, 4).to(BF16))
    alone = torch.nn.Parameter(wide.detach().clone())
    optimizer = build_optimizer({"head": wide, "layer": small}, OptimConfig(lr=1e-2))
    own = torch.optim.AdamW([alone], lr=1e-2, weight_decay=OptimConfig().weight_decay, fused=True)
    for _ in range(2):
        wide.grad, alone.grad = draw(6, 5, seed=3), draw(6, 5, seed=3)
        small.grad = draw(4, 4, seed=4).to(BF16)
        optimizer.step()
        own.step()
    assert torch.equal(wide, alone)


def test_state_takes_four_bytes_a_parameter():
    weight = torch.nn.Parameter(draw(16, 16).to(BF16))
    optimizer = optimizer_of(weight)
    make_state(optimizer)
    sizes = [value.nbytes for value in optimizer.state[weight].values() if value.ndim]
    assert sizes == [512, 512]


def test_norms_of_narrow_gradients_are_summed_wide():
    grads = [draw(301, 7, seed=seed).to(BF16) for seed in range(3)]
    parameters = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.clone()
    want = torch.cat([grad.double().flatten() for grad in grads]).norm()
    norm = clip_gradients(parameters, 0.0)
    assert norm.dtype is torch.float32 and abs(float(norm / want) - 1) < 1e-5
