"""What `Accelerator.log` hands to trackers, with stand-ins for their packages: without a step, with odd values."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from duoka import Accelerator
from duoka.accelerator.utils import LoggerType
from duoka.config.trackers import TRACKERS


class Metric(NamedTuple):
    key: str
    value: float
    timestamp: int
    step: int


class Client:
    """mlflow's, as far as it is used here."""

    made: ClassVar[list[Client]] = []

    def __init__(self, address: str) -> None:
        self.metrics: list[tuple[str, float, int]] = []
        self.tags: dict[str, str] = {}
        self.options: list[dict[str, Any]] = []
        self.status, self.run_facts = "RUNNING", {}
        self.made.append(self)

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return "7"

    def create_run(self, experiment: str, *, run_name: str, **options: Any) -> Any:
        self.run_facts = {"run_name": run_name, **options}
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="it"))

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = (), **options: Any) -> None:
        self.metrics += [(one.key, one.value, one.step) for one in metrics]
        self.options.append(options)

    def set_tag(self, run_id: str, name: str, value: str) -> None:
        self.tags[name] = value

    def set_terminated(self, run_id: str, status: str) -> None:
        self.status = status


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> list[Client]:
    package = types.ModuleType("mlflow")
    package.__spec__ = types.SimpleNamespace(name="mlflow")  # type: ignore[assignment]
    for name, things in (
        ("tracking", {"MlflowClient": Client}),
        ("entities", {"Metric": Metric, "Param": lambda key, value: (key, value)}),
    ):
        part = types.ModuleType(f"mlflow.{name}")
        vars(part).update(things)
        monkeypatch.setitem(sys.modules, f"mlflow.{name}", part)
    monkeypatch.setitem(sys.modules, "mlflow", package)
    monkeypatch.setattr(Client, "made", [])
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    return Client.made


def test_mlflow_gets_values_without_a_step_and_the_run_ends_well(
    mlflow: list[Client], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    accelerator = Accelerator(log_with="mlflow", project_dir=tmp_path / "not" / "yet")
    accelerator.init_trackers("project", {"lr": 0.1}, {"mlflow": {"run_name": "mine", "tags": {"a": "b"}}})
    accelerator.log({"loss": torch.tensor(1.5), "odd": [1, 2], "both": {"a": 1, "b": "no"}, "note": "text"})
    accelerator.log({"loss": 1.25}, step=3, log_kwargs={"mlflow": {"synchronous": False}})
    accelerator.end_training()
    (client,) = mlflow
    assert client.metrics == [("loss", 1.5, 0), ("both/a", 1.0, 0), ("loss", 1.25, 3)]
    assert client.tags == {"note": "text"} and client.options[-1] == {"synchronous": False}
    assert client.run_facts == {"run_name": "mine", "tags": {"a": "b"}}
    assert client.status == "FINISHED", "a loop that called end_training has not failed"
    assert "left out, as no number: 'odd' (list), 'both/b' (str)" in capfd.readouterr().err


def test_tensorboard_draws_what_is_a_number_whatever_stands_before_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    accelerator = Accelerator(log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("project")
    accelerator.log({"odd": None, "many": torch.ones(3), "loss": 1.5, "both": {"a": 1, "b": None}})
    accelerator.end_training()
    seen = EventAccumulator(str(tmp_path / "project"))
    seen.Reload()
    assert [(one.step, one.value) for one in seen.Scalars("loss")] == [(0, 1.5)]
    assert "left out, as no number: 'odd' (NoneType), 'many' (Tensor), 'both/b' (NoneType)" in capfd.readouterr().err


SCRIPT = """
import sys, types
class Run:
    def log(self, values, step=None, **options):
        print("log", values, step, options)
swanlab = types.ModuleType("swanlab")
swanlab.__spec__ = types.SimpleNamespace(name="swanlab")
swanlab.init = lambda **settings: Run()
swanlab.finish = lambda *how: print("finish", *how)
sys.modules["swanlab"] = swanlab
from duoka import Accelerator
accelerator = Accelerator(log_with="swanlab", project_dir={folder!r})
accelerator.init_trackers("project")
accelerator.log({{"loss": 1.5}}, log_kwargs={{"swanlab": {{"print_to_console": True}}}})
{last}
"""


@pytest.mark.parametrize(
    ("last", "finish"),
    [
        ("accelerator.end_training()", "finish success"),
        ("", "finish success"),
        ("raise RuntimeError('no')", "finish crashed the process ended"),
    ],
)
def test_a_tracker_is_told_how_the_loop_ended(tmp_path: Path, last: str, finish: str) -> None:
    script = SCRIPT.format(folder=str(tmp_path), last=last)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    log = "log {'loss': 1.5} None {'print_to_console': True}"
    assert done.stdout.splitlines() == [log, finish], done.stderr


def test_the_page_names_the_trackers_that_there_are_and_those_that_are_refused() -> None:
    page = (Path(__file__).parents[2] / "docs" / "accelerator.md").read_text(encoding="utf-8")
    there, refused = page.split("`init_trackers`", 1)[1], page.split("`log_with` of another tracker (", 1)[1]
    first, *rest = TRACKERS
    assert f"({first}; {', '.join(rest)} when installed" in there
    others = {one.value for one in LoggerType} - {"all", *TRACKERS}
    assert set(refused.split(")", 1)[0].split(", ")) == others
