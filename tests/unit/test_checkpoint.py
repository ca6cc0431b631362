"""A checkpoint is whole or it is passed over; what it holds comes back bit for bit."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from duoka.config.schema import OptimConfig
from duoka.errors import StorageError
from duoka.model.build import LossModel
from duoka.optim.build import build_optimizer, optimizer_tensors
from duoka.parallel.apply import Parallelized
from duoka.parallel.world import World
from duoka.plan.layout import Layout
from duoka.runs.folder import RunFolder
from duoka.runs.manifest import list_checkpoints
from duoka.train.checkpoint import CheckpointStore, Contents, Facts, SaveFault
from duoka.train.resume import choose_checkpoint, find_damage
from duoka.train.retention import Keep, clean_drafts
from duoka.train.state import TrainState
from duoka.train.step import build_numerics


def make_contents(seed, learn=True):
    torch.manual_seed(seed)
    bare = LossModel(torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)))
    parallel = Parallelized(bare, bare)
    optimizer = build_optimizer(parallel.named_trainable(), OptimConfig(lr=0.1))
    if learn:
        bare.lm(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
    numerics = build_numerics("fp32", torch.device("cpu"))
    return Contents(parallel, optimizer, numerics, TrainState(step=3, epoch=1, index=2))


@pytest.fixture(params=[True, False], ids=["async", "sync"])
def store(tmp_path, request):
    run = RunFolder(tmp_path)
    run.make()
    made = CheckpointStore(
        run.checkpoints, World(), Layout(), Facts("hash", "", "data", {"duoka": "test"}), asynchronous=request.param
    )
    yield made
    made.close()


def save_at(store, contents, step, keep=2):
    """Save and wait for the end; a fault is raised as the run would."""
    contents.state.step = step
    ended = store.save(contents, Keep(keep)) or store.wait()
    if isinstance(ended, SaveFault):
        raise ended.error()
    return ended.path


def choose(store, resume="auto"):
    said = []
    found = choose_checkpoint(RunFolder(store.folder.parent), resume, Path(), World(), said.append)
    return found, said


def test_everything_comes_back_bit_for_bit(store):
    contents = make_contents(1)
    path = save_at(store, contents, 5)
    drawn = torch.rand(3)
    other = make_contents(2, learn=False)
    store.load(path, other)
    for name, tensor in contents.tensors().items():
        assert torch.equal(other.tensors()[name], tensor), name
    assert other.state == contents.state
    assert torch.equal(torch.rand(3), drawn), "the random generator goes on where it was"


def test_loading_continues_as_if_never_stopped(store):
    contents = make_contents(1)
    path = save_at(store, contents, 5)
    other = make_contents(2, learn=False)
    store.load(path, other)
    batch = torch.randn(4, 5)
    for each in (contents, other):
        each.optimizer.zero_grad()
        each.parallel.bare.lm(batch).square().sum().backward()
        each.optimizer.step()
    for name, tensor in contents.tensors().items():
        assert torch.equal(other.tensors()[name], tensor), name


def test_no_pickle_is_written(store):
    path = save_at(store, make_contents(1), 5)
    assert {name.rsplit(".", 1)[1] for name in os.listdir(path)} == {"json", "safetensors", "yaml"}
    for name in os.listdir(path):
        assert (path / name).read_bytes()[:2] not in (b"\x80\x02", b"PK"), name


def flip_byte(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def name_a_file_outside(manifest):
    files = {"../x": {"size_bytes": 1, "crc32": ""}}
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"files": files}))


DAMAGE = {
    "a flipped byte in a shard": lambda folder: flip_byte(next(folder.glob("tensors-*"))),
    "a cut shard": lambda folder: os.truncate(next(folder.glob("tensors-*")), 100),
    "a missing shard": lambda folder: next(folder.glob("tensors-*")).unlink(),
    "a changed state": lambda folder: (folder / "state.json").write_text("{}"),
    "a missing generator": lambda folder: (folder / "random-00000.safetensors").unlink(),
    "a cut manifest": lambda folder: os.truncate(folder / "manifest.json", 50),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "a manifest of something else": lambda folder: (folder / "manifest.json").write_text('{"files": {"x": 3}}'),
    "a name that leaves the folder": lambda folder: name_a_file_outside(folder / "manifest.json"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_the_older_checkpoint_is_used(store, kind):
    contents = make_contents(1)
    older = save_at(store, contents, 5)
    newer = save_at(store, contents, 10)
    assert choose(store) == (newer, [])
    DAMAGE[kind](newer)
    assert find_damage(newer, World())
    found, said = choose(store)
    assert found == older
    assert len(said) == 1 and newer.name in said[0]


def test_when_all_are_damaged_the_run_is_refused(store):
    flip_byte(next(save_at(store, make_contents(1), 5).glob("tensors-*")))
    with pytest.raises(StorageError, match="every checkpoint"):
        choose(store)


def test_only_the_newest_stay_and_nothing_half_removed_is_left(store):
    contents = make_contents(1)
    for step in (5, 10, 15, 20):
        save_at(store, contents, step, keep=2)
    assert [folder.name for folder in list_checkpoints(store.folder)] == ["step-00000020", "step-00000015"]
    assert len(os.listdir(store.folder)) == 2


def test_a_half_written_folder_is_no_checkpoint_and_is_cleaned(store):
    save_at(store, make_contents(1), 5)
    draft = store.folder / ".step-00000010.draft"
    draft.mkdir()
    (draft / "tensors-00000.safetensors").write_bytes(b"half")
    found, _ = choose(store)
    assert found.name == "step-00000005"
    assert clean_drafts(store.folder) == [draft.name]
    assert not draft.exists()


def test_saving_the_same_step_again_keeps_the_good_one(store):
    contents = make_contents(1)
    path = save_at(store, contents, 5)
    before = (path / "manifest.json").stat().st_mtime_ns
    assert save_at(store, contents, 5) == path
    assert (path / "manifest.json").stat().st_mtime_ns == before


def test_a_save_that_fails_leaves_the_earlier_one_and_says_why(store, monkeypatch):
    contents = make_contents(1)
    older = save_at(store, contents, 5)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("duoka.train.checkpoint.write_share", full)
    with pytest.raises(StorageError, match="No space left") as caught:
        save_at(store, contents, 10)
    assert "free there" in str(caught.value)
    assert choose(store) == (older, [])
    assert os.listdir(store.folder) == [older.name]


def test_resume_from_a_named_checkpoint_or_never(store):
    contents = make_contents(1)
    older = save_at(store, contents, 5)
    save_at(store, contents, 10)
    assert choose(store, "step-00000005")[0] == older
    assert choose(store, f"{older}/")[0] == older
    assert choose(store, "never")[0] is None
    with pytest.raises(StorageError, match="no such folder"):
        choose(store, "step-00000007")


def test_optimizer_state_is_named_by_parameter():
    contents = make_contents(1)
    names = set(optimizer_tensors(contents.optimizer, contents.parallel.named_trainable()))
    assert "exp_avg.0.weight" in names and "exp_avg_sq.1.bias" in names and "step.0.weight" in names
