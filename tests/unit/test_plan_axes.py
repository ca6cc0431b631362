"""Tensor, pipeline and sequence axes of a config: refused before anything starts where they make no layout."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from duoka.config.catalog import known_keys
from duoka.config.foreign_axes import FLAGS
from duoka.config.load import load_config
from duoka.config.schema import ParallelConfig, RunConfig
from duoka.errors import Faults
from duoka.explain.find import LANGUAGES, find_entry
from duoka.plan.axes import check_axes, check_shape, key_value_heads, why_exchange
from duoka.plan.hardware import Machine
from duoka.plan.layout import parse_layout
from duoka.plan.picture import ranking_lines
from duoka.plan.report import make_plan
from duoka.plan.shape import demo_shape

EVEN = replace(demo_shape(), num_heads=8, num_kv_heads=4)
CPU = Machine(num_cores=2, memory_bytes=24 << 30, available_bytes=20 << 30)


@pytest.mark.parametrize(
    ("axes", "world", "words"),
    [
        ({"tensor": 3}, 4, ["parallel.tensor 3 takes 3 processes", "--nproc 3 or 6", "tensor: 4 / tensor: 2"]),
        (
            {"tensor": 2, "pipeline": 3},
            8,
            ["parallel.tensor 2 x parallel.pipeline 3 is 6 processes", "--nproc 6 or 12", "tensor: 2, pipeline: 4"],
        ),
        ({"sequence": 8}, 4, ["--nproc 8", "sequence: 4"]),
    ],
)
def test_axes_that_do_not_divide_the_world_are_told_the_nearest_that_do(axes, world, words, monkeypatch):
    monkeypatch.setattr("duoka.plan.axes.TRAINABLE_AXES", ("tp", "pp", "sp"))
    (fault,) = check_axes(ParallelConfig(**axes), world)
    for word in words:
        assert word in f"{fault.what} {fault.fix}"


def test_no_axis_is_advised_that_the_model_does_not_allow():
    """Of 8 heads with 4 for keys 4 ranks can have parts, of 9 with 3 they cannot."""
    asked = ParallelConfig(tensor=3, strategy="fsdp")
    even, odd = (check_axes(asked, 8, shape)[0].fix for shape in (EVEN, demo_shape()))
    assert even == "share 8 as tensor: 4 / tensor: 2 / tensor: 1", "and 3 ranks could not share its heads on any number"
    assert odd == "start another number, such as --nproc 6 or 9; or share 8 as tensor: 1"
    unknown = check_axes(asked, 8)[0].fix
    assert unknown.endswith("   (where tensor divides the model's heads)"), "of a model that is not there yet"
    (fault,) = check_axes(ParallelConfig(pipeline=64, strategy="zero1"), 96, EVEN)
    assert fault.fix.startswith("share 96 as pipeline: 24 / ") and "pipeline: 48" not in fault.fix
    named = ParallelConfig(layout="fsdp2.tp4", tensor=4, strategy="fsdp")
    assert "fsdp1.tp4" in check_axes(named, 4)[0].fix and "tp2" not in check_axes(named, 4, demo_shape())[0].fix


def test_an_axis_that_only_the_plan_knows_is_refused(monkeypatch):
    monkeypatch.setattr("duoka.plan.axes.TRAINABLE_AXES", ())
    config = RunConfig.model_validate({"model": "demo", "data": {"train": ["identity"]}, "parallel": {"pipeline": 2}})
    with pytest.raises(Faults, match="does not train with it"):
        make_plan(config, demo_shape(), CPU, 2)


def plan_of(**parallel):
    config = {"model": "demo", "data": {"train": ["identity"]}, "parallel": parallel}
    return make_plan(RunConfig.model_validate(config), demo_shape(), CPU, 4)


def test_a_sequence_axis_is_planned_with_its_reason_and_its_memory():
    whole, shared = plan_of(strategy="ddp"), plan_of(sequence=4)
    assert shared.layout.name == "ddp1·sp4" and shared.layout.is_trainable
    assert "all-gather: 9 heads do not divide by 4" in shared.reasons["parallel.sequence"]
    assert "all-to-all: each rank attends with 3 of 9 heads" in why_exchange(9, 3)
    assert shared.memory.tokens == -(-shared.layout.micro.count // 4)
    assert shared.memory.parts["optimizer"] == whole.memory.parts["optimizer"]
    fsdp = plan_of(sequence=4, strategy="fsdp")
    assert fsdp.layout.name == "fsdp1·sp4" and fsdp.layout.state_ranks == 4
    assert abs(fsdp.memory.parts["optimizer"] / whole.memory.parts["optimizer"] - 1 / 4) < 0.01


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"sequence": 3}, "no multiple"),
        ({"sequence": 4, "strategy": "single"}, "is one process"),
        ({"sequence": 2, "strategy": "dp"}, "is one process"),
        ({"sequence": 2, "tensor": 4}, "no multiple"),
        ({"layout": "fsdp2.tp3", "tensor": 3, "strategy": "fsdp"}, "is 6 processes, and 4 are asked for"),
        ({"tensor": 2, "pipeline": 2, "schedule": "interleaved", "sequence": 2}, "no multiple"),
    ],
)
def test_a_sequence_axis_that_makes_no_run_is_refused(parallel, words):
    with pytest.raises(Faults, match=words):
        plan_of(**parallel)


@pytest.mark.parametrize(
    ("parallel", "name"),
    [
        ({"tensor": 2, "sequence": 2}, "zero1x1·tp2·sp2"),
        ({"tensor": 2, "pipeline": 2}, "single·tp2·pp2"),
        ({"pipeline": 2, "sequence": 2}, "ddp1·pp2·sp2"),
        ({"pipeline": 2, "strategy": "fsdp"}, "fsdp2·pp2"),
        ({"tensor": 2, "strategy": "hsdp", "shard_ranks": 2}, "hsdp1x2·tp2"),
    ],
)
def test_axes_go_together(parallel, name):
    facts = {"model": "demo", "data": {"train": ["identity"]}, "parallel": parallel}
    plan = make_plan(RunConfig.model_validate(facts), EVEN, CPU, 4)
    assert plan.layout.name == name and plan.layout.is_trainable
    assert not any("planned only" in text for text in plan.warnings)


def test_what_does_not_go_together_is_not_called_trainable():
    for name in ("ddp2.tp2", "ddp2.tp2.pp2"):
        assert not parse_layout(name).is_trainable
    assert not replace(parse_layout("zero1x2.pp2"), schedule="interleaved", virtual=2).is_trainable


def test_stages_of_one_rank_that_share_state_are_refused_or_add_gradients():
    """What `auto` picks is never what the rules refuse."""
    facts = {"model": "demo", "data": {"train": ["identity"]}}
    staged = {"pipeline": 2, "schedule": "interleaved"}
    tight = Machine(num_cores=2, memory_bytes=4 << 30, available_bytes=3 << 30)
    plan = make_plan(RunConfig.model_validate({**facts, "parallel": staged}), EVEN, tight, 4)
    assert plan.layout.strategy == "ddp" and plan.layout.virtual == 2
    with pytest.raises(Faults, match="whose data ranks add gradients of whole tensors"):
        make_plan(RunConfig.model_validate({**facts, "parallel": {**staged, "tensor": 2}}), EVEN, CPU, 8)


def test_a_number_of_heads_that_does_not_divide_names_layouts_that_work():
    (fault,) = check_shape(ParallelConfig(tensor=4, pipeline=2), demo_shape(), 8)
    assert "9 heads" in fault.what
    assert fault.fix == "write:   tensor: 3 with --nproc 6 or 12   or   tensor: 1"


def test_a_layout_in_one_word_is_the_keys_that_it_stands_for(tmp_path):
    def load(text, *overrides):
        path = tmp_path / "run.yaml"
        path.write_text(f"model: demo\ndata: {{train: [identity]}}\nparallel: {text}\n", encoding="utf-8")
        return load_config(path, overrides)

    loaded = load("{layout: hsdp2x4.tp2.pp3}")
    parallel = loaded.config.parallel
    assert (parallel.strategy, parallel.shard_ranks, parallel.tensor, parallel.pipeline) == ("hsdp", 4, 2, 3)
    assert loaded.origins["parallel.tensor"] == "from parallel.layout"
    assert load("{layout: tp2.sp2}").config.parallel.strategy == "auto"
    assert load("{layout: zero3.tp2}").config.parallel.strategy == "fsdp"
    assert load("{layout: zero1x2, strategy: zero1}").config.parallel.strategy == "zero1"
    for text in ("{layout: fsdp2.tp2, tensor: 4}", "{layout: tp2, strategy: fsdp}"):
        with pytest.raises(Faults, match="another key of parallel: says otherwise"):
            load(text)
    for text in ("{layout: tp2.tp2}", "{layout: fsdp2x2}", "{layout: gp}", "{layout: tp0}"):
        with pytest.raises(Faults, match="must be a layout such as"):
            load(text)


def test_a_table_with_a_faster_layout_says_how_to_take_it():
    facts = {"model": "demo", "data": {"train": ["identity"]}}
    facts["parallel"] = {"strategy": "ddp"}
    plan = make_plan(RunConfig.model_validate(facts), demo_shape(), CPU, 4, is_ranked=True)
    best = plan.ranking.best()
    taken = replace(plan, speed=best.speed)
    words = f"the fastest:   parallel.layout={best.layout.name.replace('·', '.')}"
    slower = replace(plan, speed=replace(plan.speed, tokens_per_s=best.speed.tokens_per_s / 4))
    assert any(words in line for line in ranking_lines(slower))
    assert not any("the fastest:" in line for line in ranking_lines(taken))


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_flags_of_other_trainers_are_explained_and_in_the_table(flag):
    dashed = "--" + flag.name.replace("_", "-")
    for language in LANGUAGES:
        entry = find_entry(dashed, language)
        assert entry is not None and flag.tool in entry.text and (not flag.key or flag.key in entry.text)
    assert not flag.key or flag.key in known_keys()
    page = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text(encoding="utf-8")
    assert f"`{dashed}`" in page or f"`{flag.name}`" in page


@pytest.mark.parametrize(
    ("heads", "held", "ranks", "sent"),
    [
        (6, 3, 2, [0, 0, 1, 1, 2, 2]),
        (6, 1, 2, [0, 0]),
        (6, 2, 2, [0, 1]),
        (8, 2, 4, [0, 0, 1, 1]),
        (8, 4, 2, [0, 1, 2, 3]),
        (12, 3, 6, [0, 0, 1, 1, 2, 2]),
    ],
)
def test_each_rank_gets_the_key_value_heads_that_its_heads_ask_for(heads, held, ranks, sent):
    assert key_value_heads(heads, held, ranks) == sent
    own, each = heads // ranks, len(sent) // ranks
    for head in range(heads):
        rank, place = divmod(head, own)
        assert sent[rank * each + place // (own // each)] == head // (heads // held)


@pytest.mark.parametrize(("batch", "offered"), [(16, [1]), (24, [2, 1])])
def test_a_pipeline_that_starves_is_told_of_those_that_are_fed(batch, offered):
    """With fewer stages more data ranks share the same batch: two stages of 16 samples starve as four did."""
    facts = {
        "model": "demo", "data": {"train": ["identity"], "max_length": 128},
        "train": {"global_batch": batch, "micro_batch": "128 tokens"}, "parallel": {"pipeline": 4, "strategy": "zero1"},
    }  # fmt: skip
    with pytest.raises(Faults) as caught:
        make_plan(RunConfig.model_validate(facts), EVEN, CPU, 32)
    (fault,) = caught.value.faults
    assert [int(size) for size in re.findall(r"pipeline: (\d)", fault.fix)] == offered
    for size in offered:
        asked = RunConfig.model_validate({**facts, "parallel": {"pipeline": size, "strategy": "zero1"}})
        make_plan(asked, EVEN, CPU, 32)


def test_without_a_pipeline_its_schedule_goes_too():
    (fault,) = check_axes(ParallelConfig(pipeline=2, schedule="interleaved", virtual_stages=3), 1)
    assert "pipeline: 1   (with pipeline: 1 delete schedule: interleaved and virtual_stages)" in fault.fix
    (fault,) = check_axes(ParallelConfig(pipeline=2), 1)
    assert "pipeline: 1" in fault.fix and "delete" not in fault.fix
