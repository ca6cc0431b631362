"""A checkpoint is whole or it is passed over; what it holds comes back bit for bit."""

import errno
import fcntl
import json
import os
import pickle
import shutil
import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from duoka.comm.world import World
from duoka.config.schema import OptimConfig
from duoka.errors import StorageError
from duoka.model.build import LossModel
from duoka.optim.build import build_optimizer, optimizer_tensors
from duoka.parallel.engine import EngineSpec
from duoka.parallel.single import Single
from duoka.plan.layout import Layout
from duoka.runs.folder import RunFolder
from duoka.runs.manifest import check_file, list_checkpoints, read_manifest, write_manifest
from duoka.store import checkpoint
from duoka.store.checkpoint import CheckpointStore, Facts, SaveFault
from duoka.store.contents import Contents
from duoka.store.resume import choose_checkpoint, find_damage
from duoka.store.retention import Keep, clean_drafts
from duoka.store.state import TrainState


def make_contents(seed, learn=True, size=7):
    torch.manual_seed(seed)
    bare = LossModel(torch.nn.Sequential(torch.nn.Linear(5, size), torch.nn.Linear(size, 3 * size)))
    engine = Single(EngineSpec(bare))
    optimizer = build_optimizer(engine.named_trainable(), OptimConfig(lr=0.1))
    if learn:
        bare.lm(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
    return Contents(engine, optimizer, TrainState(step=3, epoch=1, index=2))


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
        each.engine.bare.lm(batch).square().sum().backward()
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


def flip_in_tensor(folder, name):
    """One bit in the values of one tensor, found by the file's own header."""
    path = next(folder.glob("tensors-*"))
    raw = bytearray(path.read_bytes())
    header_bytes = int.from_bytes(raw[:8], "little")
    start, stop = json.loads(raw[8 : 8 + header_bytes])[name]["data_offsets"]
    raw[8 + header_bytes + (start + stop) // 2] ^= 4
    path.write_bytes(raw)


def change_digit(manifest):
    text = manifest.read_text()
    assert '"step": 10' in text
    manifest.write_text(text.replace('"step": 10', '"step": 11'))


class Bomb:
    """A pickle that runs a command when it is loaded."""

    def __reduce__(self):
        return os.system, (f"touch {MARKER}",)


MARKER = "executed-by-a-pickle"


def name_a_file_outside(manifest):
    files = {"../x": {"size_bytes": 1, "crc32": ""}}
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"files": files}))


OLDER = "step-00000005"


def make_pipe(path):
    path.unlink()
    os.mkfifo(path)


DAMAGE = {
    "a flipped byte in a shard": lambda folder: flip_byte(next(folder.glob("tensors-*"))),
    "a flipped bit in a weight": lambda folder: flip_in_tensor(folder, "model.0.weight"),
    "a flipped bit in the optimizer's state": lambda folder: flip_in_tensor(folder, "optim.exp_avg.1.weight"),
    "a changed digit in the manifest": lambda folder: change_digit(folder / "manifest.json"),
    "a pickle in a shard's place": lambda folder: next(folder.glob("tensors-*")).write_bytes(pickle.dumps(Bomb())),
    "a cut shard": lambda folder: os.truncate(next(folder.glob("tensors-*")), 100),
    "a missing shard": lambda folder: next(folder.glob("tensors-*")).unlink(),
    "a changed state": lambda folder: (folder / "state.json").write_text("{}"),
    "a missing generator": lambda folder: (folder / "random-00000.safetensors").unlink(),
    "a cut manifest": lambda folder: os.truncate(folder / "manifest.json", 50),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "a manifest of something else": lambda folder: (folder / "manifest.json").write_text('{"files": {"x": 3}}'),
    "a named pipe as manifest": lambda folder: make_pipe(folder / "manifest.json"),
    "a copy of another step": lambda folder: (shutil.rmtree(folder), shutil.copytree(folder.parent / OLDER, folder)),
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


def test_the_damaged_file_is_named_and_moved_out_of_the_way(store):
    contents = make_contents(1)
    save_at(store, contents, 5)
    newer = save_at(store, contents, 10)
    flip_in_tensor(newer, "optim.exp_avg.1.weight")
    _, said = choose(store)
    assert said == ["passing over the damaged checkpoint step-00000010: tensors-00000.safetensors: content changed"]
    assert sorted(os.listdir(store.folder)) == ["step-00000005", "step-00000010.damaged"]
    assert save_at(store, contents, 10) == newer, "the run saves there again"
    assert sorted(os.listdir(store.folder)) == ["step-00000005", "step-00000010"], "and the damaged one goes"


def test_two_ranks_files_that_were_swapped_are_both_named(store):
    folder = save_at(store, make_contents(1), 5)
    mine, other = folder / "tensors-00000.safetensors", folder / "tensors-00001.safetensors"
    other.write_bytes(bytes(reversed(mine.read_bytes())))
    manifest = read_manifest(folder)
    write_manifest(folder, replace(manifest, files={**manifest.files, other.name: check_file(other)}))
    assert find_damage(folder, World()) == ""
    mine.rename(folder / "x")
    other.rename(mine)
    (folder / "x").rename(other)
    assert find_damage(folder, World()) == f"{mine.name}: content changed; {other.name}: content changed"


@pytest.mark.parametrize("name", ["tensors-00000.safetensors", "random-00000.safetensors", "state.json"])
def test_a_pickle_is_never_executed_even_when_the_manifest_vouches_for_it(store, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = save_at(store, make_contents(1), 5)
    (folder / name).write_bytes(pickle.dumps(Bomb()))
    manifest = read_manifest(folder)
    write_manifest(folder, replace(manifest, files={**manifest.files, name: check_file(folder / name)}))
    assert find_damage(folder, World()) == ""
    with pytest.raises(Exception) as caught:
        store.load(folder, make_contents(2))
    assert not os.path.exists(MARKER), caught


def test_what_is_written_is_the_moment_of_the_save(store):
    contents = make_contents(1)
    before = {name: tensor.clone() for name, tensor in contents.tensors().items()}
    contents.state.step = 5
    store.save(contents, Keep())
    store.release()
    with torch.no_grad():
        for parameter in contents.engine.bare.parameters():
            parameter.add_(1.0)
    contents.state.step = 6
    store.wait()
    other = make_contents(2)
    store.load(store.folder / "step-00000005", other)
    assert all(torch.equal(other.tensors()[name], tensor) for name, tensor in before.items())
    assert other.state.step == 5


def test_two_saves_are_never_under_way_at_once_and_a_fault_is_told_by_the_next(tmp_path, monkeypatch):
    run = RunFolder(tmp_path)
    run.make()
    store = CheckpointStore(run.checkpoints, World(), Layout())
    under_way, most, fail = [], [], []
    real = checkpoint.write_share

    def slow(path, chunks):
        under_way.append(path)
        most.append(len(under_way))
        time.sleep(0.05)
        under_way.remove(path)
        if fail:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, chunks)

    monkeypatch.setattr(checkpoint, "write_share", slow)
    contents = make_contents(1)
    for step in range(1, 5):
        contents.state.step = step
        before = store.save(contents, Keep(9))
        assert (before.step if before else None) == (step - 1 or None)
    assert store.wait().step == 4
    fail.append(True)
    contents.state.step = 5
    store.save(contents, Keep(9))
    contents.state.step = 6
    fault = store.save(contents, Keep(9))
    assert isinstance(fault, SaveFault) and fault.step == 5 and "Input/output error" in fault.where
    assert store.wait() is None, "after a fault the next one is not begun: who saves decides what to do"
    assert most and max(most) == 1
    assert [path.name for path in list_checkpoints(store.folder)] == [f"step-{step:08d}" for step in (4, 3, 2, 1)]
    store.close()


@pytest.mark.parametrize(
    "keep, stay",
    [
        (Keep(2), [60, 50]),
        (Keep(1, every=20), [60, 40, 20]),
        (Keep(1, best=30), [60, 30]),
        (Keep(2, every=50, best=10), [60, 50, 10]),
    ],
)
def test_which_checkpoints_stay(keep, stay):
    steps = [60, 50, 40, 30, 20, 10]
    assert [step for step in steps if step not in keep.removes(steps)] == stay


def test_a_frozen_base_is_not_saved(store):
    contents = make_contents(1)
    contents.engine.bare.lm[0].requires_grad_(False)
    contents = Contents(Single(EngineSpec(contents.engine.bare)), contents.optimizer, contents.state)
    path = save_at(store, contents, 5)
    from safetensors import safe_open

    with safe_open(path / "tensors-00000.safetensors", framework="pt") as file:
        assert sorted(file.keys()) == sorted(
            f"{kind}.1.{name}"
            for kind in ("model", "optim.step", "optim.exp_avg", "optim.exp_avg_sq")
            for name in ("weight", "bias")
        )


@pytest.mark.parametrize("call", ["open", "write"])
def test_a_file_system_without_direct_writes_is_written_to_all_the_same(store, monkeypatch, call):
    real, direct, refused = getattr(os, call), getattr(os, "O_DIRECT", 0), []

    def refuse(first, *arguments, **options):
        flags = arguments[0] if call == "open" else fcntl.fcntl(first, fcntl.F_GETFL)
        if flags & direct:
            refused.append(call)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(first, *arguments, **options)

    monkeypatch.setattr(f"duoka.store.snapshot.os.{call}", refuse)
    assert find_damage(save_at(store, make_contents(1), 5), World()) == ""
    assert refused or not direct


def test_files_have_the_modes_that_the_umask_asks_for(store):
    path = save_at(store, make_contents(1), 5)
    before = os.umask(0)
    os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o666 & ~before}


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

    monkeypatch.setattr("duoka.store.checkpoint.write_share", full)
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
    with pytest.raises(StorageError, match="there is no step-00000007"):
        choose(store, "step-00000007")


def test_optimizer_state_is_named_by_parameter():
    contents = make_contents(1)
    names = set(optimizer_tensors(contents.optimizer, contents.engine.named_trainable()))
    assert "exp_avg.0.weight" in names and "exp_avg_sq.1.bias" in names and "step.0.weight" in names
