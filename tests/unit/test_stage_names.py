"""`stage` as a block or a word, and the rows of config/stages.py."""

from pathlib import Path
from typing import get_args

import pytest

from duoka.config.catalog import known_keys
from duoka.config.changes import FIXED_KEYS
from duoka.config.load import config_hash, load_config, resolved_yaml
from duoka.config.stages import STAGES, StageName
from duoka.errors import Faults
from duoka.train.stages.stage import Stage, build_stage

HEAD = "model: demo\ndata: {train: [identity]}\n"


def load(text, *overrides):
    Path("run.yaml").write_text(HEAD + text, encoding="utf-8")
    return load_config("run.yaml", overrides)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_word_is_short_for_the_block():
    short, block = load("stage: pretrain\n"), load("stage: {name: pretrain}\n")
    assert short.config == block.config and config_hash(short.config) == config_hash(block.config)
    assert short.origins["stage.name"] == block.origins["stage.name"] == "run.yaml:3"
    assert load("").config.stage.name == load("stage:\n").config.stage.name == "sft"


@pytest.mark.parametrize("below", ["stage: sft\n", "stage: {name: sft}\n"])
@pytest.mark.parametrize("word", ["stage=pretrain", "stage.name=pretrain", "stage={name: pretrain}"])
def test_the_command_line_lies_on_either_form(below, word):
    loaded = load(below, word)
    assert loaded.config.stage.name == "pretrain" and loaded.origins["stage.name"] == "command line"


def test_a_resolved_config_reads_back_the_same():
    loaded = load("stage: pretrain\n")
    Path("resolved.yaml").write_text(resolved_yaml(loaded), encoding="utf-8")
    assert load_config("resolved.yaml").config == loaded.config


@pytest.mark.parametrize(("text", "words"), [
    ("stage: distill\n", ("stage must be one of", "stage: sft")),
    ("stage: {name: distill}\n", ("stage.name must be one of", "name: sft")),
    ("stage: {nam: sft}\n", ("unknown key stage.nam", "did you mean name")),
])  # fmt: skip
def test_a_wrong_stage_is_refused_as_it_was_written(text, words):
    with pytest.raises(Faults) as caught:
        load(text)
    assert all(word in str(caught.value) for word in words)


def test_every_stage_has_a_row_and_a_class():
    assert set(STAGES) == set(get_args(StageName))
    for name in STAGES:
        asks = ["data.train=[task:sort]"] if STAGES[name].draws else []
        stage = build_stage(load("").config.model_copy(update={"stage": load(f"stage: {name}\n", *asks).config.stage}))
        assert isinstance(stage, Stage)


def test_what_a_run_is_is_named_by_keys_that_are_there():
    assert set(FIXED_KEYS) <= set(known_keys())
