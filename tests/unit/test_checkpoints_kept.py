"""What a start moves out of its way stays as it is, and what a checkpoint holds is not dropped."""

import os
from dataclasses import replace

import pytest
from test_checkpoint import OLDER, choose, make_contents, save_at, store  # noqa: F401

from duoka.config.schema import OptimConfig
from duoka.errors import StorageError
from duoka.optim.build import build_optimizer
from duoka.parallel.engine import EngineSpec
from duoka.parallel.single import Single


def test_what_was_moved_out_of_the_way_before_is_not_overwritten(store):  # noqa: F811
    contents = make_contents(1)
    for step in (5, 10):
        save_at(store, contents, step)
    for ending in (".set-aside", ".set-aside-2"):
        _, said = choose(store, resume="5")
        assert said == [f"step-00000010 is newer than step-00000005 and was set aside as step-00000010{ending}"]
        save_at(store, contents, 10)
    assert sorted(os.listdir(store.folder)) == [
        OLDER,
        *(f"step-00000010{one}" for one in ("", ".set-aside", ".set-aside-2")),
    ]


def test_trained_tensors_that_have_no_place_are_refused_and_not_dropped(store):  # noqa: F811
    folder = save_at(store, make_contents(1), 5)
    fewer = make_contents(2)
    fewer.engine.bare.lm[1].weight.requires_grad_(False)
    less = Single(EngineSpec(fewer.engine.bare))
    optimizer = build_optimizer(less.named_trainable(), OptimConfig(lr=0.1))
    with pytest.raises(StorageError, match=r"1 trained tensors that this run does not train: 1\.weight"):
        store.load(folder, replace(fewer, engine=less, optimizer=optimizer))
