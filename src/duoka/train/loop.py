"""The loop: global batches in, optimizer steps out. Read this file to know what a run does.

Everything here is called by all ranks in the same order; what differs between ranks (a clock, a signal) is summed
with the step's loss before anyone acts on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from duoka.data.feed import Feed
from duoka.data.loader import GlobalBatch
from duoka.optim.build import set_learning_rate
from duoka.optim.schedule import learning_rate
from duoka.parallel.world import World
from duoka.train.checkpoint import Contents
from duoka.train.hooks import StopSignal, Timer
from duoka.train.measure import Measured
from duoka.train.memory import MemoryWatch
from duoka.train.record import Recorder
from duoka.train.replicas import check_replicas
from duoka.train.saving import Saver
from duoka.train.setup import RunSettings
from duoka.train.step import optimizer_step


@dataclass(frozen=True)
class Job:
    """One run's parts, all built: what the loop drives."""

    settings: RunSettings
    contents: Contents
    feed: Feed
    saver: Saver
    record: Recorder
    world: World
    evaluate: Callable[[], Measured] | None
    memory: MemoryWatch


def train(job: Job) -> str:
    """Run from the state's cursor to the last step; returns "", or the signal that asked to stop before."""
    settings, state, saver = job.settings, job.contents.state, job.saver
    eval_timer = Timer(settings.eval_every if job.evaluate else None, settings.steps_per_epoch)
    job.contents.parallel.model.train()
    batches = job.feed.batches(state.place, settings.num_epochs)
    with StopSignal() as stop:

        def is_stopping() -> bool:
            return stop.asked

        def eval_is_due() -> bool:
            return job.world.is_main and eval_timer.due_by_clock()

        while state.step < settings.total_steps:
            started = time.perf_counter()
            batch = next(batches)
            data_s = time.perf_counter() - started
            asked = (is_stopping, saver.due_by_clock, saver.has_failed, eval_is_due)
            stop_asked, save_due, save_failed, eval_due = _step(job, batch, started, data_s, asked)

            job.world.heart.warm_up()
            job.world.heart.tell("step", state.step)
            last = state.step >= settings.total_steps
            if settings.check_every and state.step % settings.check_every == 0:
                check_replicas(job.contents, job.world)
            if eval_due or eval_timer.due_at(state.step) or (last and job.evaluate):
                _evaluate(job)
                eval_timer.restart()
            saver.after_step(due=save_due, failed=save_failed, last=last, stop=stop_asked, stopping=is_stopping)
            if stop_asked and not last:
                return stop.name or "a signal to another rank"
    return ""


def _step(
    job: Job, batch: GlobalBatch, started: float, data_s: float, asked: tuple[Callable[[], bool], ...]
) -> list[bool]:
    """One optimizer step, recorded; returns for each question whether any rank answers yes after it."""
    contents, settings, world = job.contents, job.settings, job.world
    state, optim = contents.state, settings.config.optim
    lr = learning_rate(optim, state.step + 1, settings.total_steps)
    set_learning_rate(contents.optimizer, lr)
    result = optimizer_step(
        contents.parallel, contents.optimizer, batch,
        numerics=contents.numerics, clip=optim.clip, world=world, step=state.step + 1,
        watch=job.memory,
    )  # fmt: skip
    result.times.data_s = data_s
    loss_sum, *wished = world.sum([result.loss_sum, *(float(question()) for question in asked)])
    state.advance(batch)
    numbers = {
        "epoch": round(batch.epochs_done, 4),
        "loss": loss_sum / batch.global_targets,
        "grad_norm": result.norm,
        "lr": lr,
        "num_targets": batch.global_targets,
        "num_tokens": batch.num_tokens,
        "num_samples": batch.num_samples,
    }
    job.record.step(state, numbers, result, time.perf_counter() - started)
    if held := job.memory.report(world):
        job.record.memory(state, held)
    return [wish > 0 for wish in wished]


def _evaluate(job: Job) -> None:
    assert job.evaluate is not None
    started = time.perf_counter()
    measured = job.evaluate()
    seconds = round(time.perf_counter() - started, 4)
    job.record.evaluated(
        job.contents.state, {**asdict(measured), "perplexity": measured.perplexity, "seconds": seconds}
    )
    job.saver.evaluated(measured.loss)
