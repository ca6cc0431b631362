"""One run's parts, all built: what main.py puts together and loop.py drives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from duoka.comm.world import World
from duoka.data.build_feed import Feed
from duoka.parallel.measure import Measured
from duoka.parallel.objective import Objective
from duoka.store.contents import Contents
from duoka.train.memory import MemoryWatch
from duoka.train.nonfinite import NonFinite
from duoka.train.record import Recorder
from duoka.train.saving import Saver
from duoka.train.setup import RunSettings
from duoka.train.shortage import MemoryGuard


@dataclass(frozen=True)
class Job:
    """`evaluate` is told how to ask whether somebody wants the run to stop, and returns None when somebody did."""

    settings: RunSettings
    contents: Contents
    objective: Objective
    feed: Feed
    saver: Saver
    record: Recorder
    world: World
    evaluate: Callable[[Callable[[], bool]], Measured | None] | None
    memory: MemoryWatch
    guard: MemoryGuard
    nonfinite: NonFinite
    sample: Callable[[], list[tuple[str, str]]] | None = None  # what the model makes of a few beginnings
