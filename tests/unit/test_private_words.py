"""Who is told of alerts stands on command lines too, and those are written down in several places."""

import json
import sys
import types
from pathlib import Path

import pytest

from duoka.runs.folder import RunFolder
from duoka.sinks.fan_out import build_sink
from duoka.sinks.sink import RunFacts
from duoka.watch.differences import find_differences

COMMAND = ["duoka", "train", "log.alert.webhook=https://hooks.example/T0"]


def test_what_differs_between_runs_shows_no_webhook_of_a_command_line(tmp_path: Path) -> None:
    runs = [RunFolder(tmp_path / name) for name in ("a", "b")]
    for run in runs:
        run.make()
    runs[0].env.write_text(json.dumps({"command": COMMAND}), encoding="utf-8")
    [row] = find_differences(runs)
    assert row["values"] == ['["duoka", "train", "log.alert.webhook=***"]', None]


def test_wandb_gets_no_webhook_with_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun a rank has the user's own words, and W&B notes what it finds in sys.argv."""
    seen: list[list[str]] = []
    stand_in = types.ModuleType("wandb")
    run = types.SimpleNamespace(define_metric=lambda *_, **__: None, url="u", dir="d")
    stand_in.Settings = lambda **_: None  # type: ignore[attr-defined]
    stand_in.init = lambda **_: seen.append(list(sys.argv)) or run  # type: ignore[attr-defined, func-returns-value]
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    monkeypatch.setattr(sys, "argv", COMMAND)
    build_sink("wandb").open(RunFacts("a", tmp_path, goes_on=True), lambda _: None)
    assert seen == [["duoka", "train", "log.alert.webhook=***"]]
