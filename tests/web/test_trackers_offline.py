"""`log.to: [swanlab, trackio]` with the packages themselves, offline: every number, and no step waits for a network."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.web, pytest.mark.timeout(200)]
# In a process of its own: these packages keep state for good, and one has to see that such a process ends.
CODE = """
import sys, time
from pathlib import Path
from duoka.sinks.fan_out import Sinks, build_sink
from duoka.sinks.sink import RunFacts, StepNumbers
name, folder, first, last = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
sinks = Sinks([build_sink(name)], tell=print, warn=print)
sinks.open(RunFacts("mine", folder, config={"model": {"name": "demo"}}, goes_on=True, kept_steps=first - 1))
began = time.perf_counter()
for step in range(first, last + 1):
    numbers = {"loss": 4.0 / step, "grad_norm": 1.0, "lr": 1e-3}
    sinks.step(StepNumbers(step, numbers, {}, 5.0, 2.0, 1000, 4.0, None, 60.0, {"margin": 0.5}))
print("steps", time.perf_counter() - began < 5.0)
sinks.evaluated(last, {"loss": 1.5})
sinks.samples(last, [("多卡 is", " here 🎉")])
sinks.ended(last, "done", 0, "")
sinks.close()
"""
KEYS = {"train/loss", "train/grad_norm", "train/lr", "train/tokens_per_s", "train/margin"}


def train(name: str, folder: Path, first: int, last: int, **env: str) -> list[str]:
    """What is said."""
    folder.mkdir(exist_ok=True)
    taken = ("SWANLAB_", "TRACKIO_", "HF_")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(taken)}
    done = subprocess.run(
        [sys.executable, "-c", CODE, name, str(folder), str(first), str(last)], capture_output=True, text=True,
        env={**clean, "HOME": str(folder), **env}, timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert "steps True" in said, said
    return [line for line in said if line != "steps True"]


def read_trackio(folder: Path) -> tuple[dict[int, dict[str, Any]], int]:
    """Rows by step, and how many runs there are."""
    (path,) = (one for one in (folder / "trackio").glob("*.db"))
    rows: dict[int, dict[str, Any]] = {}
    with sqlite3.connect(path) as base:
        found = base.execute("select step, metrics, run_name from metrics order by id").fetchall()
    for step, metrics, _ in found:
        rows.setdefault(step, {}).update(json.loads(metrics))
    return rows, len({name for _, _, name in found})


def test_trackio_has_every_number_of_a_run_and_of_its_resume(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason='pip install "duoka[trackio]"')
    told = train("trackio", tmp_path / "run", 1, 3)
    assert f"trackio: kept in {tmp_path / 'run' / 'trackio'}" in told and "warning" not in "".join(told)
    train("trackio", tmp_path / "run", 4, 5)
    rows, count = read_trackio(tmp_path / "run")
    assert count == 1 and [rows[step]["train/loss"] for step in range(1, 6)] == [4.0 / step for step in range(1, 6)]
    assert set(rows[2]) == KEYS and rows[3]["eval/loss"] == rows[5]["eval/loss"] == 1.5
    assert "多卡 is| here 🎉" in json.dumps(rows[5]["samples"], ensure_ascii=False)


def test_trackio_has_each_step_once_after_a_crash(tmp_path: Path) -> None:
    """Steps that were thrown away stood beside those that were done again."""
    pytest.importorskip("trackio", reason='pip install "duoka[trackio]"')
    for first, last in ((1, 7), (5, 6), (5, 8)):
        assert "warning" not in "".join(train("trackio", tmp_path / "run", first, last))
    (path,) = (one for one in (tmp_path / "run" / "trackio").glob("*.db"))
    with sqlite3.connect(path) as base:
        found = base.execute("select step, metrics, run_name from metrics order by id").fetchall()
    losses = [(step, json.loads(text).get("train/loss")) for step, text, name in found if name == "mine"]
    assert [one for one in losses if one[1]] == [(step, 4.0 / step) for step in range(1, 9)]
    others = {name for _, _, name in found} - {"mine"}
    assert others == {"mine, went back to step 4", "mine, went back to step 4 (2)"}


def test_swanlab_offline_has_every_number_and_needs_no_key(tmp_path: Path) -> None:
    pytest.importorskip("swanlab", reason='pip install "duoka[swanlab]"')
    told = train("swanlab", tmp_path / "run", 1, 3)
    assert any(line.startswith("SwanLab: offline, kept in") for line in told) and "warning" not in "".join(told), told
    again = train("swanlab", tmp_path / "run", 4, 5)
    assert "warning" not in "".join(again)
    names = [path for path in (tmp_path / "run" / "swanlab").rglob("*") if path.is_file()]
    text = b"".join(path.read_bytes() for path in names)
    for key in KEYS | {"eval/loss"}:
        assert key.encode() in text, key
    (identity,) = (tmp_path / "run" / "swanlab").glob("duoka-run-id")
    assert identity.read_text().encode() in b"".join(
        path.read_bytes() + str(path).encode() for path in names if path != identity
    ), "a run that goes on is the same run there"


@pytest.mark.parametrize(
    ("name", "env"),
    [
        ("swanlab", {"SWANLAB_MODE": "online", "SWANLAB_API_KEY": "x" * 21, "SWANLAB_API_HOST": "http://127.0.0.1:9"}),
        ("trackio", {"TRACKIO_SERVER_URL": "http://127.0.0.1:9"}),
    ],
)
def test_a_server_that_is_not_there_costs_no_step(tmp_path: Path, name: str, env: dict[str, str]) -> None:
    pytest.importorskip(name, reason=f'pip install "duoka[{name}]"')
    train(name, tmp_path / "run", 1, 50, **env)
