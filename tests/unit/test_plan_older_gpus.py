"""Plans for GPUs before Ampere (T4, V100), which have neither bf16 nor torch's FlashAttention."""

from __future__ import annotations

import pytest
from test_plan_report import H100, V100, config, gpus

from duoka.plan.activations import activation_bytes_per_token
from duoka.plan.hardware import Gpu
from duoka.plan.layout import Layout
from duoka.plan.recipe import Work
from duoka.plan.report import make_plan
from duoka.plan.shape import demo_shape
from duoka.units import Amount

T4 = Gpu("T4", 15 * 2**30, 14 * 2**30, 7.5)
P100 = Gpu("P100", 16 * 2**30, 15 * 2**30, 6.0)


@pytest.mark.parametrize("gpu", [T4, V100])
def test_the_way_to_their_tensor_cores_is_said(gpu: Gpu) -> None:
    plan = make_plan(config(), demo_shape(), gpus(gpu, 1), 1, is_ranked=True)
    assert plan.layout.precision == "fp32" and "fp16 is several times as fast" in plan.reasons["train.precision"]
    change = next(one for one in plan.changes if one.words == "train.precision: fp16")
    assert plan.speed is not None and change.tokens_per_s > 2 * plan.speed.tokens_per_s


def test_and_not_where_there_are_none() -> None:
    assert "fp16" not in make_plan(config(), demo_shape(), gpus(P100, 1), 1).reasons["train.precision"]
    written = make_plan(config(train={"precision": "fp32"}), demo_shape(), gpus(H100, 1), 1, is_ranked=True)
    assert "train.precision: bf16" in [one.words for one in written.changes]


def test_they_attend_to_one_document_at_a_time() -> None:
    plans = [
        make_plan(
            config(train={"precision": "fp16"}, data={"train": ["x"], "packing": True}), demo_shape(), gpus(gpu, 1), 1
        )
        for gpu in (T4, H100)
    ]
    attention = [next(one for one in plan.kernels if one.part == "attention") for plan in plans]
    assert [one.by for one in attention] == ["torch, one call per document", "torch, all documents in one launch"]
    assert "compute capability 8" in attention[0].why


def test_heads_that_share_keys_get_their_own_there() -> None:
    """9 heads and 3 of keys and values, 64 wide; and documents' outputs are joined."""
    shape, layout = demo_shape(), Layout(precision="fp16", micro=Amount(2048, "tokens"))
    old, new = (
        activation_bytes_per_token(Work(shape, None, "cuda", has_flash=has_it), layout, 2048)[0]
        for has_it in (False, True)
    )
    assert old - new == 2 * 2 * (9 - 3) * 64 + 2 * 9 * 64
