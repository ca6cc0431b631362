"""What plans count that a layer keeps, beside what layers of each family do keep, on a CPU; of GPUs: tests/promises."""

import pytest
from held_layers import FAMILIES, WAYS, held, planned

from duoka.model import experts, native
from duoka.plan.compiler import SWITCH, has_kernels

OFTEN = ("llama", "qwen3", "gemma2", "phi3", "gpt_neox", "qwen3_moe", "deepseek_v3")
CASES = [
    pytest.param(family, way, marks=() if family in OFTEN and way != "lora, fp32" else pytest.mark.nightly)
    for family in FAMILIES
    for way in WAYS
]


def compare(family, way, monkeypatch):
    # Rows of zeros that fill experts are a share of small batches alone.
    monkeypatch.setattr(experts, "fills_experts", lambda: False)
    found, counted = held(family, way), planned(family, way, has_kernels=has_kernels())
    assert counted == pytest.approx(found, rel=0.02), f"{found / 256:.2f}h held, {counted / 256:.2f}h planned"


@pytest.mark.parametrize(("family", "way"), CASES)
def test_a_layer_keeps_what_is_planned(family, way, monkeypatch):
    compare(family, way, monkeypatch)


@pytest.mark.parametrize(("family", "way"), [case for case in CASES if "bf16" in case.values[1]])
def test_and_without_compiled_kernels(family, way, monkeypatch, request):
    request.addfinalizer(native.forget)
    monkeypatch.setenv(SWITCH, "0")
    native.forget()
    compare(family, way, monkeypatch)
