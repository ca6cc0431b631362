"""Compiled layers: one graph each with packed rows, compiled once for rows of one length, and as CUDA graphs if asked.

No GPU was there: torch's kernel for documents is stood in for, and backends trace without compiling anything.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from needs import since
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import duoka.model.attention as room
import duoka.parallel.apply as apply
from duoka.config.schema import GRAPHS, ParallelConfig
from duoka.errors import ConfigError
from duoka.model.attention import NAME, attend_all_documents, register_attention
from duoka.model.build import LossModel
from duoka.model.documents import Documents
from duoka.parallel.mesh import Mesh
from duoka.plan.layout import Layout

SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip
FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
TOKENS = 40
LENGTHS = ((40,), (11, 29), (3, 5, 30, 2), (8, 8, 8, 8, 8))


def dense(query, key, value, from_, to, longest, longest_too, *, scale, window_size, enable_gqa):
    """What torch's kernel for documents of any length gives."""
    place = torch.arange(query.shape[0])
    document = torch.bucketize(place, from_.long(), right=True)
    seen = (document[:, None] == document[None, :]) & (place[:, None] >= place[None, :])
    heads = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]
    return F.scaled_dot_product_attention(*heads, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)[0].transpose(0, 1)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "find_varlen", lambda: dense)
    monkeypatch.setattr(room, "has_kernel_for", lambda *_: True)
    monkeypatch.setattr(apply, "why_no_launch", lambda *how, **more: "")


def build(family: str, **more: Any) -> LossModel:
    register_attention()
    config, kind = FAMILIES[family]
    torch.manual_seed(0)
    return LossModel(kind(config(**SIZES, **more, attn_implementation=NAME))).train()


def batch(lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    tokens = sum(lengths)
    ids = torch.arange(tokens)[None] * 7 % 64
    places = torch.cat([torch.arange(one) for one in lengths])[None]
    edges = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return {"input_ids": ids, "labels": ids.roll(-1), "position_ids": places, "boundaries": edges}


def compiled(model: LossModel, row_tokens: int, **layout: Any) -> None:
    apply.parallelize(model, Layout(**layout), ParallelConfig(), Mesh(), row_tokens=row_tokens)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """torch.compile traces both passes and compiles nothing; the list has every graph that it was given."""
    from torch._dynamo.backends.debugging import aot_eager

    graphs: list[Any] = []
    whole = torch.compile

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    monkeypatch.setattr(torch, "compile", lambda call, **how: whole(call, backend=backend, dynamic=how["dynamic"]))
    torch._dynamo.reset()
    counters.clear()
    yield graphs
    torch._dynamo.reset()


@pytest.mark.parametrize("row_tokens", [TOKENS, 0])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_is_one_graph_that_serves_all_packed_rows(family, row_tokens, kernel, traced) -> None:
    """With finding out how rows are packed in the middle of it, it was cut three times a layer."""
    model, plain = build(family), build(family)
    compiled(model, row_tokens, compile=True)
    first = 0
    for lengths in LENGTHS:
        ours, _ = model(**batch(lengths))
        want, _ = plain(**batch(lengths))
        assert abs(float(ours) / float(want) - 1) < 1e-5
        ours.backward()
        want.backward()
        first = first or len(traced)
    assert not counters["graph_break"], dict(counters["graph_break"])
    assert 0 < first <= 2, "more than one graph a layer"
    assert len(traced) == first, "compiled again for another number of documents"
    for one, two in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one.grad, two.grad, rtol=1e-4, atol=1e-5)


@since(torch="2.13")
def test_attention_of_each_document_on_a_cpu_is_not_compiled(traced) -> None:
    """It was made anew for lengths of 1 and more, with a window and without, until torch said that it gives up."""
    window = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    model, plain = build("qwen3", **window), build("qwen3", **window)
    compiled(model, 0, compile=True)
    first = 0
    for lengths in ((11, 29), (40,), (3, 5, 30, 2), (1, 1, 1), (8,) * 70):
        ours, _ = model(**batch(lengths))
        want, _ = plain(**batch(lengths))
        ours.backward()
        want.backward()
        first = first or len(traced)
        assert abs(float(ours.detach()) / float(want.detach()) - 1) < 1e-5
    assert len(traced) == first > 0, "compiled again"
    for one, two in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one.grad, two.grad, rtol=1e-4, atol=1e-5)


def test_rows_of_other_lengths_without_gradients_compile_nothing(kernel, traced) -> None:
    model = build("llama")
    compiled(model, TOKENS, compile=True)
    model(**batch((11, 29)))[0].backward()
    before = len(traced)
    with torch.no_grad():
        model(**batch((11, 13)))
        model(**batch((5,)))
    assert len(traced) == before
    model(**batch((20, 20)))[0].backward()
    assert len(traced) == before


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: found.append(how))
    return found


def test_what_torch_compile_is_asked_for(kernel, asked) -> None:
    for row_tokens, how, want in (
        (0, True, {"dynamic": True}),
        (TOKENS, True, {"dynamic": False}),
        (TOKENS, GRAPHS, {"dynamic": False, "mode": "reduce-overhead"}),
    ):
        asked.clear()
        compiled(build("llama"), row_tokens, compile=how)
        assert asked == [want] * 2


def test_graphs_begin_each_pass_and_have_gradients_of_their_own(kernel, asked, monkeypatch) -> None:
    begun: list[bool] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(True))
    model = build("llama")
    compiled(model, TOKENS, compile=GRAPHS)
    trained = list(model.lm.model.layers.parameters())
    loss, _ = model(**batch((11, 29)))
    assert len(begun) == 1 and all(parameter.grad is not None for parameter in trained)
    assert model.lm.model.embed_tokens.weight.grad is None
    kept = [parameter.grad.data_ptr() for parameter in trained]
    loss.backward()
    model(**batch((20, 20)))[0].backward()
    assert len(begun) == 2 and [parameter.grad.data_ptr() for parameter in trained] == kept
    with torch.no_grad():
        model(**batch((5,)))
    assert len(begun) == 2


def test_graphs_are_refused_where_a_layer_is_cut_or_computed_again(kernel, asked, monkeypatch) -> None:
    for layout in ({"recompute": "full"}, {"recompute": "selective"}, {"recompute": "1/2"}):
        with pytest.raises(ConfigError, match="cannot be recorded"):
            compiled(build("llama"), TOKENS, compile=GRAPHS, **layout)
    with pytest.raises(ConfigError, match="cannot be recorded"):
        compiled(build("llama"), 0, compile=GRAPHS)
    monkeypatch.setattr(apply, "why_no_launch", lambda *how, **more: "it caps its scores")
    with pytest.raises(ConfigError) as caught:
        compiled(build("llama"), TOKENS, compile=GRAPHS)
    assert caught.value.where == "it caps its scores"
    asked.clear()
    compiled(build("llama"), TOKENS, compile=True)
    assert asked == [{"dynamic": True}] * 2, "one call per document: no number of them is fixed"


def test_empty_documents_change_nothing(monkeypatch) -> None:
    monkeypatch.setattr(room, "find_varlen", lambda: dense)
    query, key, value = torch.randn(1, 2, 20, 8), torch.randn(1, 1, 20, 8), torch.randn(1, 1, 20, 8)
    documents = Documents.of(torch.tensor([0, 7, 20]), torch.device("cpu"))
    wider = documents.with_room(32)
    assert len(wider.edges) == 65 and wider.longest == 32 and wider.edges.dtype is torch.int32
    want, ours = (attend_all_documents(query, key, value, one, None, None) for one in (documents, wider))
    assert torch.equal(ours, want)
    many = Documents.of(torch.arange(101), torch.device("cpu"))
    assert len(many.with_room(8).edges) == 129


def test_the_kernel_is_tried_with_empty_documents_before_it_is_given_any(monkeypatch) -> None:
    monkeypatch.setattr(room, "WORKS", {})
    monkeypatch.setattr(room, "find_varlen", lambda: dense)
    how = (torch.device("cpu"), torch.bfloat16, 8)
    assert room.why_no_kernel(*how, "room") == ""

    def none_empty(query, key, value, from_, *rest, **how):
        if (from_.diff() == 0).any():
            raise RuntimeError("empty")
        return dense(query, key, value, from_, *rest, **how)

    monkeypatch.setattr(room, "WORKS", {})
    monkeypatch.setattr(room, "find_varlen", lambda: none_empty)
    assert room.why_no_kernel(*how) == ""
    assert "empty documents" in room.why_no_kernel(*how, "room")


def test_layouts_keep_the_word() -> None:
    for how in (False, True, GRAPHS):
        assert Layout.from_json(Layout(compile=how).to_json()).compile == how


def test_a_machine_without_gpus_and_the_plan_s_launches() -> None:
    from duoka.config.schema import RunConfig
    from duoka.plan.choose import check_machine
    from duoka.plan.hardware import Gpu, Machine
    from duoka.plan.report import make_plan
    from duoka.plan.shape import demo_shape

    def config(how: Any) -> RunConfig:
        data = {"train": ["x"], "max_length": 512, "fixed_rows": True}
        train = {"compile": how, "micro_batch": 1}
        return RunConfig.model_validate({"model": "demo", "data": data, "train": train})

    (fault,) = check_machine(config(GRAPHS), Machine(8, 2**36, 2**35), 1)
    assert fault.key == "train.compile" and "no GPU" in fault.what
    assert not check_machine(config(True), Machine(8, 2**36, 2**35), 1)
    gpu = Machine(16, 2**38, 2**37, gpus=(Gpu("H100", 80 * 2**30, 79 * 2**30, 9.0),))
    plans = {how: make_plan(config(how), demo_shape(), gpu, 1) for how in (False, True, GRAPHS)}
    times = [plans[how].speed.step_s for how in (False, True, GRAPHS)]
    assert times == sorted(times, reverse=True) and times[0] > times[2]
    assert plans[False].speed.parts["launches"] > 0 and "launches" not in plans[GRAPHS].speed.parts
    assert "reduce-overhead helps" in plans[False].speed.limit
    assert SimpleNamespace(**plans[GRAPHS].layout.to_json()).compile == GRAPHS


def test_without_the_compiler_that_torch_asks_for_layers_are_not_compiled(monkeypatch) -> None:
    """What a run said of it was the traceback of its first step, a hundred lines of torch's."""
    from duoka.config.schema import RunConfig
    from duoka.plan.choose import check_machine
    from duoka.plan.hardware import read_machine

    config = RunConfig.model_validate({"model": "demo", "data": {"train": ["x"]}, "train": {"compile": True}})
    found = [
        check_machine(config, read_machine({"CUDA_VISIBLE_DEVICES": "", **env}), 1)
        for env in ({"CXX": sys.executable}, {"CXX": "no-compiler-of-that-name"})
    ]
    assert not found[0] and found[1][0].key == "train.compile" and "no-compiler-of-that-name" in found[1][0].what
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (fault,) = check_machine(config, read_machine({"CUDA_VISIBLE_DEVICES": ""}), 1)
    assert "C++ compiler" in fault.what and "compile: false" in fault.fix


# Memory behind a mask was written: seen when it is freed, in a process of its own.
COMPILED_MASKS = """
import torch
from duoka.model.dropout import dropped, level_of, place_key

keys, place, level = torch.randint(-(2**62), 2**62, (1, 2048)), place_key("a layer"), level_of(0.1)
for units in (160, 100, 4000):
    def mask(keys):
        return dropped(keys, place, units, level)
    wanted, compiled = mask(keys), torch.compile(mask, dynamic=False)
    for _ in range(20):
        assert torch.equal(compiled(keys), wanted), units
        other = [torch.zeros(7) for _ in range(1000)]
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++: nothing is compiled for a CPU")
@pytest.mark.timeout(120)
def test_compiled_masks_are_the_same_and_write_nowhere_else():
    done = subprocess.run([sys.executable, "-c", COMPILED_MASKS], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
