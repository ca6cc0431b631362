"""Promise 2 for evaluation: 99 samples are 99, and the loss is the same, on any number of processes."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
from commands import run_duoka
from tiny import write_conversations
from worlds import run_world

from duoka.cli import run as duoka

NUM_SAMPLES = 99


def say(line: list[str], folder: str) -> None:
    """One rank of a world types the command; what it prints goes to a file of its own."""
    path = Path(folder) / f"said-{os.environ.get('RANK', '0')}.txt"
    with path.open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        assert duoka(line) == 0


def said_by(num_processes: int, line: list[str], folder: Path) -> str:
    folder.mkdir()
    run_world(num_processes, say, line, str(folder))
    return "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("said-*.txt")))


def said_by_command(line: list[str], num_processes: int) -> str:
    done = run_duoka(*line, "--nproc", str(num_processes))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("data") / "talks.jsonl", NUM_SAMPLES)


def test_eval_over_99_samples_reports_99_and_the_same_loss_on_any_number_of_processes(
    tiny_model: Path, data: Path, tmp_path: Path
) -> None:
    line = ["eval", str(tiny_model), "--data", str(data), "--json"]
    said = [said_by(1, line, tmp_path / "1"), said_by_command(line, 2), said_by(3, line, tmp_path / "3")]
    alone, *others = [json.loads(one) for one in said]
    assert alone["num_samples"] == NUM_SAMPLES
    for found in others:
        assert found["num_samples"] == NUM_SAMPLES
        assert found["num_targets"] == alone["num_targets"]
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-6)
        assert found["accuracy"] == pytest.approx(alone["accuracy"], abs=1e-9)
    assert [found["world_size"] for found in others] == [2, 3]


def test_answers_of_two_processes_are_those_of_one_in_the_same_order(tiny_model: Path, tmp_path: Path) -> None:
    """21 conversations for 2 ranks that meet after every 16: a last, uneven round."""
    write_conversations(tmp_path / "c.jsonl", 21)
    written = []
    for num_processes in (1, 2):
        out = tmp_path / f"out{num_processes}"
        keys = {"model_name_or_path": str(tiny_model), "do_predict": True, "predict_with_generate": True,
                "eval_dataset": str(tmp_path / "c.jsonl"), "cutoff_len": 256, "template": "default",
                "output_dir": str(out), "max_new_tokens": 4, "do_sample": True, "temperature": 2.0}  # fmt: skip
        (tmp_path / "x.yaml").write_text(json.dumps(keys), "utf-8")
        said = said_by(num_processes, ["eval", str(tmp_path / "x.yaml")], tmp_path / str(num_processes))
        assert said.count("21 answers:") == 1, said
        written.append((out / "generated_predictions.jsonl").read_text("utf-8"))
    assert written[0] == written[1]
    lines = [json.loads(line) for line in written[0].splitlines()]
    talks = [json.loads(line)["messages"] for line in (tmp_path / "c.jsonl").read_text("utf-8").splitlines()]
    assert [one["label"] for one in lines] == [talk[-1]["content"] for talk in talks]
    assert len({one["predict"] for one in lines}) > 5, "answers say nothing about their order"


def test_what_every_process_refuses_is_said_once(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    done = run_duoka("eval", tiny_model, "--data", tmp_path / "bad.jsonl", "--nproc", "2")
    assert done.returncode == 2
    assert done.stderr.count("data error") == 1 and "Traceback" not in done.stderr, done.stderr
