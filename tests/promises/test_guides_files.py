"""A guide's YAML and data block train as they stand, and their converted form gives the same losses to the bit."""

from __future__ import annotations

from pathlib import Path

from commands import run_duoka
from guides import write_guides_files

from duoka.cli import run as duoka
from duoka.runs.events import global_log, read_events
from duoka.runs.folder import RunFolder


def train(folder: Path, file: str, *more: str) -> str:
    done = run_duoka("train", file, "--nproc", "2", *more, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in read_events(global_log(RunFolder(run))) if event["type"] == "step"]


def test_a_guides_files_train_unchanged_and_the_converted_form_gives_the_same_losses(
    tmp_path: Path, tiny_model: Path
) -> None:
    write_guides_files(tmp_path, tiny_model)
    said = train(tmp_path, "ddp_train_config.yaml")
    assert "4 per device x 2 accumulated x 2 processes = train.global_batch 16" in said, said
    theirs = losses(tmp_path / "ddp_training_output")
    assert len(theirs) == 6, "32 samples in batches of 16, three times"

    convert = ["config", "convert", str(tmp_path / "ddp_train_config.yaml"), "-o", str(tmp_path / "ours.yaml")]
    assert duoka([*convert, "--nproc", "2"]) == 0
    train(tmp_path, "ours.yaml", "output=other")
    assert losses(tmp_path / "other") == theirs
