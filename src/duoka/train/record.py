"""Numbers of a run, written once: rank 0 gives the global ones to all sinks, every rank writes its own times.

Which sinks there are says `_build_sinks`; what each makes of the numbers is its own file in duoka/sinks/. All calls
are cheap and none communicates.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from duoka.comm.ledger import sent_bytes
from duoka.comm.world import World
from duoka.config.loaded import Loaded
from duoka.config.schema import LogConfig
from duoka.config.write import shown_values
from duoka.plan.yardstick import Yardstick
from duoka.process.heap import give_back
from duoka.process.lifeline import launcher_speaks
from duoka.runs.events import EventWriter, rank_log
from duoka.runs.folder import RunFolder
from duoka.sinks.alert_follower import AlertFollower
from duoka.sinks.console import Console
from duoka.sinks.event_log import EventLog
from duoka.sinks.fan_out import Sinks, build_sink
from duoka.sinks.sink import RunFacts, Sink, StepNumbers
from duoka.sinks.status import StatusFiles
from duoka.store.state import TrainState
from duoka.train.step import StepResult

_HIDDEN = "***"
_RECENT = 20  # steps that the shown speed is a mean of


class Recorder:
    """Opened for the length of a run on every rank."""

    def __init__(
        self,
        run: RunFolder,
        world: World,
        loaded: Loaded,
        total_steps: int,
        first_step: int,
        yardstick: Yardstick | None = None,
    ) -> None:
        self.run = run
        self.yardstick = yardstick
        self.world = world
        self.total_steps = total_steps
        config = loaded.config
        self._draws = config.stage.kind.draws
        self._rank_events = EventWriter(rank_log(run, world.rank))
        self._sinks = Sinks(_build_sinks(config.log) if world.is_main else (), warn=self._warn)
        self._facts = RunFacts(
            run.path.resolve().name, run.path, total_steps, first_step, world.size, _public_values(loaded),
            goes_on=True,
        )  # fmt: skip
        self._window: list[tuple[int, int, float]] = []  # tokens, shared ones, seconds
        self._num_steps = 0
        self._totals = [0, 0]  # tokens since this start, and shared ones of them
        self._cpu_s = time.process_time()

    def start(self, state: TrainState, **facts: Any) -> None:
        give_back()
        forget_peak()
        self._sinks.open(self._facts)
        kind = "resume" if state.step else "run"
        self._sinks.started(kind, state.step, {"total_steps": self.total_steps, **facts})

    def step(self, state: TrainState, numbers: dict[str, Any], result: StepResult, step_s: float) -> None:
        """One optimizer step: `numbers` are global."""
        own: dict[str, Any] = {name: round(value, 6) for name, value in asdict(result.times).items()}
        if self._draws:  # a stage whose data are answers: drawing them and rewarding them is what it waited for
            own["rollouts_s"], own["data_s"] = own["data_s"], 0.0
        own |= {"sent_bytes": sent_bytes(result.traffic)} if self.world.size > 1 else {}
        own |= {"exchanged_s": round(result.seen_exchange_s, 6)} if result.seen_exchange_s else {}
        self._note_traffic(state, result)
        memory_bytes = peak_memory_bytes()
        self._rank_events.write(
            "rank",
            rank=self.world.rank,
            step=state.step,
            step_s=round(step_s, 6),
            cpu_s=round(self._cpu_since_last_s(), 6),
            **own,
            memory_bytes=memory_bytes,
        )
        if not self.world.is_main:
            return
        self._window = [*self._window[1 - _RECENT :], (numbers["num_tokens"], result.num_shared, step_s)]
        self._totals = [self._totals[0] + numbers["num_tokens"], self._totals[1] + result.num_shared]
        tokens, shared, seconds = (sum(part) for part in zip(*self._window, strict=True))
        computed = numbers["num_tokens"] - result.num_shared
        mfu = self._mfu(computed / step_s)
        own |= {} if mfu is None else {"mfu": round(mfu, 5)}
        own |= {"shared_tokens": result.num_shared} if result.num_shared else {}
        self._sinks.step(
            StepNumbers(
                step=state.step,
                numbers=numbers,
                own=own,
                metrics=result.metrics,
                tokens_per_s=numbers["num_tokens"] / step_s,
                step_s=step_s,
                memory_bytes=memory_bytes,
                recent_tokens_per_s=tokens / seconds,
                recent_mfu=self._mfu((tokens - shared) / seconds),
                eta_s=seconds / len(self._window) * (self.total_steps - state.step),
            )
        )

    def _mfu(self, tokens_per_s: float) -> float | None:
        return self.yardstick.mfu(tokens_per_s) if self.yardstick else None

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

    def evaluated(self, state: TrainState, values: dict[str, Any]) -> None:
        self._sinks.evaluated(state.step, values)

    def sampled(self, step: int, samples: list[tuple[str, str]]) -> None:
        """What the model makes of a few beginnings."""
        self._sinks.samples(step, samples)

    def saved(self, step: int, name: str, size_bytes: int, blocked_s: float, write_s: float) -> None:
        """A checkpoint is on the disk; `step` is its own, training may be further by now."""
        self.event(
            "checkpoint", step=step, path=name, size_bytes=size_bytes, blocked_s=round(blocked_s, 4),
            write_s=round(write_s, 4),
        )  # fmt: skip

    def event(self, type: str, *, step: int, **values: Any) -> None:
        self._sinks.event(type, step, values)

    def say(self, text: str) -> None:
        """A line for people, once; kept apart from the progress line."""
        self._sinks.say(text)

    def _warn(self, text: str) -> None:
        """A sink has a fault: on the screen, and in the log for the report."""
        self.say(text)
        self.event("warning", step=self._facts.kept_steps + self._num_steps, text=text.removeprefix("warning: "))

    def stopped(self, step: int, reason: str, exit_code: int) -> None:
        # In an elastic world it may be only the world that ends, not the run: its launcher says which.
        goes_on = "" if launcher_speaks() else ". The same command goes on."
        self._sinks.ended(step, reason, exit_code, f"stopped by {reason}")
        self.say(f"stopped by {reason} after step {step}; saved{goes_on}")

    def prefixes(self) -> str:
        """What prefix sharing left out since this start, on rank 0; "" where that is nothing."""
        tokens, shared = self._totals
        if not shared:
            return ""
        return f"prefix sharing: {shared / tokens:.0%} of {tokens:,} tokens were left out, as samples begin alike"

    def done(self, step: int) -> None:
        self._sinks.ended(step, "done", 0, "")

    def close(self) -> None:
        self._rank_events.close()
        self._sinks.close()


def _public_values(loaded: Loaded) -> dict[str, Any]:
    """The config as trackers get it, which others may read: who knows a webhook's address can post there."""
    values = shown_values(loaded)
    alert = values["log"]["alert"]
    values["log"]["alert"] = alert | {key: _HIDDEN for key in ("command", "webhook") if alert[key]}
    return values


def _build_sinks(log: LogConfig) -> list[Sink]:
    """In the order in which they hear; the screen last to be closed but one, for it shows the others' trouble."""
    own: list[Sink] = [EventLog(), Console(log.every), StatusFiles()]
    alerts: list[Sink] = [AlertFollower()] if log.alert.is_on else []
    return [*own, *alerts, *(build_sink(name) for name in log.to)]


def forget_peak() -> None:
    """Resident memory's peak begins anew. While weights are read their files' pages count, which the system takes back
    when it needs them, and of which no step has any."""
    with contextlib.suppress(OSError):  # Linux alone has it
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_memory_bytes() -> int:
    """The most memory this process held since `forget_peak`: the GPU's when there is one, else resident memory."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024
