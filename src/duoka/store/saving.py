"""When to save in a run, which checkpoints to keep, and what to do when a save fails (a full disk).

The loop calls a `Saver` after each step, on all ranks; every decision is the same on all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from duoka.comm.world import World
from duoka.config.schema import CheckpointConfig
from duoka.errors import StorageError
from duoka.plan.costs import most_checkpoints
from duoka.runs.manifest import list_checkpoints, step_of
from duoka.store.checkpoint import CheckpointStore, Saved, SaveFault
from duoka.store.contents import Contents
from duoka.store.retention import Keep
from duoka.units import format_bytes, format_seconds

TRY_AGAIN_S = 2.0
_WORTH_SAYING_S = 1.0  # of waiting for the previous save


class SaveTimer(Protocol):
    """When the next save is due: by the count of steps, or by this process's clock."""

    def due_at(self, step: int) -> bool: ...
    def due_by_clock(self) -> bool: ...
    def restart(self) -> None: ...


class SaveLog(Protocol):
    """What a save is reported to: the run's recorder."""

    def saved(self, step: int, name: str, size_bytes: int, blocked_s: float, write_s: float) -> None: ...
    def event(self, type: str, *, step: int, **values: Any) -> None: ...
    def say(self, text: str) -> None: ...


class Saver:
    """Drives a run's store: due by steps, by the clock, by a best evaluation, or because the run ends."""

    def __init__(
        self,
        store: CheckpointStore,
        contents: Contents,
        config: CheckpointConfig,
        timer: SaveTimer,
        record: SaveLog,
        world: World,
    ) -> None:
        self.store = store
        self.contents = contents
        self.config = config
        self.record = record
        self.world = world
        self._timer = timer
        self._fault: SaveFault | None = None
        self._is_best = False
        self._said_slow = False
        self._forget_lost_best()

    def due_by_clock(self) -> bool:
        return self.world.is_main and self._timer.due_by_clock()

    def has_failed(self) -> bool:
        """Whether a save of this rank has failed; cheap, polled after each step."""
        self._note(self.store.collect())
        return self._fault is not None

    def evaluated(self, loss: float, by: str = "loss") -> None:
        """Remember the best evaluation `by` what the config says; with `keep_best` its step is saved.

        Of a task, `loss` is what it lacks to a full score.
        """
        if by != self.config.best_by:
            return
        state = self.contents.state
        if state.best_by not in (None, by):  # a loss says nothing of a score
            state.best_loss = state.best_step = None
        state.best_by = by
        if loss < (float("inf") if state.best_loss is None else state.best_loss):
            state.best_loss, state.best_step = loss, state.step
            self._is_best = self.config.keep_best

    def after_step(self, *, due: bool, failed: bool, last: bool, stopping: Callable[[], bool], stop: bool) -> None:
        """Save when due. `last` and `stop`: the run ends here, and waits until the save is complete."""
        if failed:
            self._note(self.store.wait())
            self._answer(stopping, must=False)
        # A resumed run repeats a missed evaluation at once: its step was saved before the run stopped.
        is_best_now = self._is_best and self.contents.state.best_step == self.contents.state.step
        due = due or self._timer.due_at(self.contents.state.step) or is_best_now
        if due or last or stop:
            self._is_best = False
            self._save(stopping, must=last or stop, stop=stop)
            self._timer.restart()

    def settle(self) -> None:
        """Wait for a save in progress, before the newest checkpoint is looked for."""
        self._note(self.store.wait())

    def _save(self, stopping: Callable[[], bool], *, must: bool, stop: bool) -> None:
        keep = Keep(self.config.keep, self.config.keep_every, self._best())
        step = self.contents.state.step
        self.world.heart.tell("save")
        while True:
            self._note(self.store.save(self.contents, keep))
            self._say_slow()
            if must and self._fault is None:
                self._note(self.store.wait())
            failed = self._fault
            if failed is None:
                return
            again = self._answer(stopping, must=stop)
            # A fault of an earlier save does not cancel this one.
            if not again and failed.step == step:
                return

    def _forget_lost_best(self, failed: int | None = None) -> None:
        """A best step that no checkpoint holds (`keep_best` was off, or its save `failed`) cannot stay.

        Without this, a later step would have to beat it to be saved, and the run might keep no best step at all.
        """
        state = self.contents.state
        if failed is not None and failed != state.best_step:
            return  # a save of the best one may still be on its way
        if not self.config.keep_best or state.best_step is None or state.best_by not in (None, self.config.best_by):
            return
        there = {step_of(folder) for folder in list_checkpoints(self.store.folder)} if self.world.is_main else set()
        if self.world.agree(state.best_step in there):
            return
        self._warn(
            f"the best evaluation so far was at step {state.best_step}, of which there is no checkpoint: the best is "
            "looked for from here on"
        )
        state.best_loss = state.best_step = None

    def _best(self) -> int | None:
        return self.contents.state.best_step if self.config.keep_best else None

    def _note(self, ended: Saved | SaveFault | None) -> None:
        if isinstance(ended, SaveFault):
            self._fault = ended
        elif ended is not None:
            self.world.heart.note_save(ended.write_s)
            self.record.saved(ended.step, ended.path.name, ended.size_bytes, ended.blocked_s, ended.write_s)

    def _say_slow(self) -> None:
        if self.store.waited_s > _WORTH_SAYING_S and not self._said_slow:
            self._said_slow = True
            waited = format_seconds(self.store.waited_s)
            self._warn(f"a checkpoint takes longer to write than the time between two: training waited {waited} for it")

    def _answer(self, stopping: Callable[[], bool], *, must: bool) -> bool:
        """Handle a failed save as `on_error` says; True to try again."""
        fault, self._fault = self._fault, None
        assert fault is not None
        error = fault.error()
        if self.config.on_error == "stop" or (must and self.config.on_error == "skip"):
            raise error
        text = "; ".join((fault.what, *fault.where.splitlines()))
        if self.config.on_error == "skip":
            self._warn(f"{text}; training goes on without it")
            self._forget_lost_best(fault.step)
            return False
        self._warn(f"{text}; training waits until it can be written")
        self._wait_for_room(stopping, error)
        self._warn("the checkpoint can be written now: training goes on")
        if fault.step != self.contents.state.step:  # else it is written now
            self._forget_lost_best(fault.step)
        return True

    def _wait_for_room(self, stopping: Callable[[], bool], error: StorageError) -> None:
        while True:
            stop, room = self.world.sum([float(stopping()), float(self.store.has_room())])
            self.world.heart.tell("save")
            if stop:
                raise error
            if room == self.world.size:
                return
            time.sleep(TRY_AGAIN_S)

    def _warn(self, text: str) -> None:
        self.record.event("warning", step=self.contents.state.step, text=text)
        self.record.say(f"warning: {text}")


def check_room(store: CheckpointStore, contents: Contents, config: CheckpointConfig, total_steps: int) -> list[str]:
    """Compare the space that the run's checkpoints will need with what is free; on all ranks. Notes, or a refusal."""
    steps_left = total_steps - contents.state.step
    needed, free, num_there = store.measure_room(contents)
    to_come = max(0, most_checkpoints(config, steps_left, num_there) - num_there)
    if free is None or not steps_left or free >= to_come * needed:
        return []
    size, room = format_bytes(needed), f"{format_bytes(free)} are free in {store.folder}"
    if free < needed and config.on_error == "stop":
        raise StorageError(
            f"not even one checkpoint fits: it takes {size}, and {room}",
            fix="free some space, or set output: to a larger disk (on_error: skip trains without checkpoints)",
        )
    return [f"up to {to_come} more checkpoints of {size} need {format_bytes(to_come * needed)}; only {room}"]
