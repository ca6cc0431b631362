"""train.recompute: 1/2 computes every second layer again: which ones, what is kept, and what the plan makes of it."""

from dataclasses import replace

import pytest
import torch

from duoka.config.load import load_config
from duoka.config.schema import RunConfig
from duoka.errors import ConfigError
from duoka.model.build import load_model
from duoka.model.layers import Absent
from duoka.model.request import ModelRequest
from duoka.parallel.recompute import apply_recompute
from duoka.plan.catalog import parse_cluster
from duoka.plan.changes import smaller_changes
from duoka.plan.fill_in import fill_in
from duoka.plan.layout import Layout, parse_layout
from duoka.plan.memory import FITS, estimate_memory
from duoka.plan.recipe import Work, shares
from duoka.plan.recompute import RUNGS, whole_layers
from duoka.plan.shape import shape_from_config, shape_from_parameters
from duoka.plan.speed import Load, estimate_speed
from duoka.plan.task import Task, memory_of
from duoka.plan.traffic import traffic
from duoka.units import Amount

FAST = parse_cluster("8xH100-80G")
LLAMA_7B = shape_from_parameters(7e9)
SHAPE = shape_from_config({
    "model_type": "llama", "vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24,
    "num_attention_heads": 8, "num_key_value_heads": 8,
})  # fmt: skip


def from_yaml(tmp_path, value):
    path = tmp_path / "run.yaml"
    path.write_text(f"model: demo\ndata: {{train: [identity]}}\ntrain: {{recompute: {value}}}\n", encoding="utf-8")
    return load_config(str(path))


def test_every_second_layer_and_the_last_is_kept():
    assert whole_layers("1/2", 6) == (True, False, True, False, True, False)
    assert whole_layers("1/3", 6) == (True, False, False, True, False, False)
    assert whole_layers("3/4", 8) == (True, True, True, False, True, True, True, False)
    assert whole_layers("none", 3) == whole_layers("selective", 3) == (False,) * 3
    assert whole_layers("full", 3) == (True,) * 3 and whole_layers("1/2", 0) == ()
    assert whole_layers("1/2", 5) == (True, True, False, True, False), "three of five, and the last is kept"


@pytest.mark.parametrize("share", ["1/2", "1/3", "2/3", "1/4", "3/4", "2/5", "7/10"])
def test_at_least_that_share_evenly_spread(share):
    some, of = map(int, share.split("/"))
    for layers in range(1, 41):
        again = whole_layers(share, layers)
        assert 0 <= sum(again) - layers * some / of < 1, "less memory than was asked for, by less than a layer"
        assert not again[-1] or all(again)
        for length in range(1, layers):
            counts = {sum(again[at : at + length]) for at in range(layers - length + 1)}
            assert max(counts) - min(counts) <= 1, (layers, length, again)


@pytest.mark.parametrize("value", ["1/2", "3/4", "2/3"])
def test_a_share_is_read_and_written(tmp_path, value):
    config = from_yaml(tmp_path, value).config
    assert config.train.recompute == value
    layout = Layout(recompute=value)
    assert Layout.from_json(layout.to_json()) == layout


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ("2", "recompute: 1/2   (every second layer)"),
        ("0.5", "recompute: 1/2   (every second layer)"),
        ("2/2", "recompute: full   (every layer)"),
        ("op", "recompute: selective"),
        ("4/3", "recompute: auto"),
        ("0/2", "recompute: none   (no layer)"),
        ("half", "recompute: auto"),
    ],
)
def test_what_others_write_is_answered_with_what_to_write(tmp_path, value, advice):
    with pytest.raises(ConfigError) as caught:
        from_yaml(tmp_path, value)
    told = str(caught.value)
    assert "one of auto, none, selective, full, or a share of the layers such as 1/2" in told and advice in told, told


def test_a_share_is_refused_in_a_manifest_that_says_nonsense():
    with pytest.raises(ValueError, match="share of the layers"):
        Layout.from_json(Layout().to_json() | {"recompute": "some"})


def test_layers_in_cuda_graphs_are_not_computed_again(tmp_path):
    path = tmp_path / "run.yaml"
    train = "{recompute: 1/2, compile: reduce-overhead}"
    path.write_text(f"model: demo\ndata: {{train: [identity], fixed_rows: true}}\ntrain: {train}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="recompute is 1/2: layers that are computed again"):
        load_config(str(path))


def kept_bytes(model, how, frozen=0):
    """(bytes kept for the backward pass, how often each layer was begun). `frozen`: so many layers, and both ends."""
    lm = load_model(ModelRequest(model, dtype=torch.float32))
    lm.requires_grad_(not frozen).train()
    lm.model.layers[frozen:].requires_grad_(True)
    if how != "none":
        apply_recompute(lm, how)
    calls = [0] * len(lm.model.layers)
    for place, layer in enumerate(lm.model.layers):
        layer.self_attn.register_forward_pre_hook(lambda *_, place=place: calls.__setitem__(place, calls[place] + 1))
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    ids = torch.randint(3, 250, (2, 48), generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = lm(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return sum(kept.values()), calls


def test_each_layer_of_the_share_is_computed_twice_and_the_others_once(tiny_model):
    found = {how: kept_bytes(tiny_model, how) for how in ("none", "1/4", "1/2", "3/4", "full")}
    layers = len(found["none"][1])
    for how, (_, calls) in found.items():
        assert calls == [1 + again for again in whole_layers(how, layers)], how
    most, least = found["none"][0], found["full"][0]
    for how in ("1/4", "1/2", "3/4"):
        part = sum(whole_layers(how, layers)) / layers
        assert found[how][0] == pytest.approx(most - part * (most - least), rel=0.03), how
    assert least < found["3/4"][0] < found["1/2"][0] < found["1/4"][0] < most


@pytest.mark.parametrize("how", ["none", "full", "selective"])
def test_frozen_layers_below_what_learns_are_computed_once(tiny_model, how):
    """transformers has gradients go down to the embeddings where layers are computed again."""
    layers = len(kept_bytes(tiny_model, "none")[1])
    _, calls = kept_bytes(tiny_model, how, frozen=layers - 1)
    assert calls == [1] * (layers - 1) + [1 if how == "none" else 2]


def test_a_rank_of_a_pipeline_counts_its_own_layers(tiny_model):
    lm = load_model(ModelRequest(tiny_model, dtype=torch.float32))
    layers = lm.model.layers
    mine = list(layers)[-3:]
    for place in range(len(layers) - 3):
        layers[place] = Absent(layers[place])
    apply_recompute(lm, "1/2")
    assert [layer.gradient_checkpointing for layer in mine] == [True, True, False], "of four: every second one"


def test_layers_without_a_switch_are_refused(tiny_model, monkeypatch):
    lm = load_model(ModelRequest(tiny_model, dtype=torch.float32))

    class Plain(torch.nn.Module):
        pass

    lm.model.layers[1] = Plain()
    with pytest.raises(ConfigError, match="cannot compute some of its layers again") as caught:
        apply_recompute(lm, "1/2")
    assert "recompute: full" in str(caught.value)


LAYOUTS = ("single", "fsdp8", "zero1x2·pp4", "single·tp2", "ddp1·sp2")


@pytest.mark.parametrize("name", LAYOUTS)
def test_memory_time_and_bytes_lie_between_none_and_full(name):
    work, cluster = Work(SHAPE, None, "cuda"), parse_cluster("8xH100-80G")
    plain = replace(parse_layout(name), precision="bf16", micro=Amount(8192, "tokens"))
    load = Load(8, 8192, 4096, 8 * plain.dp * 8192)
    peaks, steps, sent = [], [], []
    for how in ("none", "1/4", "1/2", "3/4", "full"):
        layout = replace(plain, recompute=how)
        peaks.append(estimate_memory(work, layout, 8192, later=8192, accumulation=8, length=4096).peak_bytes)
        steps.append(estimate_speed(work, layout, cluster, load).step_s)
        sent.append(sum(one.sent_bytes for one in traffic(work, layout, 8, accumulation=8, tokens=8192)))
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 5, peaks
    assert steps == sorted(steps) and 1.05 < steps[2] / steps[0] < 1.17 < steps[-1] / steps[0], steps
    assert sent == sorted(sent)
    if name in ("single·tp2", "ddp1·sp2"):
        assert sent[2] - sent[0] == pytest.approx((sent[4] - sent[0]) / 2)


def test_a_stage_keeps_its_own_share_of_layers():
    """Six layers of 24 on each of four ranks: three of them whole, with as many micro-batches as are in flight."""
    work = Work(SHAPE, None, "cuda")
    layout = replace(parse_layout("single·pp4"), precision="bf16", micro=Amount(4096, "tokens"))
    first = shares(work, layout, 8)[0]

    def kept(how):
        parts = estimate_memory(work, replace(layout, recompute=how), 4096, accumulation=8, length=4096).parts
        return parts["activations"]

    one_layer = kept("none") / (first.num_layers * first.in_flight)
    computing = kept("full") - first.num_layers * first.in_flight * 4 * SHAPE.hidden_size * 4096
    assert computing == pytest.approx(one_layer, rel=0.01)
    half = first.in_flight * sum(
        4 * SHAPE.hidden_size * 4096 if again else one_layer for again in whole_layers("1/2", first.num_layers)
    )
    last_again = whole_layers("1/2", first.num_layers)[-1]
    assert kept("1/2") == pytest.approx(half + last_again * one_layer, rel=0.01)


def test_auto_takes_the_least_that_fits(tmp_path):
    task = Task(Work(LLAMA_7B, None, "cuda"), Amount(64, "samples"), 4096)
    layout = replace(parse_layout("fsdp8"), precision="bf16", micro=Amount(4096, "tokens"))
    needs = {how: memory_of(task, replace(layout, recompute=how)).peak_bytes for how in ("none", *RUNGS)}
    train = from_yaml(tmp_path, "auto").config.train
    for how, need in needs.items():
        filled = fill_in(train, task, layout, FAST, int(need / FITS) + 1)
        assert filled.layout.recompute == how
        assert filled.reasons["train.recompute"].startswith(how)
    assert (
        "the least that fits"
        in fill_in(train, task, layout, FAST, int(needs["1/2"] / FITS) + 1).reasons["train.recompute"]
    )
    nothing = fill_in(train, task, layout, FAST, 2**30)
    assert nothing.layout.recompute == "full" and "least" not in nothing.reasons["train.recompute"]


def test_auto_takes_more_where_that_lets_a_gpu_compute_enough_at_once(tmp_path):
    """Rows of 256 tokens: with a quarter of the layers computed again one row fits, with all of them many."""
    task = Task(Work(LLAMA_7B, None, "cuda"), Amount(512, "samples"), 256)
    layout = replace(parse_layout("fsdp8"), precision="bf16", micro=Amount(256, "tokens"))
    needs = {how: memory_of(task, replace(layout, recompute=how)).peak_bytes for how in ("none", *RUNGS)}
    train = from_yaml(tmp_path, "auto").config.train
    filled = fill_in(train, task, layout, FAST, int(needs["1/4"] / FITS) + 1)
    assert filled.layout.recompute == "full" and filled.layout.micro.count > 256
    assert "times as fast with" in filled.reasons["train.recompute"]
    by_hand = fill_in(
        train.model_copy(update={"micro_batch": "256 tokens"}), task, layout, FAST, int(needs["1/4"] / FITS) + 1
    )
    assert by_hand.layout.recompute == "1/4", "of what is asked for, the least"


def test_a_run_that_does_not_fit_is_told_the_least_share():
    task = Task(Work(LLAMA_7B, None, "cuda"), Amount(64, "samples"), 4096)
    layout = replace(parse_layout("fsdp8"), precision="bf16", micro=Amount(8192, "tokens"))
    cluster = parse_cluster("8xH100-80G")
    train = {"recompute": "none", "micro_batch": "8192 tokens"}
    asked = RunConfig.model_validate({"model": "demo", "data": {"train": ["x"]}, "train": train})
    for how in RUNGS:
        need = memory_of(task, replace(layout, recompute=how)).peak_bytes
        words = smaller_changes(asked, task, layout, cluster, int(need / FITS) + 1)
        assert f"train.recompute: {how}" in words, (how, words)
