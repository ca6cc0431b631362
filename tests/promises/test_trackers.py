"""`log.to`: W&B gets the run's global numbers (offline, with its own package); one that hangs costs the run nothing."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import start_duoka
from worlds import train_all

from duoka.runs.events import global_log, read_events, read_steps
from duoka.runs.folder import RunFolder
from duoka.runs.status import read_status

KEY = "0123456789abcdef0123456789abcdef01234567"
OFFLINE = {"WANDB_MODE": "offline", "WANDB_API_KEY": KEY}


@pytest.fixture
def home(tmp_path: Path, tiny_model: Path) -> Path:
    (tmp_path / "sft.yaml").write_text(
        f"model: {tiny_model}\ndata: {{train: [identity], eval: 0.1, max_length: 64}}\n"
        "lora: {rank: 2, dropout: 0.1}\ntrain: {epochs: 1, global_batch: 16, precision: fp32}\ncheckpoint: {every: 2}\n"
        "log: {every: 1, to: [wandb]}\n",
        encoding="utf-8",
    )
    return tmp_path


def train(home: Path, *arguments: str, packages: Path | None = None, **env: str) -> tuple[int, str]:
    """`duoka train` as a user types it; `packages` are found before those that are installed."""
    given = {**env, **({"PYTHONPATH": str(packages)} if packages else {})}
    command = start_duoka("train", "sft.yaml", *arguments, cwd=home, env=given)
    try:
        said, _ = command.communicate(timeout=150)
    finally:
        command.kill()
    return command.returncode, said


def read_wandb(run: RunFolder) -> list[tuple[str, dict[str, Any], list[dict[str, Any]]]]:
    """W&B's own files of a run, oldest first: (id, config, what was logged)."""
    found = []
    for path in sorted(run.path.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime):
        run_id, config, rows = "", {}, []
        for record in _records(path):
            if record.HasField("run"):
                run_id = record.run.run_id
                config |= {one.key: json.loads(one.value_json) for one in record.run.config.update}
            if record.HasField("history"):
                items = record.history.item
                rows.append({one.key or ".".join(one.nested_key): json.loads(one.value_json) for one in items})
        found.append((run_id, config, rows))
    return found


def _records(path: Path) -> Iterator[Any]:
    """W&B's messages from its file: after 7 bytes of its own a LevelDB log, blocks of 32 KiB with pieces of records."""
    from wandb.proto import wandb_internal_pb2

    data, place, whole = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768  # no room for a piece's head: the block's rest is empty
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # the whole record, or its last piece
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def test_wandb_has_every_number_of_a_run_and_of_its_resume_and_changes_none(home: Path) -> None:
    pytest.importorskip("wandb", reason="make setup installs it")
    run, plain = RunFolder(home / "runs/sft"), RunFolder(home / "runs/plain")
    more = ["train.epochs=2", "checkpoint.allow_changes=[train.epochs]"]
    train_all([(str(home / "sft.yaml"), ["log.to=[]"], str(plain.path))], 2)
    said = ""
    for arguments in ([], more):
        code, out = train(home, f"output={run.path}", "--nproc", "2", *arguments, **OFFLINE)
        said += out
        assert code == 0, said
    assert said.count("Weights & Biases: kept in ") == 2 and "warning: " not in said and "Traceback" not in said, said

    steps, expected = read_steps(run), read_steps(plain)
    assert [(one["step"], one["loss"]) for one in steps[: len(expected)]] == [
        (one["step"], one["loss"]) for one in expected
    ], "a tracker draws no random numbers of the run's"
    assert len(steps) == 2 * len(expected) > 4
    first, second = read_wandb(run)
    assert first[0] == second[0], "a run that goes on is the same run there"
    assert first[1]["lora"]["rank"] == 2
    rows = [*first[2], *second[2]]
    for key, name in (("train/loss", "loss"), ("train/grad_norm", "grad_norm"), ("train/lr", "lr")):
        assert [(row["step"], row[key]) for row in rows if key in row] == [(one["step"], one[name]) for one in steps]
    evals = [(event["step"], event["loss"]) for event in read_events(global_log(run)) if event["type"] == "eval"]
    assert [(row["step"], row["eval/loss"]) for row in rows if "eval/loss" in row] == evals != []
    files = [path for path in home.rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()], "secrets are written nowhere"
    assert KEY not in said


FAKE = """
import atexit, time
class Settings:
    def __init__(self, **settings): pass
def wait(*arguments, **options):
    time.sleep(3600)
atexit.register(wait)
class Run:
    dir = "there"
    define_metric = lambda *arguments, **options: None
    log = finish = wait
def init(**settings):
    return Run()
"""


def test_a_tracker_that_never_answers_costs_no_step_and_the_run_ends_well(home: Path) -> None:
    """Its package would even wait at Python's end. Without a thread the second step would never come."""
    packages = home / "packages"
    packages.mkdir()
    (packages / "wandb.py").write_text(FAKE, encoding="utf-8")
    code, out = train(home, packages=packages, **OFFLINE)
    assert code == 0, out
    run = RunFolder(home / "runs/sft")
    status = read_status(run)
    assert status is not None and status.state == "done" and status.step == status.total_steps == len(read_steps(run))
    (said,) = [line for line in out.splitlines() if line.startswith("warning: ")]
    assert said == (
        "warning: Weights & Biases does not get all numbers: it has not ended within 10 s, "
        "and the run ends without it"
    )  # fmt: skip
    warned = [event["text"] for event in read_events(global_log(run)) if event["type"] == "warning"]
    assert warned == [said.removeprefix("warning: ")], "the report says it too"


def test_a_tracker_that_is_not_installed_is_refused_before_anything_starts(home: Path) -> None:
    packages = home / "packages"
    packages.mkdir()
    (packages / "sitecustomize.py").write_text(
        "import importlib.util as u\nreal = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'wandb' else real(name, *more)\n",
        encoding="utf-8",
    )
    path = os.pathsep.join(map(str, (packages, Path(__file__).parents[2] / "src")))
    command = [sys.executable, "-m", "duoka", "train", "sft.yaml"]
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=home, env=env, capture_output=True, text=True, timeout=150)
    out = done.stderr
    assert done.returncode == 2 and "log.to names wandb, and the package wandb is not installed here" in out, out
    assert 'pip install "duoka[wandb]"' in out and not (home / "runs").exists()
