"""What goes along rows in layers with a state, and its gradients, beside what defines it, in fp64."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from held_layers import kept_under_autocast
from needs import since

from duoka.model import chunk_scan, convolution, native, selective_scan
from duoka.model.own_states import with_own_scan

ROWS = 2


def some(generator, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=generator).to(dtype)


def compare(inputs, own, wanted, weights, tolerance):
    slopes = [torch.autograd.grad((answer * weights).sum(), inputs) for answer in (own, wanted)]
    for ours, theirs in zip((own, *slopes[0]), (wanted, *slopes[1]), strict=True):
        assert (ours - theirs).norm().item() < tolerance * max(1.0, theirs.norm().item())


# --- Mamba 2 ---

HEADS, DIM, SIZE = 6, 8, 12


def draw_heads(tokens, groups, dtype=torch.float32):
    generator = torch.Generator().manual_seed(tokens)
    inputs = [
        some(generator, ROWS, tokens, HEADS, DIM, dtype=dtype),
        some(generator, ROWS, tokens, HEADS, dtype=dtype),
        -some(generator, HEADS).exp(),
        some(generator, ROWS, tokens, groups, SIZE, dtype=dtype) / 2,
        some(generator, ROWS, tokens, groups, SIZE, dtype=dtype) / 2,
        some(generator, HEADS),
        some(generator, HEADS),
    ]
    return [one.requires_grad_() for one in inputs], some(generator, ROWS, tokens, HEADS, DIM)


def heads_by_definition(x, dt, A, B, C, D, bias, limits):
    x, dt, A, B, C, D, bias = (one.double() for one in (x, dt, A, B, C, D, bias))
    steps = F.softplus(dt + bias).clamp(*limits)
    B, C = (one.repeat_interleave(HEADS // one.shape[2], dim=2) for one in (B, C))
    state = torch.zeros(ROWS, HEADS, SIZE, DIM, dtype=torch.double)
    answers = []
    for t in range(x.shape[1]):
        written = torch.einsum("bhn,bhp->bhnp", B[:, t], x[:, t] * steps[:, t, :, None])
        state = state * (steps[:, t] * A).exp()[..., None, None] + written
        answers.append(torch.einsum("bhn,bhnp->bhp", C[:, t], state) + D[:, None] * x[:, t])
    return torch.stack(answers, dim=1)


def never(*_args, **_named):
    raise AssertionError("transformers' function was called")


def own_heads(inputs, limits):
    x, dt, A, B, C, D, bias = inputs
    scan = chunk_scan.in_place_of(never)
    return scan(x, dt, A, B, C, chunk_size=256, D=D, z=None, dt_bias=bias, dt_softplus=True, dt_limit=limits)


@pytest.mark.parametrize("tokens", [1, 5, 64, 150])
@pytest.mark.parametrize("groups", [1, 2, HEADS])
@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.3, 1.0)])
def test_chunks_of_mamba_2_give_what_it_gives_token_by_token(monkeypatch, tokens, groups, limits):
    monkeypatch.setitem(chunk_scan.AT_ONCE, "cpu", ROWS * tokens * DIM * 2)  # two heads at once
    inputs, weights = draw_heads(tokens, groups)
    compare(inputs, own_heads(inputs, limits), heads_by_definition(*inputs, limits), weights, 2e-6)


def test_mamba_2_keeps_what_it_reads_under_autocast():
    limits = (0.0, float("inf"))
    inputs, weights = draw_heads(130, 2, torch.bfloat16)
    answer, kept = kept_under_autocast(lambda: own_heads(inputs, limits))
    read = sum(inputs[place].nbytes for place in (0, 3, 4, 5))
    each = 4 * ROWS * 130 * HEADS  # of each head's step: before softplus, it, and its decay; A for that
    assert kept <= read + 5 * each + HEADS * 8
    assert answer.dtype is torch.bfloat16
    compare(inputs, answer, heads_by_definition(*inputs, limits), weights, 6e-3)


# --- Mamba 1 ---

CHANNELS = 20


def draw_channels(tokens, size, dtype=torch.float32):
    generator = torch.Generator().manual_seed(tokens)
    inputs = [
        some(generator, ROWS, CHANNELS, tokens, dtype=dtype),
        some(generator, ROWS, CHANNELS, tokens, dtype=dtype),
        -some(generator, CHANNELS, size).exp(),
        some(generator, ROWS, tokens, size, dtype=dtype),
        some(generator, ROWS, tokens, size, dtype=dtype),
        some(generator, CHANNELS),
        some(generator, ROWS, CHANNELS, tokens, dtype=dtype),
        some(generator, CHANNELS),
    ]
    return [one.requires_grad_() for one in inputs], some(generator, ROWS, CHANNELS, tokens)


def channels_by_definition(x, dt, A, B, C, D, z, bias):
    x, dt, A, B, C, D, z, bias = (one.double() for one in (x, dt, A, B, C, D, z, bias))
    steps = F.softplus(dt + bias[:, None])
    state, answers = torch.zeros(ROWS, *A.shape, dtype=torch.double), []
    for t in range(x.shape[2]):
        step = steps[:, :, t, None]
        state = state * (step * A).exp() + step * B[:, t, None] * x[:, :, t, None]
        answers.append(((state * C[:, t, None]).sum(-1) + D * x[:, :, t]) * F.silu(z[:, :, t]))
    return torch.stack(answers, dim=2)


def own_channels(inputs):
    x, dt, A, B, C, D, z, bias = inputs
    scan = selective_scan.in_place_of(never)
    return scan(
        x, dt, A, B.transpose(1, 2), C.transpose(1, 2), D=D, z=z, delta_bias=bias, delta_softplus=True,
        return_last_state=False, use_mambapy=False,
    )  # fmt: skip


@pytest.fixture(params=["compiled", "torch"])
def form(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(selective_scan.native, "serves", lambda *tensors: False)
    elif native.find() is None:
        pytest.skip("no C++ compiler: scan.cpp was not compiled")
    return request.param


@pytest.mark.parametrize("tokens", [1, 5, 32, 100])
@pytest.mark.parametrize("size", [16, 5])
def test_mamba_1_gives_what_it_gives_token_by_token(monkeypatch, form, tokens, size):
    monkeypatch.setitem(selective_scan.AT_ONCE, "cpu", ROWS * tokens * size * 8)  # eight channels at once
    inputs, weights = draw_channels(tokens, size)
    compare(inputs, own_channels(inputs), channels_by_definition(*inputs), weights, 2e-6)


def test_mamba_1_keeps_what_it_reads_under_autocast(form):
    inputs, weights = draw_channels(70, 16, torch.bfloat16)
    answer, kept = kept_under_autocast(lambda: own_channels(inputs))
    assert kept == sum(one.nbytes for one in inputs) and answer.dtype is torch.bfloat16
    compare(inputs, answer, channels_by_definition(*inputs), weights, 6e-3)


def test_threads_change_no_bit_of_the_compiled_scan():
    if native.find() is None:
        pytest.skip("no C++ compiler: scan.cpp was not compiled")
    inputs, weights = draw_channels(70, 16)
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            answer = own_channels(inputs)
            results.append((answer, *torch.autograd.grad((answer * weights).sum(), inputs)))
    finally:
        torch.set_num_threads(before)
    # The last are sums that torch adds up.
    assert all(torch.equal(*pair) for pair in list(zip(*results, strict=True))[:6])


# --- the convolution ---


def draw_row(tokens, taps, dtype=torch.float32):
    """The middle of what a wider product gives."""
    generator = torch.Generator().manual_seed(tokens)
    inputs = [some(generator, ROWS, tokens, 150, dtype=dtype), some(generator, 130, taps), some(generator, 130)]
    return [one.requires_grad_() for one in inputs], some(generator, ROWS, 130, tokens)


def own_convolution(inputs, activation):
    product, weight, bias = inputs
    convolve = convolution.in_place_of(never)
    return convolve(product[..., 7:137].transpose(1, 2), weight, bias, activation=activation)


def convolution_by_definition(product, weight, bias, activation):
    product, weight, bias = (one.double() for one in (product, weight, bias))
    x, taps = product[..., 7:137].transpose(1, 2), weight.shape[1]
    answers = []
    for t in range(x.shape[2]):
        near = F.pad(x, (taps, 0))[..., t + 1 : t + 1 + taps]
        answers.append((near * weight).sum(-1) + bias)
    answer = torch.stack(answers, dim=2)
    return answer if activation is None else F.silu(answer)


needs_compiler = pytest.mark.skipif(native.find() is None, reason="no C++ compiler")


@needs_compiler
@pytest.mark.parametrize("tokens", [1, 3, 70])
@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("activation", ["silu", None])
def test_a_short_convolution_gives_what_defines_it(tokens, taps, activation):
    inputs, weights = draw_row(tokens, taps)
    own, wanted = own_convolution(inputs, activation), convolution_by_definition(*inputs, activation)
    compare(inputs, own, wanted, weights, 1e-6)


@needs_compiler
def test_a_short_convolution_keeps_the_product_that_it_reads():
    inputs, weights = draw_row(70, 4, torch.bfloat16)
    answer, kept = kept_under_autocast(lambda: own_convolution(inputs, "silu"))
    assert kept == 2 * ROWS * 70 * 130 + sum(one.nbytes for one in inputs[1:])
    compare(inputs, answer, convolution_by_definition(*inputs, "silu"), weights, 6e-3)


def test_other_convolutions_are_left_to_transformers():
    inputs, _ = draw_row(9, 4)
    x = inputs[0][..., 7:137].transpose(1, 2)
    convolve = convolution.in_place_of(lambda *given, **named: "theirs")
    assert convolve(x, inputs[1], None, activation="gelu") == "theirs"
    assert convolve(x, torch.ones(130, 9), None) == "theirs"
    assert convolution.in_place_of(None) is None


# --- where they are called ---

LAYERS = {
    "mamba": "MambaMixer",
    "falcon_mamba": "FalconMambaMixer",
    "jamba": "JambaMambaMixer",
    "zamba": "ZambaMambaMixer",
    "mamba2": "Mamba2Mixer",
    "bamba": "BambaMixer",
    "falcon_h1": "FalconH1Mixer",
    "granitemoehybrid": "GraniteMoeHybridMambaLayer",
    "nemotron_h": "NemotronHMamba2Mixer",
    "zamba2": "Zamba2MambaMixer",
}


@since(transformers="5.24")  # before, the scan is written in the layer's own forward
@pytest.mark.parametrize("family", LAYERS)
def test_layers_of_transformers_call_them(family):
    kind = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), LAYERS[family])
    assert with_own_scan(kind.forward) is not kind.forward


def test_a_cache_is_left_to_transformers():
    def theirs(*_args, **named):
        return named

    x = torch.zeros(1)
    named = chunk_scan.in_place_of(theirs)(x, x, x, x, x, 8, D=x, dt_softplus=True, return_final_states=True)
    assert named["return_final_states"] and named["dt_softplus"] and named["D"] is x
    named = selective_scan.in_place_of(theirs)(x, x, x, x, x, D=x, z=x, delta_bias=x, return_last_state=True)
    assert named["return_last_state"] and named["z"] is x
    assert chunk_scan.in_place_of(None) is None and selective_scan.in_place_of(None) is None
