"""Who else gets a run's numbers: the names that `log.to` and an Accelerator's `log_with` know, one row each.

A tracker is a sink (duoka/sinks/) and a row here; the row is enough to refuse a missing package before training.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

TrackerName = Literal["tensorboard", "wandb", "mlflow", "swanlab", "trackio"]


@dataclass(frozen=True)
class Tracker:
    """`sink`: the class in duoka/sinks/ that writes to it; `package`: what it needs; `install`: what brings that."""

    sink: str
    package: str
    install: str

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


TRACKERS: dict[str, Tracker] = {
    "tensorboard": Tracker("duoka.sinks.tensorboard:TensorBoardSink", "tensorboard", "pip install tensorboard"),
    "wandb": Tracker("duoka.sinks.wandb:WandbSink", "wandb", 'pip install "duoka[wandb]"   or   pip install wandb'),
    "mlflow": Tracker(
        "duoka.sinks.mlflow:MlflowSink", "mlflow", 'pip install "duoka[mlflow]"   or   pip install mlflow'
    ),
    "swanlab": Tracker(
        "duoka.sinks.swanlab:SwanLabSink", "swanlab", 'pip install "duoka[swanlab]"   or   pip install swanlab'
    ),
    "trackio": Tracker(
        "duoka.sinks.trackio:TrackioSink", "trackio", 'pip install "duoka[trackio]"   or   pip install trackio'
    ),
}


def installed_trackers() -> list[str]:
    return [name for name, tracker in TRACKERS.items() if tracker.is_installed]
