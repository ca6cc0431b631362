"""`log.to: [mlflow]` with the package itself, offline: every number of a run, and of another start in its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from duoka.sinks.fan_out import Sinks, build_sink
from duoka.sinks.sink import RunFacts, StepNumbers

pytestmark = pytest.mark.web
CONFIG = {"model": {"name": "demo"}, "lora": {"rank": 8}, "data": {"train": ["identity"]}, "none": None}


def step_of(number: int) -> StepNumbers:
    numbers = {"loss": 4.0 / number, "grad_norm": 1.0, "lr": 1e-3}
    return StepNumbers(number, numbers, {}, 5.0, 2.0, 1000, 4.0, None, 60.0, {"margin": 0.5})


def train(folder: Path, first: int, last: int, reason: str) -> tuple[list[str], list[str]]:
    told: list[str] = []
    warned: list[str] = []
    sinks = Sinks([build_sink("mlflow")], tell=told.append, warn=warned.append)
    sinks.open(RunFacts("mine", folder, config=CONFIG, goes_on=True, kept_steps=first - 1))
    for step in range(first, last + 1):
        sinks.step(step_of(step))
    sinks.evaluated(last, {"loss": 1.5})
    sinks.samples(last, [("多卡 is", " here 🎉")])
    sinks.ended(last, reason, 0, "")
    sinks.close()
    return told, warned


def test_mlflow_has_every_number_of_a_run_and_of_its_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason='pip install "duoka[mlflow]"')
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    told, warned = train(tmp_path, 1, 3, "stopped")
    assert warned == [] and told[0].startswith("MLflow: run ") and tmp_path.as_uri() in told[0]
    again, warned = train(tmp_path, 4, 5, "done")
    assert warned == [] and again == told, "a run that goes on is the same run there"

    from mlflow.tracking import MlflowClient

    client = MlflowClient((tmp_path / "mlflow").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("duoka").experiment_id])
    assert run.info.run_name == "mine" and run.info.status == "FINISHED"
    assert run.data.params == {"model.name": "demo", "lora.rank": "8", "data.train": '["identity"]'}
    found = {
        key: client.get_metric_history(run.info.run_id, key) for key in ("train/loss", "train/margin", "eval/loss")
    }
    assert [(one.step, one.value) for one in found["train/loss"]] == [(step, 4.0 / step) for step in range(1, 6)]
    assert [one.step for one in found["train/margin"]] == [1, 2, 3, 4, 5]
    assert [(one.step, one.value) for one in found["eval/loss"]] == [(3, 1.5), (5, 1.5)]
    texts = sorted((tmp_path / "mlflow").rglob("step-*.txt"))
    assert [path.name for path in texts] == ["step-00000003.txt", "step-00000005.txt"]
    assert texts[0].read_text(encoding="utf-8") == "多卡 is| here 🎉"


def test_a_server_that_is_not_there_costs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason='pip install "duoka[mlflow]"')
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    _, warned = train(tmp_path, 1, 50, "done")
    assert warned and all("MLflow does not get all numbers" in one for one in warned)
