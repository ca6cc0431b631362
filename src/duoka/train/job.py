"""One run's parts, all built: what main.py puts together and loop.py drives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from duoka.data.loader import Loader
from duoka.parallel.world import World
from duoka.train.checkpoint import Contents
from duoka.train.measure import Measured
from duoka.train.memory import MemoryGuard
from duoka.train.nonfinite import NonFinite
from duoka.train.record import Recorder
from duoka.train.saving import Saver
from duoka.train.setup import RunSettings


@dataclass(frozen=True)
class Job:
    """`evaluate` is told how to ask whether somebody wants the run to stop, and returns None when somebody did."""

    settings: RunSettings
    contents: Contents
    loader: Loader
    saver: Saver
    record: Recorder
    world: World
    evaluate: Callable[[Callable[[], bool]], Measured | None] | None
    guard: MemoryGuard
    nonfinite: NonFinite
