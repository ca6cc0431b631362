"""TensorBoard's files: curves of a run, or of a user's own loop."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from duoka.sinks.sink import RunFacts, Sink, StepNumbers, as_number, eval_scalars, refuse_rest, step_scalars

ANEW_S = 60.0  # from a writer's end to the next file


class TensorBoardSink(Sink):
    name = "tensorboard"
    trouble = "TensorBoard's file cannot be written"

    def open(self, facts: RunFacts, say: Callable[[str], None]) -> None:
        _hush_writers()
        self._fault: tuple[Any, ...] = ()  # of the writer's end, until another is at work
        self._failed_at = 0.0
        folder = facts.folder / "tensorboard" if facts.goes_on else facts.folder / facts.name
        # Steps after the checkpoint that we go on from were thrown away: readers drop them at purge_step. Where nothing
        # had been saved, those are all.
        is_another_start = facts.goes_on and folder.is_dir() and any(folder.iterdir())
        purge = {"purge_step": facts.kept_steps + 1} if facts.kept_steps or is_another_start else {}
        self._options = {"log_dir": str(folder), **facts.options}
        self._begin_file(purge)
        if facts.config:
            shown = json.dumps(dict(facts.config), indent=2, default=str, ensure_ascii=False)
            self._writer.add_text("config", "".join(f"    {line}\n" for line in shown.splitlines()), facts.kept_steps)
            self._writer.flush()

    def _begin_file(self, purge: Mapping[str, int]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(**{**self._options, **purge})

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """A disk that took no more ends a file's writer for good: a while later another file is tried."""
        if self._fault:
            if time.monotonic() - self._failed_at <= ANEW_S:
                raise OSError(*self._fault)  # a writer that was closed would make a file for each number
            self._failed_at = time.monotonic()
            with contextlib.suppress(OSError):
                self._writer.close()
            self._begin_file({})
            self._fault = ()
        try:
            yield
        except OSError as error:
            self._fault, self._failed_at = error.args[:2], time.monotonic()
            raise

    def event(self, type: str, step: int, values: Mapping[str, Any]) -> None:
        if type == "resume":  # a rollback in the middle of a run: only a new file says what is dropped
            self._writer.close()
            self._begin_file({"purge_step": step + 1})

    def step(self, now: StepNumbers) -> None:
        self._draw(step_scalars(now), now.step)

    def evaluated(self, step: int, values: Mapping[str, Any]) -> None:
        self._draw(eval_scalars(values), step)

    def _draw(self, scalars: Mapping[str, float], step: int) -> None:
        with self._writing():
            for tag, value in scalars.items():
                self._writer.add_scalar(tag, value, step)

    def samples(self, step: int, pairs: Sequence[tuple[str, str]]) -> None:
        with self._writing():
            self._writer.add_text("samples", "\n".join(f"    {one}|{text}" for one, text in pairs), step)

    def scalars(self, values: Mapping[str, Any], step: int | None, options: Mapping[str, Any]) -> None:
        with self._writing():
            rest = self._add(values, step, options)
            self._writer.flush()  # a user's own loop may be killed at any time, and has no event log beside
        refuse_rest(rest)

    def _add(self, values: Mapping[str, Any], step: int | None, options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what is no number and no text."""
        rest: dict[str, Any] = {}
        for name, value in values.items():
            if isinstance(value, str):
                self._writer.add_text(name, value, global_step=step, **options)
            elif isinstance(value, Mapping):
                several = {key: number for key, one in value.items() if (number := as_number(one)) is not None}
                self._writer.add_scalars(name, several, step, **options)
                rest |= {f"{name}/{key}": one for key, one in value.items() if key not in several}
            elif (number := as_number(value)) is not None:
                self._writer.add_scalar(name, number, step, **options)
            else:
                rest[name] = value
        return rest

    def close(self) -> None:
        self._writer.close()

    @property
    def handle(self) -> Any:
        return self._writer


def _hush_writers() -> None:
    """TensorBoard's own thread hands its error over to the next call, and would print a traceback as well."""
    before = threading.excepthook
    if getattr(before, "__name__", "") == _hush_writers.__name__:
        return

    def hushed(args: threading.ExceptHookArgs) -> None:
        if not type(args.thread).__module__.startswith("tensorboard."):
            before(args)

    hushed.__name__ = _hush_writers.__name__
    threading.excepthook = hushed
