"""Python's garbage collection, between steps only: what lives as long as the run is never searched again.

Left to itself it begins anywhere in a step, on each rank at another time, and searches millions of objects of the
libraries; every other rank then waits in the next exchange. See docs/decisions.md for what that costs.
"""

from __future__ import annotations

import gc

from duoka.process.lifeline import parent_pid
from duoka.train.moments import Concern, StepEnd

EVERY = 50  # steps: uncollected reference cycles of steps would add up


class GarbageCollection(Concern):
    def __init__(self) -> None:
        self._was_on: bool | None = None  # None: it is as we found it

    def after_step(self, end: StepEnd) -> None:
        if self._was_on is None:
            # The first step has made what lasts: the optimizer's state, buffers, the libraries' caches.
            self._was_on = gc.isenabled()
            gc.collect()
            gc.freeze()
            gc.disable()
        elif end.is_evaluated or end.step % EVERY == 0:
            gc.collect()

    def end(self) -> None:
        if self._was_on is None or parent_pid() is not None:
            return  # a launcher's rank leaves soon: a search would write to all pages that it shares with other ranks
        gc.unfreeze()
        if self._was_on:
            gc.enable()
        self._was_on = None
