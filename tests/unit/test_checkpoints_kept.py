"""What a start moves out of its way stays as it is, and what a checkpoint holds is not dropped."""

import os
import shutil
from dataclasses import replace

import pytest
import torch
from test_checkpoint import OLDER, choose, make_contents, save_at, store  # noqa: F401

from duoka.cluster.run_lock import hold_run
from duoka.comm.world import World
from duoka.config.schema import OptimConfig
from duoka.errors import StorageError
from duoka.optim.build import build_optimizer
from duoka.parallel.engine import EngineSpec
from duoka.parallel.single import Single
from duoka.plan.layout import Layout
from duoka.runs.folder import RunFolder
from duoka.runs.manifest import read_manifest, write_manifest
from duoka.store.checkpoint import CheckpointStore
from duoka.store.resume import find_damage


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


def test_what_else_lies_in_a_checkpoints_folder_is_not_read(store, tmp_path):  # noqa: F811
    """A copy made again without removing what was there (rsync), a file manager's notes, an editor's draft."""
    contents = make_contents(1)
    folder = save_at(store, contents, 5)
    old = save_at(store, make_contents(9), 10)
    shutil.copy(next(old.glob("tensors-*")), folder / "tensors-00001.safetensors")  # of a world of two, say
    (folder / "._tensors-00000.safetensors").write_bytes(b"\0\5\x16\7 no tensors")
    (folder / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    (folder / ".nfs00000000deadbeef00000001").write_bytes(b"")
    assert find_damage(folder, World()) == ""
    other = make_contents(2)
    store.load(folder, other)
    for name, tensor in contents.tensors().items():
        assert torch.equal(other.tensors()[name], tensor), name


def save_under(store, resume, step, keep=9):  # noqa: F811
    """A checkpoint whose config asks to begin from `resume`."""
    text = f"model: x\ndata: {{train: [y]}}\noutput: z\ncheckpoint: {{resume: {resume}}}\n"
    store.facts = replace(store.facts, config_text=text)
    return save_at(store, make_contents(step), step, keep)


def test_a_number_is_a_step_of_this_run_and_is_said_by_its_folders_name(store, tmp_path, monkeypatch):  # noqa: F811
    save_at(store, make_contents(1), 4)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "4").mkdir()  # by chance, where the command is typed
    found, said = choose(store, "4")
    assert found.name == "step-00000004" and said == []
    with pytest.raises(StorageError, match=r"checkpoint.resume is '6': there is no step-00000006"):
        choose(store, "6")
    save_under(store, "4", 8)
    found, said = choose(store, "4")
    newest = "the newest of its own checkpoints is taken"
    assert said == [f"this run began from step-00000004 and has gone on since: {newest}"]
    with (store.folder / "step-00000008" / "state.json").open("a") as file:
        file.write(" ")
    with pytest.raises(StorageError, match=r"checkpoint.resume is '8', and step-00000008 is damaged"):
        choose(store, "8")


def test_a_damaged_checkpoint_of_a_run_that_began_elsewhere_does_not_pass_for_the_next_save(store):  # noqa: F811
    """It kept the name of the step that was saved next, which then was not written, and outlived the sound ones."""
    older, newer = save_under(store, "elsewhere", 5), save_under(store, "elsewhere", 10)
    with (newer / "state.json").open("a") as file:
        file.write(" ")
    found, said = choose(store, "elsewhere")
    assert found == older and "passing over the damaged checkpoint step-00000010" in said[-1]
    assert sorted(os.listdir(store.folder)) == [OLDER, "step-00000010.damaged"]
    assert find_damage(save_under(store, "elsewhere", 10, keep=1), World()) == ""
    assert os.listdir(store.folder) == ["step-00000010"]


def test_a_run_that_began_elsewhere_goes_on_from_the_newest_it_has_whatever_that_was_written_under(store):  # noqa: F811
    save_under(store, "elsewhere", 5)
    newest = save_under(store, "auto", 10)
    found, said = choose(store, "elsewhere")
    assert found == newest and "the newest of its own checkpoints is taken" in said[0]


def test_a_checkpoint_of_another_version_is_refused_and_not_passed_over_as_damaged(store):  # noqa: F811
    """Passed over it was renamed, and removed when the run came by its step."""
    save_at(store, make_contents(1), 5)
    newer = save_at(store, make_contents(1), 10)
    write_manifest(newer, replace(read_manifest(newer), format=3))
    with pytest.raises(StorageError, match="has format 3, and this duoka reads 2") as refused:
        choose(store)
    assert "the version of duoka that wrote it" in (refused.value.fix or "") and newer.is_dir()


def test_a_run_whose_folder_another_start_has_now_writes_nothing_there(store):  # noqa: F811
    """Deleted and begun anew while it trained: its checkpoint would pass for one of the new run."""
    run = RunFolder(store.folder.parent)
    with hold_run(run):
        ours = CheckpointStore(run.checkpoints, World(), Layout(), asynchronous=False)
        save_at(ours, make_contents(1), 5)
        run.lock.unlink()  # by somebody who takes it for a stale one
        save_at(ours, make_contents(1), 10)
        shutil.rmtree(run.path)
        with hold_run(run):
            with pytest.raises(StorageError, match="another start works there now"):
                save_at(ours, make_contents(1), 15)
            save_at(CheckpointStore(run.checkpoints, World(), Layout(), asynchronous=False), make_contents(2), 5)
            assert os.listdir(run.checkpoints) == [OLDER]
