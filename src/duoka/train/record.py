"""Numbers of a run, written once: the event log, TensorBoard, status.json, and the line that people watch.

Rank 0 writes the global numbers; every rank writes its own times. All calls are cheap and none communicates.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from dataclasses import asdict
from typing import Any

import torch

from duoka.comm.ledger import sent_bytes
from duoka.comm.world import World
from duoka.config.schema import LogConfig
from duoka.plan.yardstick import Yardstick
from duoka.process.lifeline import launcher_speaks, parent_pid
from duoka.runs.events import EventWriter, global_log, rank_log
from duoka.runs.folder import RunFolder
from duoka.runs.status import leader_identity, read_status, update_status
from duoka.store.state import TrainState
from duoka.train.memory import Holdings, explain_imbalance
from duoka.train.progress import Progress
from duoka.train.step import StepResult

STATUS_EVERY_S = 1.0


class Recorder:
    """Opened for the length of a run on every rank."""

    def __init__(
        self,
        run: RunFolder,
        world: World,
        total_steps: int,
        log: LogConfig,
        first_step: int,
        yardstick: Yardstick | None = None,
    ) -> None:
        self.run = run
        self.yardstick = yardstick
        self.world = world
        self.total_steps = total_steps
        self.log_every = log.every
        self._rank_events = EventWriter(rank_log(run, world.rank))
        self._events = EventWriter(global_log(run)) if world.is_main else None
        self._board = _open_tensorboard(run, first_step) if world.is_main and "tensorboard" in log.to else None
        self._progress = Progress(total_steps, first_step) if world.is_main else None
        self._status_at = 0.0
        self._said: set[str] = set()
        self._window: list[tuple[int, float]] = []
        self._num_steps = 0
        self._cpu_s = time.process_time()

    def start(self, state: TrainState, **facts: Any) -> None:
        self.event("resume" if state.step else "run", step=state.step, total_steps=self.total_steps, **facts)
        if self.world.is_main:
            now = read_status(self.run)
            # Without a launcher of ours rank 0 leads the run; an elastic one is led by its launcher.
            own = leader_identity(parent_pid() if launcher_speaks() else None)
            leader = own if now is None or now.state != "starting" or not now.pid else {}
            update_status(
                self.run, state="running", step=state.step, total_steps=self.total_steps,
                world_size=self.world.size, exit_code=None, cause="", **leader,
            )  # fmt: skip

    def step(self, state: TrainState, numbers: dict[str, Any], result: StepResult, step_s: float) -> None:
        """One optimizer step: `numbers` are global."""
        own: dict[str, Any] = {name: round(value, 6) for name, value in asdict(result.times).items()}
        own |= {"sent_bytes": sent_bytes(result.traffic)} if self.world.size > 1 else {}
        self._note_traffic(state, result)
        self._rank_events.write(
            "rank",
            rank=self.world.rank,
            step=state.step,
            step_s=round(step_s, 6),
            cpu_s=round(self._cpu_since_last_s(), 6),
            **own,
            memory_bytes=peak_memory_bytes(),
        )
        if not self.world.is_main:
            return
        tokens_per_s = numbers["num_tokens"] / step_s
        mfu = self.yardstick.mfu(tokens_per_s) if self.yardstick else None
        own |= {} if mfu is None else {"mfu": round(mfu, 5)}
        self.event(
            "step", step=state.step, **numbers, tokens_per_s=round(tokens_per_s, 2), step_s=round(step_s, 6), **own,
            memory_bytes=peak_memory_bytes(),
        )  # fmt: skip
        scalars = {f"train/{key}": numbers[key] for key in ("loss", "grad_norm", "lr")}
        self._draw(scalars | {"train/tokens_per_s": tokens_per_s}, state.step)
        self._show(state, numbers, step_s)
        self._write_status(state, numbers["loss"])

    def _cpu_since_last_s(self) -> float:
        """This process's processor time since the step before, all its threads together."""
        before, self._cpu_s = self._cpu_s, time.process_time()
        return self._cpu_s - before

    def _note_traffic(self, state: TrainState, result: StepResult) -> None:
        """What a step exchanges, by kind: once, for steps are alike; the second, whose buckets have settled."""
        self._num_steps += 1
        if self._num_steps == 2 and result.traffic:
            self.event(
                "traffic",
                step=state.step,
                num_micro_batches=result.num_micro_batches,
                kinds={kind: asdict(one) for kind, one in sorted(result.traffic.items())},
            )

    def _show(self, state: TrainState, numbers: dict[str, Any], step_s: float) -> None:
        assert self._progress is not None
        self._window = [*self._window[-19:], (numbers["num_tokens"], step_s)]
        tokens, seconds = (sum(part) for part in zip(*self._window, strict=True))
        eta_s = seconds / len(self._window) * (self.total_steps - state.step)
        self._progress.update(state.step, numbers, tokens / seconds, eta_s)
        if state.step % self.log_every == 0 or state.step in (1, self.total_steps):
            mfu = self.yardstick.mfu(tokens / seconds) if self.yardstick else None
            self._progress.log_line(state.step, numbers, tokens / seconds, eta_s, mfu)

    def _write_status(self, state: TrainState, loss: float) -> None:
        if time.monotonic() - self._status_at < STATUS_EVERY_S and state.step < self.total_steps:
            return
        self._status_at = time.monotonic()
        tokens, seconds = (sum(part) for part in zip(*self._window, strict=True))
        try:
            update_status(self.run, step=state.step, loss=loss, tokens_per_s=round(tokens / seconds, 2))
        except OSError as error:
            self._say_once("status.json", error.strerror or str(error))

    def _draw(self, scalars: dict[str, float], step: int) -> None:
        if self._board is None:
            return
        try:
            for tag, value in scalars.items():
                self._board.add_scalar(tag, value, step)
        except OSError as error:
            # Its thread has ended with this error, and raises it again at every call.
            self._board = None
            self._say_once("TensorBoard's file", error.strerror or str(error))

    def _say_once(self, what: str, reason: str) -> None:
        """A disk that takes no more is no reason to stop training; checkpoints have a say of their own."""
        if what not in self._said:
            self._said.add(what)
            self.say(f"warning: {what} cannot be written: {reason}")

    def evaluated(self, state: TrainState, values: dict[str, Any]) -> None:
        self.event("eval", step=state.step, **values)
        drawn = ("loss", "perplexity", "accuracy", "bits_per_byte")
        self._draw({f"eval/{key}": values[key] for key in drawn if values[key] is not None}, state.step)
        bits = values["bits_per_byte"]
        self.say(
            f"eval at step {state.step}: loss {values['loss']:.4f}, perplexity {values['perplexity']:.4g}, "
            f"{'' if bits is None else f'{bits:.4f} bits per byte, '}"
            f"token accuracy {values['accuracy']:.1%} over {values['num_samples']} samples"
        )

    def sampled(self, state: TrainState, samples: list[tuple[str, str]]) -> None:
        """What the model makes of a few beginnings."""
        self.event("samples", step=state.step, samples=[{"prompt": one, "text": text} for one, text in samples])
        for prompt, text in samples:
            self.say(f"  {prompt}|{' '.join(text.split())}")

    def saved(self, step: int, name: str, size_bytes: int, blocked_s: float, write_s: float) -> None:
        """A checkpoint is on the disk; `step` is its own, training may be further by now."""
        self.event(
            "checkpoint", step=step, path=name, size_bytes=size_bytes, blocked_s=round(blocked_s, 4),
            write_s=round(write_s, 4),
        )  # fmt: skip

    def memory(self, state: TrainState, ranks: list[Holdings]) -> None:
        """What each rank holds, by part, and which one holds more than its share."""
        self.event("memory", step=state.step, ranks=[asdict(one) for one in ranks], imbalance=explain_imbalance(ranks))

    def event(self, type: str, **values: Any) -> None:
        if self._events:
            self._events.write(type, **values)
            if self._events.fault:
                self._say_once("the event log", self._events.fault)

    def say(self, text: str) -> None:
        """A line for people, once; kept apart from the progress line."""
        if self._progress:
            self._progress.say(text)

    def close(self) -> None:
        self._rank_events.close()
        if self._progress:
            self._progress.close()
        if self._board:
            with contextlib.suppress(OSError):
                self._board.close()
        if self._events:
            self._events.close()
            self._events = None


def peak_memory_bytes() -> int:
    """The most memory this process ever held: the GPU's when there is one, else resident memory."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024


def _open_tensorboard(run: RunFolder, step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    # Steps after the checkpoint that we go on from were thrown away: readers drop them at purge_step.
    return SummaryWriter(str(run.tensorboard), purge_step=step + 1 if step else None)
