"""The loop: global batches in, optimizer steps out. Read this file to know what a run does.

Everything here is called by all ranks in the same order; what differs between ranks (a clock, a signal) is summed
with the step's loss before anyone acts on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from duoka.data.feed.ahead import Walk
from duoka.data.feed.loader import GlobalBatch, Place
from duoka.optim.build import set_learning_rate
from duoka.parallel import inject
from duoka.train.hooks import StopSignal, Timer
from duoka.train.moments import StepEnd
from duoka.train.run import Run
from duoka.train.step import StepResult, optimizer_step


def train(run: Run) -> str:
    """Run from the state's cursor to the last step; returns "", or the signal that asked to stop before."""
    settings, state, saver, heart = run.settings, run.contents.state, run.saver, run.world.heart
    eval_timer = Timer(settings.eval_every if run.is_evaluated else None, settings.steps_per_epoch)
    run.contents.engine.model.train()
    heart.tell("start", state.step)
    walk = Walk[Place, GlobalBatch](lambda place: run.feed.batches(place, settings.num_epochs))
    with StopSignal() as stop, walk as batches:
        batches.go_to(state.place)

        def is_stopping() -> bool:
            return stop.asked

        def eval_is_due() -> bool:
            return run.world.is_main and eval_timer.due_by_clock()

        state.eval_pending = bool(run.evaluate) and (state.eval_pending or state.step >= settings.total_steps)
        while state.step < settings.total_steps or state.eval_pending:
            if state.eval_pending:  # the run was stopped in the middle of an evaluation
                if not _evaluate(run, is_stopping):
                    return stop.name or "a signal to another rank"
                run.moments.after_step(StepEnd(state.step, has_learned=False, is_evaluated=True))
                continue
            started = time.perf_counter()
            batch = next(batches)
            data_s = time.perf_counter() - started
            asked = (is_stopping, saver.due_by_clock, saver.has_failed, eval_is_due)
            answers, has_learned = _step(run, batch, started, data_s, asked)
            heart.warm_up()
            heart.tell("step", state.step)
            if not answers:  # back at an earlier step
                batches.go_to(state.place)
                continue
            stop_asked, save_due, save_failed, eval_due = answers
            last, measured = state.step >= settings.total_steps, True
            evaluates = eval_due or eval_timer.due_at(state.step) or (last and run.is_evaluated)
            if evaluates:
                measured = _evaluate(run, is_stopping)
                eval_timer.restart()
            run.moments.after_step(StepEnd(state.step, has_learned, is_evaluated=evaluates and measured))
            stop_asked = stop_asked or not measured
            saver.after_step(due=save_due, failed=save_failed, last=last, stop=stop_asked, stopping=is_stopping)
            if (stop_asked and not last) or not measured:
                return stop.name or "a signal to another rank"
    return ""


def _step(
    run: Run, batch: GlobalBatch, started: float, data_s: float, asked: tuple[Callable[[], bool], ...]
) -> tuple[list[bool], bool]:
    """One optimizer step, recorded; returns for each question whether any rank answers yes, and whether it learned.

    No answers: it went back to an earlier step, for `faults.nonfinite` says so of numbers that are not finite.
    """
    contents, settings, world, state = run.contents, run.settings, run.world, run.contents.state
    lr = settings.rate_of(state.step + 1)
    set_learning_rate(contents.optimizer, lr)

    def local_flags() -> list[float]:
        return [float(question()) for question in asked]

    def attempt(batch: GlobalBatch) -> StepResult:
        return optimizer_step(
            contents.engine, contents.optimizer, batch, run.objective_of(batch),
            clip=settings.config.optim.clip, local_flags=local_flags, observer=run.moments,
        )  # fmt: skip

    if why := run.stage.why_left_out(batch):
        result = run.nonfinite.leave_out(batch, state.step + 1, why, local_flags())
    else:
        result = run.guard.until_it_fits(attempt, batch)
    result.times.data_s = data_s
    has_learned = result.is_finite and not why
    if has_learned and not state.num_targets:
        run.stage.check_first(result.metrics, run.plan.layout.precision)
    if not result.is_finite and run.nonfinite.goes_back(batch, contents, result.loss, result.norm):
        return [], False
    state.advance(batch, has_learned=has_learned)
    inject.strike_weights(contents.engine.named_trainable(), state.step, world.rank)
    if result.is_finite and (not why or batch.facts):  # rewards of answers are known without learning from them
        counts = {"num_targets": batch.global_targets, "num_tokens": batch.num_tokens, "num_samples": batch.num_samples}
        numbers = {"epoch": round(batch.epochs_done, 4), "loss": result.loss, "grad_norm": result.norm, "lr": lr}
        run.record.step(state, numbers | counts, result, time.perf_counter() - started)
    return [count > 0 for count in result.flag_counts], has_learned


def _evaluate(run: Run, is_stopped: Callable[[], bool]) -> bool:
    """False when a request to stop came meanwhile: a partial evaluation is discarded."""
    if run.evaluate is None:  # tasks alone, which a concern scores
        return True
    started, state = time.perf_counter(), run.contents.state
    measured = run.evaluate(is_stopped)
    state.eval_pending = measured is None
    if measured is None:
        return False
    seconds = round(time.perf_counter() - started, 4)
    run.record.evaluated(state, {**measured.numbers(), "seconds": seconds})
    run.saver.evaluated(measured.loss)
    return True
