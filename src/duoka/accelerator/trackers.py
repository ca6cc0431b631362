"""Where a loop's numbers go: the trackers that a run's `log.to` knows too, through the same sinks, or one of your own.

Written by rank 0 alone. Trouble of a tracker is raised when it is opened; after that it is said once, and the loop
goes on.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from duoka.config.trackers import TRACKERS, installed_trackers
from duoka.errors import ConfigError
from duoka.sinks.fan_out import Sinks, build_sink
from duoka.sinks.sink import RunFacts


class Tracking:
    """The verbs of trackers: a part of the Accelerator."""

    is_main_process: bool
    logging_dir: str | None

    def __init__(self, log_with: Any) -> None:
        self._trackers_asked = choose_trackers(log_with)
        self.trackers: list[Any] = []

    def init_trackers(
        self, project_name: str, config: Mapping[str, Any] | None = None, init_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        if self.is_main_process:
            for asked in self._trackers_asked:
                self.trackers.append(open_tracker(asked, project_name, self.logging_dir, config, init_kwargs or {}))
        if self.trackers:
            atexit.register(self._end_at_exit)

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
        """Close the trackers: the run is done."""
        while self.trackers:
            self.trackers.pop().finish()

    def _end_at_exit(self) -> None:
        """Nobody called end_training: what an error ended has failed."""
        for tracker in self.trackers:
            if isinstance(tracker, SinkTracker):
                tracker.has_failed = getattr(sys, "last_value", None) is not None
        self.end_training()


class GeneralTracker:
    """The base of trackers of one's own, for `log_with`: with `name`, `store_init_configuration` and `log`."""

    main_process_only = True
    name = ""
    requires_logging_directory = False

    def __init__(self, _blank: bool = False) -> None:
        """Nothing to do."""

    def start(self) -> None:
        """Called by init_trackers, on rank 0."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Called by init_trackers with its config."""

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        raise ConfigError(f"the tracker {type(self).__name__} has no method log", fix="define log(self, values, step)")

    def finish(self) -> None:
        """Called by end_training."""


def on_main_process(function: Any) -> Any:
    """A decorator of a tracker's methods. Trackers are called on rank 0 alone: nothing is left to do."""
    return function


class SinkTracker:
    """A sink with the verbs that loops know of trackers."""

    def __init__(self, name: str, facts: RunFacts) -> None:
        self.name = name
        self.has_failed = False
        self._sink = build_sink(name)
        self._sinks = Sinks([self._sink], tell=_say)
        self._sinks.open_now(facts)

    @property
    def tracker(self) -> Any:
        return self._sink.handle

    writer = run = tracker

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """It is stored when the tracker is opened: init_trackers(name, config)."""
        raise ConfigError("a tracker stores its config when it is opened", fix="write init_trackers(name, config)")

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Batches of images by name: arrays, or what the tracker itself takes."""
        if self.name == "wandb":
            from wandb import Image

            images = {name: [Image(one) for one in batch] for name, batch in values.items()}
            self.tracker.log(images, step=step, **options)
        else:
            for name, batch in values.items():
                self.tracker.add_images(name, batch, global_step=step, **options)

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        self._sinks.scalars({name: _plain(value) for name, value in values.items()}, step, options)

    def finish(self) -> None:
        if not self.has_failed:
            self._sinks.ended(0, "done", 0, "")  # without it, a tracker calls the run failed
        self._sinks.close()


def _plain(value: Any) -> Any:
    """A number as it is now: the tensor that holds it may change before a tracker's thread looks."""
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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
            chosen += installed_trackers()
        elif name not in TRACKERS:
            raise ConfigError(
                f"log_with names {name}; duoka writes to {' and '.join(TRACKERS)}",
                fix="write log_with='tensorboard', or give an object with log(values, step=...) and finish()",
            )
        elif not TRACKERS[name].is_installed:
            raise ConfigError(f"log_with names {name}, which is not installed", fix=TRACKERS[name].install)
        else:
            chosen.append(name)
    return list(dict.fromkeys(chosen))


def open_tracker(
    one: Any, project: str, folder: str | None, config: Mapping[str, Any] | None, options: Mapping[str, Any]
) -> Any:
    if not isinstance(one, str):
        if hasattr(one, "start"):
            one.start()
        if config is not None and hasattr(one, "store_init_configuration"):
            one.store_init_configuration(dict(config))
        return one
    if one == "tensorboard" and folder is None:
        raise ConfigError(
            "TensorBoard needs a folder to write to",
            fix="write Accelerator(log_with='tensorboard', project_dir='runs')",
        )
    place = Path(folder or ".")
    place.mkdir(parents=True, exist_ok=True)  # trackers make their own folder in it, or leave it for a temporary one
    facts = RunFacts(
        project, place, config=config or {}, project=project, options=options.get(one, {})
    )  # fmt: skip
    return SinkTracker(one, facts)
