"""A run's checkpoint is read while the run goes on, which saves newer ones and removes the one that was chosen."""

import os
import shutil

import pytest
from test_checkpoint import make_contents, save_at, store  # noqa: F401

import duoka.store.resume
from duoka import cli
from duoka.comm.world import World
from duoka.errors import ConfigError
from duoka.process.lifeline import PARENT_PID
from duoka.process.rank import LOGS_FOLDER
from duoka.runs.failure import read_failures
from duoka.runs.folder import RunFolder
from duoka.serve import embed, evaluate, score, score_tasks
from duoka.serve.load_run import agree_on_checkpoint, find_trained, load_trained
from duoka.serve.run_checkpoint import find_checkpoint

YAML = "model: {model}\ndata: {{train: [identity]}}\noutput: {output}\n"


@pytest.fixture
def run(store, tiny_model):  # noqa: F811
    folder = RunFolder(store.folder.parent)
    folder.config.write_text(YAML.format(model=tiny_model, output=folder.path), encoding="utf-8")
    for step in (5, 10):
        save_at(store, make_contents(step), step)
    return folder


def quiet(text):
    pass


def test_the_newest_is_looked_for_again_when_it_is_removed_meanwhile(run, store, monkeypatch):  # noqa: F811
    """It was called damaged, and of a run that keeps one: "has neither a result nor a checkpoint yet"."""
    look, said = duoka.store.resume.find_damage, []

    def look_late(folder, world):
        if folder.name == "step-00000010":
            save_at(store, make_contents(15), 15, keep=1)
        return look(folder, world)

    monkeypatch.setattr(duoka.store.resume, "find_damage", look_late)
    assert find_checkpoint(run, None, said.append).name == "step-00000015" and not said
    shutil.rmtree(run.checkpoints / "step-00000015")
    with pytest.raises(ConfigError, match="neither a result nor a checkpoint yet"):
        find_checkpoint(run, None, said.append)


def test_a_checkpoint_that_is_removed_while_it_is_loaded_is_no_bug(run):
    import torch

    trained = find_trained(str(run.path), say=quiet)
    assert trained.checkpoint.name == "step-00000010"
    shutil.rmtree(trained.checkpoint)
    with pytest.raises(ConfigError, match="step-00000010 was removed while it was read") as caught:
        load_trained(trained, dtype=torch.float32)
    assert "checkpoint.keep" in str(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_s_fault_is_left_for_its_launcher_to_say(rank, tmp_path, monkeypatch, capsys):
    """`worker failed: rank 1 of 2 ended with exit code 2` was all that the terminal had of it."""
    told = RunFolder(tmp_path)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": 29500, LOGS_FOLDER: told.logs, PARENT_PID: os.getppid()}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    assert cli.run(["embed", "nowhere", str(tmp_path / "none.txt")]) == 2
    (failure,) = read_failures(told)
    assert (failure.rank, failure.exit_code) == (rank, 2) and "there is no file" in failure.lines[0]
    assert ("there is no file" in capsys.readouterr().err) == (rank == 1), "of rank 0 the launcher says it"


def test_all_ranks_read_the_checkpoint_of_rank_0(run):
    """Two ranks that looked a moment apart measured parts of two models, and added them up."""

    class Second:
        def agree(self, value):
            assert value == "step-00000010"
            return "step-00000005"

        def gather(self, value):
            return [None, value]

    trained = find_trained(str(run.path), say=quiet)
    assert agree_on_checkpoint(Second(), trained).checkpoint == run.checkpoints / "step-00000005"
    shutil.rmtree(run.checkpoints / "step-00000005")
    with pytest.raises(ConfigError, match="step-00000005 was removed while it was read"):
        agree_on_checkpoint(Second(), trained)


WORKS = {
    "eval": (evaluate, lambda trained, out: evaluate.evaluate_in(World(), trained, None)),
    "score": (score, lambda trained, out: score.score(trained, None, out)),
    "embed": (embed, lambda trained, out: embed.embed(trained, ["a"], out, max_length=8)),
    "tasks": (score_tasks, lambda trained, out: score_tasks.score_tasks(trained, None, out, say=quiet)),
}


@pytest.mark.parametrize("name", WORKS)
def test_what_ranks_agreed_on_is_what_each_command_reads(name, run, tmp_path, monkeypatch):
    class Read(Exception):
        pass

    class Agreed:
        def __getattr__(self, part):
            raise Read(part)

    module, start = WORKS[name]
    monkeypatch.setattr(module, "agree_on_checkpoint", lambda world, trained: Agreed())
    monkeypatch.setattr(score_tasks, "find_asked", lambda asked: [])
    with pytest.raises(Read):
        start(find_trained(str(run.path), say=quiet), tmp_path / "out")
