"""`train.eval_tasks`: scores of tasks every `train.eval_every`, with the weights as they are, shared among the ranks.

Under a layout that shards weights all ranks compute every group together, as the weights are gathered for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from duoka.config.schema import RunConfig
from duoka.data.tokens.tokenizer import ChatTokenizer
from duoka.model.answer import stop_tokens, window_of
from duoka.model.build import LossModel
from duoka.parallel.engine import Engine
from duoka.parallel.task_rows import Prompts, TaskScore, make_prompts, score_items, summarize
from duoka.parallel.task_score import compute_rows
from duoka.plan.layout import Layout
from duoka.store.saving import Saver
from duoka.tasks.find import find_tasks, in_order
from duoka.train.moments import Concern, StepEnd
from duoka.train.record import Recorder

ROWS_AT_ONCE = 16


@dataclass(frozen=True)
class NamedTasks:
    """The tasks of the config, each under the name that it has there: a bundle has several."""

    prompts: tuple[tuple[str, Prompts], ...]
    stop_ids: frozenset[int]


def read_tasks(
    config: RunConfig, base: Path, engine: Engine, read_tokenizer: Callable[[], ChatTokenizer]
) -> NamedTasks | None:
    """None where no task is asked for."""
    if not config.train.eval_tasks:
        return None
    assert isinstance(engine.bare, LossModel)
    core, tokenizer = engine.bare.core, read_tokenizer()
    prompts = [
        (name, make_prompts(task, in_order(task, config.train.eval_items), tokenizer, window_of(core)))
        for name in config.train.eval_tasks
        for task in find_tasks(name, base)
    ]
    return NamedTasks(tuple(prompts), stop_tokens(core, tokenizer))


class TaskScorer(Concern):
    """Scores into the event log and on the screen, and to what keeps the best step. Without tasks it does nothing."""

    def __init__(
        self, engine: Engine, layout: Layout, record: Recorder, saver: Saver, tasks: NamedTasks | None
    ) -> None:
        self._engine, self._layout, self._record, self._saver, self._tasks = engine, layout, record, saver, tasks

    def after_step(self, end: StepEnd) -> None:
        if self._tasks is None or not end.is_evaluated:
            return
        started, found = time.perf_counter(), list[tuple[str, TaskScore]]()
        together = bool(self._layout.is_sharded or self._layout.axes)
        world = self._engine.world
        with self._engine.evaluate() as model:
            assert isinstance(model, LossModel)
            for name, prompts in self._tasks.prompts:
                results = compute_rows(
                    prompts, model, world, stop_ids=self._tasks.stop_ids, precision=self._layout.precision,
                    batch=ROWS_AT_ONCE, together=together,
                )  # fmt: skip
                found.append((name, summarize(prompts.task, score_items(prompts, results))))
        scores, seconds = [asdict(score) for _, score in found], round(time.perf_counter() - started, 4)
        self._record.event("tasks", step=end.step, scores=scores, seconds=seconds)
        self._record.say(f"tasks at step {end.step}: {', '.join(score.sentence() for _, score in found)}")
        for name in dict.fromkeys(name for name, _ in found):
            own = [score.score for other, score in found if other == name]
            self._saver.evaluated(1.0 - sum(own) / len(own), by=name)
