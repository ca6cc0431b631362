"""One table says what computes each part of a step, and why no faster one: plans guess, runs look and try."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from duoka.config.schema import LoraConfig, RunConfig
from duoka.model import gpu_kernels, native
from duoka.model.build import LossModel, load_model
from duoka.model.fused import apply_fused
from duoka.model.kernels import agree_on_kernels, look
from duoka.model.request import ModelRequest
from duoka.plan.gpu_packages import why_no_liger
from duoka.plan.hardware import Gpu, Machine
from duoka.plan.kernels import LIGER_PARTS, USUAL, Facts, choose_kernels, kernel_sentences, kernels_json
from duoka.plan.layout import Layout
from duoka.plan.picture import plan_lines
from duoka.plan.report import make_plan
from duoka.plan.shape import demo_shape, shape_from_config

MISSING = "liger-kernel is not installed (pip install 'duoka[gpu]')"
GPU = Facts(device="cuda", precision="bf16")
BARE_GPU = replace(GPU, no_liger=dict.fromkeys(LIGER_PARTS, MISSING))
LAUNCH, SLOPE = "torch, all documents in one launch", "in one kernel over each chunk of logits (Triton)"
NORM = "one kernel each way (Triton)"
NARROW = "compiled for this processor"


def by(facts: Facts) -> dict[str, str]:
    return {one.part: one.by for one in choose_kernels(facts)}


def why(facts: Facts) -> dict[str, tuple[str, str]]:
    return {one.part: (one.better, one.why) for one in choose_kernels(facts) if one.why}


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"model": "demo", "data": {"train": ["x"], "max_length": 512}, **sections})


def test_a_gpu_with_all_of_it() -> None:
    assert by(GPU) == {"attention": LAUNCH, "norm": NORM, **dict.fromkeys(LIGER_PARTS, "Liger"), "loss": SLOPE}
    assert not why(GPU)


def test_a_gpu_without_liger_says_how_to_get_it_once() -> None:
    found = by(BARE_GPU)
    assert [found[part] for part in LIGER_PARTS] == ["duoka", "duoka"]
    assert kernel_sentences(choose_kernels(BARE_GPU)) == [
        f"attention: {LAUNCH}; norm: {NORM}; rotation, MLP: duoka; loss: {SLOPE}",
        f"rotation, MLP: not Liger, because {MISSING}",
    ]


def test_a_cpu_without_its_kernels_says_so_in_words_that_read() -> None:
    chosen = choose_kernels(Facts(keeps_products=True))
    assert kernel_sentences(chosen)[1].startswith(f"attention: not {NARROW}, because selective recompute keeps")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("mkl_is_slow", [True, False])
def test_products_are_named_where_they_are_not_torchs_own(
    precision: str, mkl_is_slow: bool, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = config(train={"precision": precision})
    plan = make_plan(asked, demo_shape(), Machine(2, 2**34, 2**34, mkl_is_slow=mkl_is_slow), 1)
    monkeypatch.setattr("duoka.model.kernels.use_onednn", lambda: mkl_is_slow)
    model = LossModel(load_model(ModelRequest(tiny_model, dtype=torch.float32)))
    seen = look(model, asked, Layout(precision=precision), torch.device("cpu"))
    for chosen in (plan.kernels, choose_kernels(seen)):
        named = {one.part: one.by for one in chosen}
        assert ("products" in named) == (mkl_is_slow and precision == "fp32")
        assert "oneDNN" in named.get("products", "oneDNN")


@pytest.mark.parametrize(
    ("changes", "part", "name", "reason"),
    [
        ({"keeps_products": True}, "rotation", "duoka", "selective recompute keeps the products"),
        ({"keeps_products": True}, "MLP", "Liger", ""),
        ({"keeps_products": True, "adapters": True}, "adapters", "PEFT", "selective recompute"),
        ({"adapters": True}, "adapters", "duoka", ""),
        ({"adapters": True, "adapters_beside_others": True}, "adapters", "PEFT", ""),
        ({"adapters": True, "drops": True}, "dropout", "torch, counted by token", ""),
        ({"no_documents": "it caps its scores"}, "attention", "torch, one call per document", "it caps its scores"),
        ({"no_documents": "it caps its scores", "packing": False}, "attention", "torch", ""),
        ({"no_triton": {"loss": "no Triton"}}, "loss", "torch, over chunks of logits", "no Triton"),
        ({"no_triton": {"norm": "no Triton"}}, "norm", "torch, in one kernel", "no Triton"),
        ({"no_plain_loss": "smoothing"}, "loss", "torch, over chunks of logits", "smoothing"),
        ({"own_logits": True}, "loss", "torch, from the model's own logits", ""),
        ({"has": frozenset({"norm"})}, "MLP", "as the model writes it", ""),
        ({"compiles": True}, "norm", "torch.compile", ""),
        ({"compiles": True, "adapters": True}, "adapters", "torch.compile", ""),
        ({"compiles": True}, "loss", SLOPE, ""),
    ],
)
def test_what_a_gpu_goes_without(changes: dict[str, Any], part: str, name: str, reason: str) -> None:
    facts = replace(GPU, **changes)
    assert by(facts)[part] == name
    assert why(facts).get(part, ("", ""))[1].startswith(reason) and bool(reason) == (part in why(facts))


def test_a_cpu() -> None:
    narrow = Facts(precision="bf16", adapters=True, drops=True)
    assert by(narrow) == {
        **dict.fromkeys(("attention", "norm", *LIGER_PARTS, "loss", "dropout"), NARROW), "adapters": "duoka",
    }  # fmt: skip
    assert not why(narrow)
    without = replace(narrow, no_native="no C++ compiler")
    assert set(why(without)) == {"attention", "norm", *LIGER_PARTS, "loss", "dropout"}
    wide = Facts()
    assert by(wide)["rotation"] == "as the model writes it" and by(wide)["norm"] == "duoka" and not why(wide)
    assert by(wide)["attention"] == NARROW
    assert set(why(replace(wide, no_native="no C++ compiler"))) == {"attention"}


def test_liger_is_switched_off_by_a_variable() -> None:
    assert why_no_liger({"DUOKA_LIGER": "0"}) == "DUOKA_LIGER=0"


def test_a_plan_says_what_will_be_used_if_it_is_installed() -> None:
    gpu = Machine(16, 2**38, 2**37, gpus=(Gpu("H100", 80 * 2**30, 79 * 2**30, 9.0),), no_liger=MISSING)
    plan = make_plan(config(), demo_shape(), gpu, 1)
    text = "\n".join(plan_lines(plan))
    assert "kernels  attention: torch, all documents in one launch" in text and "pip install" in text
    assert {"part": "MLP", "by": "duoka", "better": "Liger", "why": MISSING} in plan.to_json()["kernels"]
    there = make_plan(config(), demo_shape(), replace(gpu, no_liger=""), 1)
    assert {"part": "MLP", "by": "Liger"} in kernels_json(there.kernels)
    on_cpu = make_plan(config(train={"label_smoothing": 0.1}), demo_shape(), Machine(8, 2**36, 2**35, cpu_bf16="x"), 1)
    assert why_of(on_cpu.kernels, "loss") == "train.label_smoothing is 0.1"


@pytest.mark.parametrize(
    ("method", "by"), [("gptq", "PEFT"), ("awq", "PEFT"), ("bitsandbytes", "duoka"), ("", "duoka")]
)
def test_a_plan_knows_whose_adapters_lie_beside_packed_layers(method: str, by: str) -> None:
    """PEFT has classes of its own for layers of GPTQ and AWQ, which stay as they are."""
    facts = {"model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96}
    facts |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    facts |= {"quantization_config": {"quant_method": method, "bits": 4}} if method else {}
    plan = make_plan(config(lora={"rank": 4}), shape_from_config(facts), Machine(8, 2**36, 2**35), 1)
    assert next(one.by for one in plan.kernels if one.part == "adapters") == by


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("has_it", [True, False])
def test_a_plan_knows_whether_attention_is_compiled(precision: str, has_it: bool) -> None:
    """Of a packed row torch makes one call for each document, and their answers are joined into one more tensor."""
    asked = config(train={"precision": precision}, data={"train": ["x"], "packing": True})
    plan = make_plan(asked, demo_shape(), Machine(8, 2**36, 2**35, has_kernels=has_it), 1)
    assert plan.kernels[0].by == (NARROW if has_it else "torch, one call per document")
    assert ("h of attention (packed)" in str(plan.memory)) != has_it


def why_of(chosen: Any, part: str) -> str:
    return next(one.why for one in chosen if one.part == part)


def test_a_run_looks_at_its_model(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, cpu = config(lora={"rank": 4}), torch.device("cpu")
    model = LossModel(load_model(ModelRequest(tiny_model, dtype=torch.float32, lora=LoraConfig(rank=4, dropout=0.0))))
    facts = look(model, settings, Layout(), cpu)
    assert not facts.has and facts.adapters_beside_others
    apply_fused(model.lm)
    facts = look(model, settings, Layout(precision="bf16"), cpu)
    assert facts.has == USUAL and facts.adapters and not facts.own_logits
    assert not facts.adapters_beside_others
    monkeypatch.setattr(native, "why_not", lambda: "no compiler")
    assert look(model, settings, Layout(precision="bf16"), cpu).no_native == "no compiler"
    monkeypatch.setattr("duoka.model.kernels.why_no_kernel", lambda *how, **more: f"{how[1:]} {more}")
    monkeypatch.setattr(gpu_kernels, "TRIED", gpu_kernels.Tried({"MLP": "", "norm": "other"}))  # type: ignore
    found = look(model, settings, Layout(precision="bf16"), torch.device("cuda", 0))
    assert "torch.bfloat16" in found.no_documents
    assert found.no_liger == {"rotation": "not tried", "MLP": ""}
    assert found.no_triton == {"norm": "other", "loss": "not tried"}
    assert look(model, settings, Layout(packing=False), torch.device("cuda", 0)).no_documents == ""
    on_gpu = settings, Layout(precision="bf16"), torch.device("cuda", 0)
    model.core.get_decoder().layers[0].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
    assert look(model, *on_gpu).no_documents == "the model has attention sinks"
    model.core.config.attn_logit_softcapping = 50.0
    assert look(model, *on_gpu).no_documents == "the model caps its scores (softcap)"


def test_ranks_do_without_what_one_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = gpu_kernels.Tried()
    monkeypatch.setattr(gpu_kernels, "TRIED", mine)
    seen: list[Any] = []

    def try_all(device: Any, dtype: Any, sizes: Any, parts: Any) -> None:
        seen.append((dtype, sizes))
        mine.why.update(norm="", rotation="", MLP="here not", loss="")

    monkeypatch.setattr(gpu_kernels, "try_all", try_all)
    monkeypatch.setattr("duoka.model.kernels.has_flash", lambda device: True)  # torch for CUDA would ask a driver
    other = {"norm": "", "rotation": "there not", "MLP": "", "loss": ""}
    agree_on_kernels(
        Layout(precision="bf16"), demo_shape(), torch.device("cuda", 0), lambda own: [own, other]
    )  # fmt: skip
    assert len(seen) == 1 and seen[0][0] is torch.bfloat16 and seen[0][1].words == demo_shape().vocab_size
    assert gpu_kernels.why_not() == {"norm": "", "rotation": "another rank does without", "MLP": "here not", "loss": ""}
