"""The loop: global batches in, optimizer steps out. Read this file to know what a run does.

Everything here is called by all ranks in the same order; what differs between ranks (a clock, a signal) is summed
with the step's loss before anyone acts on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from duoka.data.loader import Loader
from duoka.optim.build import set_learning_rate
from duoka.optim.schedule import learning_rate
from duoka.parallel.world import World
from duoka.train.checkpoint import CheckpointStore, Contents
from duoka.train.hooks import StopSignal, Timer
from duoka.train.measure import Measured
from duoka.train.record import Recorder
from duoka.train.replicas import check_replicas
from duoka.train.setup import RunSettings
from duoka.train.step import optimizer_step


@dataclass(frozen=True)
class Outcome:
    """How the loop ended: `stopped_by` names the signal that asked for it, if any."""

    stopped_by: str = ""
    evaluated: Measured | None = None


def train(
    settings: RunSettings,
    contents: Contents,
    loader: Loader,
    store: CheckpointStore,
    record: Recorder,
    world: World,
    evaluate: Callable[[], Measured] | None,
) -> Outcome:
    """Run from the state's cursor to the last step, or until somebody asks to stop."""
    state, config = contents.state, settings.config
    save_timer = Timer(settings.save_every, settings.steps_per_epoch)
    eval_timer = Timer(settings.eval_every if evaluate else None, settings.steps_per_epoch)
    measured: Measured | None = None
    contents.parallel.model.train()
    with StopSignal() as stop:
        batches = iter(loader.from_cursor(state.epoch, state.index, settings.num_epochs))
        while state.step < settings.total_steps:
            started = time.perf_counter()
            batch = next(batches)
            data_s = time.perf_counter() - started

            lr = learning_rate(config.optim, state.step + 1, settings.total_steps)
            set_learning_rate(contents.optimizer, lr)
            result = optimizer_step(
                contents.parallel, contents.optimizer, batch,
                numerics=contents.numerics, clip=config.optim.clip, device=world.device, step=state.step + 1,
            )  # fmt: skip
            result.times.data_s = data_s
            asked = [
                stop.asked,
                world.is_main and save_timer.due_by_clock(),
                world.is_main and eval_timer.due_by_clock(),
            ]
            loss_sum, stop_asked, save_due, eval_due = world.sum([result.loss_sum, *map(float, asked)])

            state.advance(
                batch.epoch, batch.index, settings.steps_per_epoch,
                batch.num_samples, batch.num_tokens, batch.global_targets,
            )  # fmt: skip
            numbers = {
                "epoch": round(state.epoch + state.index / settings.steps_per_epoch, 4),
                "loss": loss_sum / batch.global_targets,
                "grad_norm": result.norm,
                "lr": lr,
                "num_targets": batch.global_targets,
                "num_tokens": batch.num_tokens,
                "num_samples": batch.num_samples,
            }
            record.step(state, numbers, result.times, time.perf_counter() - started)

            last = state.step >= settings.total_steps
            if config.parallel.check_replicas and state.step % config.parallel.check_replicas == 0:
                check_replicas(contents, world)
            if evaluate and (eval_due or eval_timer.due_at(state.step) or last):
                measured = evaluate()
                record.evaluated(state, {**asdict(measured), "perplexity": measured.perplexity})
                eval_timer.restart()
            if save_due or save_timer.due_at(state.step) or last or stop_asked:
                saved = store.save(contents, keep=config.checkpoint.keep)
                save_timer.restart()
                record.event(
                    "checkpoint", step=state.step, path=saved.path.name, size_bytes=saved.size_bytes,
                    blocked_s=round(saved.blocked_s, 4),
                )  # fmt: skip
            if stop_asked and not last:
                return Outcome(stop.name or "a signal to another rank", measured)
    return Outcome(evaluated=measured)
