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


def test_a_run_that_was_deleted_there_or_is_at_another_address_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No number of the whole start came to MLflow, for the old run was not found."""
    pytest.importorskip("mlflow", reason='pip install "duoka[mlflow]"')
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    first, _ = train(tmp_path, 1, 2, "stopped")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "other").as_uri())
    told, warned = train(tmp_path, 3, 4, "stopped")
    assert warned == [] and "which has earlier steps, is not there" in told[0]
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    again, warned = train(tmp_path, 3, 4, "stopped")
    assert warned == [] and again == first, "the first one is still known"

    from mlflow.tracking import MlflowClient

    MlflowClient((tmp_path / "mlflow").as_uri()).delete_run(again[0].split()[2])
    told, warned = train(tmp_path, 5, 6, "done")
    assert warned == [] and told[0].split()[2] != again[0].split()[2]


def test_steps_that_were_thrown_away_are_not_beside_those_that_were_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow forgets no number of a run: both stood at one step."""
    pytest.importorskip("mlflow", reason='pip install "duoka[mlflow]"')
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    train(tmp_path, 1, 7, "stopped")
    _, warned = train(tmp_path, 5, 6, "stopped")  # a crash: the newest checkpoint was of step 4
    assert warned == []
    sinks = Sinks([build_sink("mlflow")], warn=warned.append)
    sinks.open(RunFacts("mine", tmp_path, config=CONFIG, goes_on=True, kept_steps=6))
    sinks.step(step_of(7))
    sinks.event("resume", 6, {"reason": "step 8: the loss is not finite; back to step-00000006"})
    for step in (7, 8):
        sinks.step(step_of(step))
    sinks.ended(8, "done", 0, "")
    sinks.close()
    assert warned == []

    from mlflow.tracking import MlflowClient

    client = MlflowClient((tmp_path / "mlflow").as_uri())
    runs = client.search_runs([client.get_experiment_by_name("duoka").experiment_id])
    (run,) = [one for one in runs if "mlflow.parentRunId" not in one.data.tags]
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(one.step, one.value) for one in history] == [(step, 4.0 / step) for step in range(1, 9)]
    assert run.info.run_name == "mine" and run.info.status == "FINISHED" and run.data.params["lora.rank"] == "8"
    assert [one.step for one in client.get_metric_history(run.info.run_id, "eval/loss")] == [6]
    assert [one.path for one in client.list_artifacts(run.info.run_id, "samples")] == ["samples/step-00000006.txt"]
    old = sorted(one.info.run_name for one in runs if one is not run)
    assert old == ["mine, went back to step 4", "mine, went back to step 6"]
    assert all(one.info.status == "KILLED" for one in runs if one is not run)


def test_a_server_that_is_not_there_costs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason='pip install "duoka[mlflow]"')
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    _, warned = train(tmp_path, 1, 50, "done")
    assert warned and all("MLflow does not get all numbers" in one for one in warned)


def test_a_name_that_mlflow_refuses_costs_no_number_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason='pip install "duoka[mlflow]"')
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    told: list[str] = []
    warned: list[str] = []
    sinks = Sinks([build_sink("mlflow")], tell=told.append, warn=warned.append)
    sinks.open(RunFacts("mine", tmp_path, config={"a@b": 1}, goes_on=True))
    sinks.scalars({"eval/acc@1": 0.5, "loss": 2.0, "what?": "a text"}, 3, {})
    sinks.close()
    assert warned == []

    from mlflow.tracking import MlflowClient

    run = MlflowClient((tmp_path / "mlflow").as_uri()).get_run(told[0].split()[2])
    assert run.data.metrics == {"eval/acc_1": 0.5, "loss": 2.0} and run.data.params == {"a_b": "1"}
    assert run.data.tags["what_"] == "a text"
