"""Where a loop's numbers go: TensorBoard, Weights & Biases when it is installed, or a tracker of one's own.

Written by rank 0 alone, and flushed at once: a killed process has lost nothing that it logged.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from duoka.errors import ConfigError

Config = Mapping[str, Any] | None
KNOWN = ("tensorboard", "wandb")


class Tracking:
    """The verbs of trackers: a part of the Accelerator."""

    is_main_process: bool
    project_dir: str | None

    def __init__(self, log_with: Any) -> None:
        self._trackers_asked = choose_trackers(log_with)
        self.trackers: list[Any] = []

    def init_trackers(
        self, project_name: str, config: Mapping[str, Any] | None = None, init_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        if self.is_main_process:
            for asked in self._trackers_asked:
                self.trackers.append(open_tracker(asked, project_name, self.project_dir, config, init_kwargs or {}))
        if self.trackers:
            atexit.register(self.end_training)

    def log(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        for tracker in self.trackers:
            tracker.log(values, step=step, **(log_kwargs or {}).get(getattr(tracker, "name", ""), {}))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        for tracker in self.trackers:
            if getattr(tracker, "name", "") == name:
                return tracker.tracker if unwrap else tracker
        if self.is_main_process:
            raise ConfigError(f"there is no tracker {name!r}", fix="name it in log_with, and call init_trackers first")
        return NoTracker()

    def end_training(self) -> None:
        """Close the trackers."""
        while self.trackers:
            self.trackers.pop().finish()


class TensorBoardTracker:
    name = "tensorboard"

    def __init__(
        self, project: str, folder: Path, config: Mapping[str, Any] | None, options: Mapping[str, Any]
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.folder = folder / project
        self.writer = SummaryWriter(str(self.folder), **options)
        if config:
            shown = json.dumps(dict(config), indent=2, default=str, ensure_ascii=False)
            self.writer.add_text("config", "".join(f"    {line}\n" for line in shown.splitlines()))
            self.writer.flush()

    @property
    def tracker(self) -> Any:
        return self.writer

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        for name, value in values.items():
            if isinstance(value, str):
                self.writer.add_text(name, value, global_step=step, **options)
            elif isinstance(value, Mapping):
                self.writer.add_scalars(name, {key: float(one) for key, one in value.items()}, step, **options)
            else:
                self.writer.add_scalar(name, float(value), step, **options)
        self.writer.flush()

    def finish(self) -> None:
        self.writer.close()


class WandbTracker:
    name = "wandb"

    def __init__(
        self, project: str, folder: Path, config: Mapping[str, Any] | None, options: Mapping[str, Any]
    ) -> None:
        import wandb  # type: ignore[import-not-found, unused-ignore]

        settings = {"dir": str(folder), "config": dict(config or {}), **options}
        self.run = wandb.init(project=project, **settings)

    @property
    def tracker(self) -> Any:
        return self.run

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        self.run.log(dict(values), step=step, **options)

    def finish(self) -> None:
        self.run.finish()


class NoTracker:
    """What `get_tracker` gives on ranks that write nothing: it takes every call and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None


def choose_trackers(log_with: Any) -> list[Any]:
    """Names and trackers of one's own that `log_with` asks for; refuses what is not there."""
    asked = [] if log_with is None else [log_with] if isinstance(log_with, str) else log_with
    asked = list(asked) if isinstance(asked, Sequence) else [asked]
    chosen: list[Any] = []
    for one in asked:
        name = str(getattr(one, "value", one)).lower() if not hasattr(one, "log") else ""
        if not name:
            chosen.append(one)
        elif name == "all":
            chosen += [known for known in KNOWN if known == "tensorboard" or _has_wandb()]
        elif name not in KNOWN:
            raise ConfigError(
                f"log_with names {name}; duoka writes to tensorboard and wandb",
                fix="write log_with='tensorboard', or give an object with log(values, step=...) and finish()",
            )
        elif name == "wandb" and not _has_wandb():
            raise ConfigError("log_with names wandb, which is not installed", fix="pip install wandb")
        else:
            chosen.append(name)
    return list(dict.fromkeys(chosen))


def _has_wandb() -> bool:
    return importlib.util.find_spec("wandb") is not None


def open_tracker(
    one: Any, project: str, folder: str | None, config: Mapping[str, Any] | None, options: Mapping[str, Any]
) -> Any:
    if not isinstance(one, str):
        return one
    if one == "tensorboard" and folder is None:
        raise ConfigError(
            "TensorBoard needs a folder to write to",
            fix="write Accelerator(log_with='tensorboard', project_dir='runs')",
        )
    kind = TensorBoardTracker if one == "tensorboard" else WandbTracker
    return kind(project, Path(folder or "."), config, options.get(one, {}))
