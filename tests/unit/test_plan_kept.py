"""A run that goes on keeps its layout on a day with less memory, and its plan is of that layout in every figure."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from test_plan_report import CPU, GIB, config

from duoka.plan.kept import with_layout
from duoka.plan.report import make_plan
from duoka.plan.shape import demo_shape
from duoka.train import setup
from duoka.units import Amount

POOR = replace(CPU, available_bytes=3 * GIB)
RUN = config(data={"max_length": 1024}, train={"global_batch": 64})


@pytest.fixture
def plans():
    return [make_plan(RUN, demo_shape(), machine, 1) for machine in (CPU, POOR)]


def test_figures_are_of_the_layout_that_is_kept(plans, monkeypatch, tmp_path):
    rich, poor = plans
    assert (rich.layout.recompute, poor.layout.recompute) == ("none", "full")
    monkeypatch.setattr(setup, "read_manifest", lambda folder: SimpleNamespace(layout=rich.layout.to_json()))
    kept = setup.keep_choices(poor, RUN, tmp_path, None)
    for name in ("layout", "memory", "at_most_bytes", "batch", "speed", "table", "kernels"):
        assert getattr(kept, name) == getattr(rich, name), name
    assert kept.available_bytes == poor.available_bytes
    assert kept.verdict == "does not fit", "said, and tried: results do not hang on a day's memory"
    assert kept.costs.step_s == rich.costs.step_s


def test_reasons_of_what_was_not_chosen_are_gone(plans):
    rich, poor = plans
    kept = with_layout(poor, RUN, rich.layout)
    assert kept.reasons["train.recompute"] == "none: as when the run began"
    less = with_layout(rich, RUN, replace(rich.layout, micro=Amount(1024, "tokens")))
    assert less.reasons["train.micro_batch"] == "1,024 tokens: as when the run began"
    assert less.batch.accumulation > rich.batch.accumulation
    assert kept.reasons["train.precision"] == poor.reasons["train.precision"]
    assert with_layout(poor, RUN, poor.layout) is poor
