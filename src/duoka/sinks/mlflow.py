"""MLflow: a run there for a run here. MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and MLFLOW_RUN_ID mean their own.

Without an address its files lie in the run folder: `mlflow ui --backend-store-uri RUN/mlflow` shows them.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from duoka.sinks.sink import RunFacts, Sink, StepNumbers, as_number, eval_scalars, refuse_rest, step_scalars

_ID_FILE, _SAMPLES = "duoka-run-id", "samples"
_MOST_PARAMS, _MOST_METRICS, _MOST_LETTERS = 100, 1000, 5000  # of one call, and of one value: what servers take


class MlflowSink(Sink):
    name = "mlflow"
    trouble = "MLflow does not get all numbers"
    is_remote = True

    def open(self, facts: RunFacts, say: Callable[[str], None]) -> None:
        # Its folder of files is the only store that needs no database; it is there, and no longer its first choice.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.tracking import MlflowClient  # type: ignore[import-not-found, unused-ignore]

        folder = facts.folder / "mlflow"
        folder.mkdir(exist_ok=True)
        address = os.environ.get("MLFLOW_TRACKING_URI") or folder.resolve().as_uri()
        self._client: Any = MlflowClient(address)
        self._status = "FAILED"  # until the run says how it ended
        path = folder / _ID_FILE
        self._id_file = path if facts.goes_on else None
        self._known = path.read_text(encoding="utf-8").split() if facts.goes_on and path.is_file() else []
        asked = os.environ.get("MLFLOW_RUN_ID")
        self._id: str = asked or next((one for one in reversed(self._known) if self._has(one)), "")
        is_lost = bool(self._known) and not self._id
        if self._id:
            self._client.update_run(self._id, status="RUNNING")
            self._drop_after(facts.kept_steps)
        else:
            self._id = self._begin(facts)
        self._remember_id()
        if facts.goes_on:
            lost = f"; {self._known[0]}, which has earlier steps, is not there" if is_lost else ""
            say(f"MLflow: run {self._id} at {address}{lost}")

    def _has(self, run_id: str) -> bool:
        """Not where it was deleted, or where this start was told of another server than those before."""
        from mlflow.exceptions import MlflowException  # type: ignore[import-not-found, unused-ignore]

        try:
            return bool(self._client.get_run(run_id).info.lifecycle_stage == "active")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False

    def _begin(self, facts: RunFacts) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or facts.project
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        from mlflow.entities import Param  # type: ignore[import-not-found, unused-ignore]

        run_id: str = self._client.create_run(experiment, **{"run_name": facts.name, **facts.options}).info.run_id
        params = [Param(_name(key), text[:_MOST_LETTERS]) for key, text in _flat(facts.config)]
        for some in _in_parts(params, _MOST_PARAMS):
            self._client.log_batch(run_id, params=some)
        return run_id

    def _remember_id(self) -> None:
        """Those at other addresses stay: a start without the variable must not lose them for the next."""
        if self._id_file is not None:
            others = [one for one in self._known if one != self._id]
            self._id_file.write_text("\n".join([*others, self._id]), encoding="utf-8")

    def _drop_after(self, step: int) -> None:
        """MLflow forgets no number of a run. Where steps were thrown away, the run goes on as another with those that
        count, and the old one lies below it, whole."""
        if self._id_file is None or os.environ.get("MLFLOW_RUN_ID"):  # somebody else's run keeps its id
            return
        old = self._client.get_run(self._id)
        histories = [self._client.get_metric_history(self._id, key) for key in old.data.metrics]
        if all(one.step <= step for history in histories for one in history):
            return
        from mlflow.entities import Param

        tags = {key: text for key, text in old.data.tags.items() if key != "mlflow.parentRunId"}
        new = self._client.create_run(old.info.experiment_id, run_name=old.info.run_name, tags=tags).info.run_id
        params = [Param(key, text) for key, text in old.data.params.items()]
        for some in _in_parts(params, _MOST_PARAMS):
            self._client.log_batch(new, params=some)
        kept = [one for history in histories for one in history if one.step <= step]
        for some in _in_parts(kept, _MOST_METRICS):
            self._client.log_batch(new, metrics=some)
        self._copy_samples(new, step)
        self._client.update_run(self._id, name=f"{old.info.run_name}, went back to step {step}")
        self._client.set_tag(self._id, "mlflow.parentRunId", new)
        self._client.set_terminated(self._id, "KILLED")
        self._known = [one for one in self._known if one != self._id]
        self._id = new
        self._remember_id()

    def _copy_samples(self, new: str, last: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for file in self._client.list_artifacts(self._id, _SAMPLES):
                if file.path <= _samples_file(last):
                    self._client.log_artifact(
                        new, self._client.download_artifacts(self._id, file.path, folder), _SAMPLES
                    )

    def event(self, type: str, step: int, values: Mapping[str, Any]) -> None:
        if type == "resume":  # a rollback in the middle of a run
            self._drop_after(step)

    def _draw(self, values: Mapping[str, float], step: int, options: Mapping[str, Any] | None = None) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_name(key), float(one), now, step) for key, one in values.items()]
        self._client.log_batch(self._id, metrics=metrics, **(options or {}))

    def step(self, now: StepNumbers) -> None:
        self._draw(step_scalars(now), now.step)

    def evaluated(self, step: int, values: Mapping[str, Any]) -> None:
        self._draw(eval_scalars(values), step)

    def samples(self, step: int, pairs: Sequence[tuple[str, str]]) -> None:
        text = "\n\n".join(f"{one}|{text}" for one, text in pairs)
        self._client.log_text(self._id, text, _samples_file(step))

    def scalars(self, values: Mapping[str, Any], step: int | None, options: Mapping[str, Any]) -> None:
        flat: dict[str, Any] = {}
        for name, value in values.items():
            if isinstance(value, str):
                self._client.set_tag(self._id, _name(name), value)
            elif isinstance(value, Mapping):
                flat |= {f"{name}/{key}": one for key, one in value.items()}
            else:
                flat[name] = value
        numbers = {name: number for name, value in flat.items() if (number := as_number(value)) is not None}
        if numbers:
            self._draw(numbers, step or 0, options)  # as mlflow itself does with a metric of no step
        refuse_rest({name: value for name, value in flat.items() if name not in numbers})

    def ended(self, step: int, reason: str, exit_code: int, cause: str) -> None:
        self._status = "FINISHED" if reason == "done" else "KILLED"  # a run that was stopped has not failed

    def close(self) -> None:
        self._client.set_terminated(self._id, self._status)

    @property
    def handle(self) -> Any:
        return self._client


def _name(given: str) -> str:
    """With the letters that MLflow takes: for one name that it refuses (acc@1), all numbers of a call were lost."""
    return re.sub(r"[^/\w.\- :]", "_", given)


def _samples_file(step: int) -> str:
    return f"{_SAMPLES}/step-{step:08d}.txt"


def _in_parts(values: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    yield from (values[start : start + most] for start in range(0, len(values), most))


def _flat(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Keys with dots, values as JSON writes them; what is not set is left out."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        elif value is not None:
            yield before + key, value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
