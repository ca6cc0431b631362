"""May a run go on under another config? What `duoka train` answers before any process starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from test_cli_train import YAML, make_run

from duoka import cli as frame
from duoka.cluster.run_lock import check_claim
from duoka.config.changes import refused_changes
from duoka.config.load import load_config, resolved_yaml
from duoka.errors import ConfigError
from duoka.plan.layout import Layout
from duoka.runs.folder import RunFolder
from duoka.runs.manifest import Manifest, write_file, write_manifest
from duoka.runs.status import Status, write_status
from duoka.store.resume import compare_with_run


@pytest.fixture
def home(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sft.yaml").write_text(YAML.format(model=tiny_model, output="runs/sft"), encoding="utf-8")
    return tmp_path


def make_checkpoint(run: RunFolder, step: int, *overrides: str) -> Path:
    """A whole one of a config alone."""
    folder = run.checkpoints / f"step-{step:08d}"
    folder.mkdir()
    text = resolved_yaml(load_config("sft.yaml", overrides)).encode()
    files = {"config.yaml": write_file(folder / "config.yaml", text)}
    write_manifest(folder, Manifest(step, Layout().to_json(), 1, "", "data", {}, files))
    return folder


def test_a_change_is_allowed_by_name_and_the_message_says_how(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(home)
    assert frame.run(["train", "sft.yaml", "optim.lr=2e-3"]) == 2
    assert "from its newest checkpoint on:   checkpoint.allow_changes=[optim.lr]" in capsys.readouterr().err
    assert frame.run(["train", "sft.yaml", "train.seed=9"]) == 2
    assert "from a checkpoint at an epoch's end on:   checkpoint.allow_changes=[train.seed]" in capsys.readouterr().err
    allowed = ["optim.lr=2e-3", "checkpoint.allow_changes=[optim.lr]"]
    assert check_claim(load_config("sft.yaml", allowed), run) == "resumed"


def test_what_the_newest_checkpoint_was_written_under_counts(home: Path) -> None:
    run = make_run(home)
    make_checkpoint(run, 3)
    # A start with an allowed change that a rank refused later has left its config behind.
    run.config.write_text(resolved_yaml(load_config("sft.yaml", ["optim.lr=2e-3"])), encoding="utf-8")
    assert check_claim(load_config("sft.yaml"), run) == "resumed"


def test_a_finished_run_goes_on_with_more_epochs(home: Path) -> None:
    run = make_run(home)
    run.final.mkdir()
    write_status(run, Status("done", step=3, total_steps=3))
    with pytest.raises(ConfigError, match="other settings"):
        check_claim(load_config("sft.yaml", ["train.epochs=2"]), run)
    by_name = ["train.epochs=2", "checkpoint.allow_changes=[train.epochs]"]
    assert check_claim(load_config("sft.yaml", by_name), run) == "resumed"
    constant = ["optim.schedule=constant", "optim.warmup=0"]
    run.config.write_text(resolved_yaml(load_config("sft.yaml", constant)), encoding="utf-8")
    assert check_claim(load_config("sft.yaml", [*constant, "train.epochs=2"]), run) == "resumed"
    assert check_claim(load_config("sft.yaml", constant), run) == "finished"


def test_a_checkpoint_that_is_not_there_is_refused_at_once(home: Path) -> None:
    run = make_run(home)
    with pytest.raises(ConfigError, match="resume is 7, and there is no checkpoint, folder or run step-00000007"):
        check_claim(load_config("sft.yaml", ["checkpoint.resume=7"]), run)
    (run.checkpoints / "step-00000007").mkdir()
    for spelled in ("7", "step-00000007", "step-00000007/", "runs/sft/", "sft"):
        assert check_claim(load_config("sft.yaml", [f"checkpoint.resume={spelled}"]), run) == "resumed", spelled


@pytest.mark.parametrize("damage", ["no YAML: [", "optim: {lr: 5}", None])
def test_a_damaged_config_in_the_newest_checkpoint_is_passed_over(home: Path, damage: str | None) -> None:
    run = make_run(home)
    make_checkpoint(run, 2)
    newest = make_checkpoint(run, 3) / "config.yaml"
    newest.unlink() if damage is None else newest.write_text(damage)
    assert check_claim(load_config("sft.yaml"), run) == "resumed"
    with pytest.raises(ConfigError, match=r"optim\.lr: 0\.001 there"):
        check_claim(load_config("sft.yaml", ["optim.lr=2e-3"]), run)


@pytest.mark.parametrize("damage", ["missing", "fifo", "no YAML: ["])
def test_a_run_without_its_own_config_goes_on_by_that_of_its_checkpoint(home: Path, damage: str) -> None:
    run = make_run(home)
    make_checkpoint(run, 3)
    (run.path / "data.json").write_text("{}")
    run.config.unlink()
    if damage == "fifo":
        os.mkfifo(run.config)
    elif damage != "missing":
        run.config.write_text(damage)
    assert check_claim(load_config("sft.yaml"), run) == "resumed"
    with pytest.raises(ConfigError, match=r"optim\.lr: 0\.001 there"):
        check_claim(load_config("sft.yaml", ["optim.lr=2e-3"]), run)
    (run.checkpoints / "step-00000003" / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"whose config\.yaml this duoka cannot read"):
        check_claim(load_config("sft.yaml"), run)


@pytest.mark.parametrize("change", [
    "optim.name=lamb", "model.name=demo", "lora.rank=16", "lora.targets=[q_proj]", "lora={rank: 4}", "lora.init=pissa",
    "optim.state=runs/other", "train_only={layers: 1}",
])  # fmt: skip
def test_what_no_allowance_can_change_is_not_offered_and_not_taken(home: Path, change: str) -> None:
    lora = ["lora={rank: 8}"] if change.startswith("lora.") else []
    old, new = load_config("sft.yaml", lora).config, load_config("sft.yaml", [*lora, change]).config
    (difference,) = refused_changes(old, new)
    key, section = difference.key, difference.key.split(".")[0]
    for allowed in (key, section):
        named = load_config("sft.yaml", [*lora, change, f"checkpoint.allow_changes=[{allowed}]"]).config
        assert [one.key for one in refused_changes(old, named)] == [key]
    run = make_run(home)
    run.config.write_text(resolved_yaml(load_config("sft.yaml", lora)), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        check_claim(load_config("sft.yaml", [*lora, change]), run)
    assert "allow_changes=" not in str(caught.value) and f"{key} is fixed for a run" in str(caught.value)


def test_alpha_may_change_but_not_where_the_base_was_computed_from_it(home: Path) -> None:
    for init, refused in (("random", []), ("pissa", ["lora.alpha", "train.seed"])):
        lora = f"lora={{init: {init}, dropout: 0}}"
        old = load_config("sft.yaml", [lora]).config
        change = ["lora.alpha=4", "train.seed=3", "checkpoint.allow_changes=[lora, train]"]
        assert [one.key for one in refused_changes(old, load_config("sft.yaml", [lora, *change]).config)] == refused


def test_an_allowed_change_of_precision_is_not_called_one_with_the_same_results(home: Path) -> None:
    run = make_run(home)
    folder = make_checkpoint(run, 3, "train.precision=fp32")
    change = ["train.precision=bf16", "checkpoint.allow_changes=[train.precision]"]
    notes = compare_with_run(
        folder, load_config("sft.yaml", change).config, "data", home, Layout(precision="bf16")
    ).notes()
    assert notes == ["allowed to change: train.precision fp32 -> bf16"]
