"""Numbers in blocks that share a scale: sizes, bounds, and what is not finite."""

import pytest
import torch

from duoka.comm.blockwise import error_bound, pack, packed_bytes, unpack
from duoka.config.schema import RunConfig


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("count", [1, 255, 256, 257, 1000])
def test_each_number_comes_back_within_half_a_step(bits: int, count: int) -> None:
    torch.manual_seed(0)
    values = torch.randn(3, count) * torch.logspace(-6, 3, count)
    packed = pack(values, bits)
    assert packed.dtype == torch.uint8 and packed.shape == (3, packed_bytes(count, bits))
    back = unpack(packed, torch.empty(3, count), bits)
    for row, came in zip(values, back, strict=True):
        assert ((came - row).abs() <= error_bound(row, bits)).all()
    # A block's largest number has no error but rounding's.
    place = values[0].abs()[:256].argmax()
    assert back[0, place] == pytest.approx(float(values[0, place]), rel=1e-6)


def test_the_largest_block_of_bytes_is_as_small_as_said() -> None:
    assert packed_bytes(1 << 20, 8) / (1 << 20) == pytest.approx(1 + 1 / 64)
    assert packed_bytes(1 << 20, 4) / (1 << 20) == pytest.approx(0.5 + 4 / 64)


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_stay_zeros(bits: int) -> None:
    assert unpack(pack(torch.zeros(1, 300), bits), torch.ones(1, 300), bits).equal(torch.zeros(1, 300))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_seen_by_who_adds_it(bits: int, bad: float) -> None:
    values = torch.randn(1, 600)
    values[0, 5] = bad
    back = unpack(pack(values, bits), torch.empty(1, 600), bits)
    block = 256 if bits == 8 else 64
    assert not back[0, :block].isfinite().any() and back[0, block:].isfinite().all()


def test_half_precision_goes_in_and_out() -> None:
    values = torch.randn(2, 512).bfloat16()
    back = unpack(pack(values, 8), torch.empty(2, 512, dtype=torch.bfloat16), 8)
    assert (back.float() - values.float()).abs().max() < 0.02 * values.float().abs().max()


def test_a_block_that_says_no_more_than_a_word_is_the_word() -> None:
    def parallel(compress):
        raw = {"model": "demo", "data": {"train": ["identity"]}, "parallel": {"compress": compress, "strategy": "ddp"}}
        return RunConfig.model_validate(raw).parallel

    assert parallel({"gradients": "powersgd"}) == parallel("powersgd")
    assert parallel({}).compress == "none"
    assert str(parallel({"weights": "int8", "gradients": "bf16"}).compress) == "weights: int8, gradients: bf16"
    assert parallel("bf16").compression.gradients == "bf16"
