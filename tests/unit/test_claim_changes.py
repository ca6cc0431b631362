"""May a run go on under another config? What `duoka train` answers before any process starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_cli_train import YAML, make_run

from duoka import cli as frame
from duoka.cluster.run_lock import check_claim
from duoka.config.load import load_config, resolved_yaml
from duoka.errors import ConfigError
from duoka.runs.status import Status, write_status


@pytest.fixture
def home(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sft.yaml").write_text(YAML.format(model=tiny_model, output="runs/sft"), encoding="utf-8")
    return tmp_path


def test_a_change_is_allowed_by_name_and_the_message_says_how(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(home)
    assert frame.run(["train", "sft.yaml", "optim.lr=2e-3"]) == 2
    assert "checkpoint.allow_changes=[optim.lr]" in capsys.readouterr().err
    allowed = ["optim.lr=2e-3", "checkpoint.allow_changes=[optim.lr]"]
    assert check_claim(load_config("sft.yaml", allowed), run) == "resumed"


def test_what_the_newest_checkpoint_was_written_under_counts(home: Path) -> None:
    run = make_run(home)
    folder = run.checkpoints / "step-00000003"
    folder.mkdir()
    (folder / "config.yaml").write_bytes(run.config.read_bytes())
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
    with pytest.raises(ConfigError, match="there is no such checkpoint"):
        check_claim(load_config("sft.yaml", ["checkpoint.resume=7"]), run)
    (run.checkpoints / "step-00000007").mkdir()
    for spelled in ("7", "step-00000007", "step-00000007/", "runs/sft/", "sft"):
        assert check_claim(load_config("sft.yaml", [f"checkpoint.resume={spelled}"]), run) == "resumed", spelled
