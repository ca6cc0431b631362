"""What plans count that a layer keeps, beside what layers of each family do keep, on a CPU; of GPUs: tests/promises."""

import pytest
from held_layers import FAMILIES, WAYS, held, held_apart, is_planned, planned, planned_copies

from duoka.model import experts, native
from duoka.plan.compiler import SWITCH, has_kernels

OFTEN = ("llama", "qwen3", "gemma2", "phi3", "gpt_neox", "qwen3_moe", "deepseek_v3")
DROPS = "lora, bf16, dropout"
CASES = [
    pytest.param(family, way, marks=() if family in OFTEN and way != "lora, fp32" else pytest.mark.nightly)
    for family in FAMILIES
    for way in WAYS
    if is_planned(family, way)
]


@pytest.fixture(autouse=True)
def no_filled_rows(monkeypatch):
    """Rows of zeros that fill experts are a share of small batches alone."""
    monkeypatch.setattr(experts, "fills_experts", lambda: False)


@pytest.fixture
def without_kernels(monkeypatch):
    monkeypatch.setenv(SWITCH, "0")
    native.forget()
    yield
    native.forget()


def compare(family, way):
    found, counted = held(family, way), planned(family, way, has_kernels=has_kernels())
    assert counted == pytest.approx(found, rel=0.02), f"{found / 256:.2f}h held, {counted / 256:.2f}h planned"


@pytest.mark.parametrize(("family", "way"), CASES)
def test_a_layer_keeps_what_is_planned(family, way):
    compare(family, way)


@pytest.mark.parametrize(
    ("family", "way"),
    [case if "bf16" in case.values[1] else pytest.param(*case.values, marks=pytest.mark.nightly) for case in CASES],
)
def test_and_without_compiled_kernels(family, way, without_kernels):
    compare(family, way)


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt", "qwen2_moe"])
def test_dropout_of_adapters_keeps_nothing(family):
    """Also where rows and tokens come in one dim: OPT's MLP and shared experts kept a quarter and a tenth more."""
    compare(family, DROPS)


@pytest.mark.parametrize(
    ("family", "way"),
    [("llama", "full, bf16"), ("llama", "lora, bf16"), ("qwen3_moe", "lora, bf16"), ("qwen3_moe", "lora, fp32")],
)
def test_copies_of_weights_are_planned_too(family, way):
    """Autocast's, and what PEFT makes of routers and their adapters."""
    assert planned_copies(family, way) == pytest.approx(held_apart(family, way)[1], rel=0.01)


@pytest.mark.parametrize("way", ["full, bf16", "lora, bf16"])
def test_what_deepspeed_s_stage_3_hands_on_is_kept(way):
    """Each module gets another tensor in place of what the one before gave: nothing is known of how it was made."""
    found, counted = (
        held("llama", way, is_hooked=True),
        planned("llama", way, has_kernels=has_kernels(), is_hooked=True),
    )
    assert counted == pytest.approx(found, rel=0.02), f"{found / 256:.2f}h held, {counted / 256:.2f}h planned"
    assert counted > 1.1 * planned("llama", way, has_kernels=has_kernels())
