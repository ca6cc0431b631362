"""MLflow: a run there for a run here. MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and MLFLOW_RUN_ID mean their own.

Without an address its files lie in the run folder: `mlflow ui --backend-store-uri RUN/mlflow` shows them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from duoka.sinks.sink import RunFacts, Sink, StepNumbers, as_number, eval_scalars, refuse_rest, step_scalars

_ID_FILE = "duoka-run-id"
_MOST_PARAMS, _MOST_LETTERS = 100, 5000  # of one call, and of one value: what servers take


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
        known = path.read_text(encoding="utf-8").strip() if facts.goes_on and path.is_file() else ""
        self._id: str = os.environ.get("MLFLOW_RUN_ID") or known
        if self._id:
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._begin(facts)
        if facts.goes_on:
            path.write_text(self._id, encoding="utf-8")
            say(f"MLflow: run {self._id} at {address}")

    def _begin(self, facts: RunFacts) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or facts.project
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        from mlflow.entities import Param  # type: ignore[import-not-found, unused-ignore]

        run_id: str = self._client.create_run(experiment, **{"run_name": facts.name, **facts.options}).info.run_id
        params = [Param(key, text[:_MOST_LETTERS]) for key, text in _flat(facts.config)]
        for start in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(run_id, params=params[start : start + _MOST_PARAMS])
        return run_id

    def _draw(self, values: Mapping[str, float], step: int, options: Mapping[str, Any] | None = None) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(key, float(one), now, step) for key, one in values.items()]
        self._client.log_batch(self._id, metrics=metrics, **(options or {}))

    def step(self, now: StepNumbers) -> None:
        self._draw(step_scalars(now), now.step)

    def evaluated(self, step: int, values: Mapping[str, Any]) -> None:
        self._draw(eval_scalars(values), step)

    def samples(self, step: int, pairs: Sequence[tuple[str, str]]) -> None:
        text = "\n\n".join(f"{one}|{text}" for one, text in pairs)
        self._client.log_text(self._id, text, f"samples/step-{step:08d}.txt")

    def scalars(self, values: Mapping[str, Any], step: int | None, options: Mapping[str, Any]) -> None:
        flat: dict[str, Any] = {}
        for name, value in values.items():
            if isinstance(value, str):
                self._client.set_tag(self._id, name, value)
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


def _flat(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Keys with dots, values as JSON writes them; what is not set is left out."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        elif value is not None:
            yield before + key, value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
