"""What to do about what is seen: a table of signs, each with its advice. Used by `duoka top` and `duoka board`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from duoka.runs.status import Status
from duoka.units import format_bytes, format_seconds
from duoka.watch.ranks import Slowest
from duoka.watch.spike import Spike

_DATA_SHARE, _WAIT_SHARE, _FULL_SHARE = 0.2, 0.4, 0.95


@dataclass(frozen=True)
class Facts:
    """What hints go by."""

    state: str
    age_s: float
    times: Mapping[str, float]
    memory: Mapping[str, float]
    slowest: Slowest | None
    spike: Spike | None
    status: Status | None
    clock_ahead_s: float = 0.0
    num_nonfinite: int = 0
    num_ranks: int = 1

    def share(self, part: str) -> float:
        total = sum(self.times.values())
        return self.times.get(part, 0.0) / total if total > 0 else 0.0

    @property
    def fullness(self) -> float:
        available = self.memory.get("available", 0.0)
        return self.memory.get("max", 0.0) / available if available > 0 else 0.0


@dataclass(frozen=True)
class Hint:
    seen: str
    do: str


@dataclass(frozen=True)
class _Sign:
    holds: Callable[[Facts], bool]
    seen: Callable[[Facts], str]
    do: str


def _steps(count: int) -> str:
    return f"{count:,} {'step' if count == 1 else 'steps'}"


_SIGNS = (
    _Sign(
        lambda f: f.state == "dead",
        lambda f: "the run's process is gone and recorded no end",
        "look for the kernel's reason (dmesg); the same command goes on from the newest checkpoint",
    ),
    _Sign(
        lambda f: f.state == "failed",
        lambda f: f"the run failed{f' with exit code {f.status.exit_code}' if f.status else ''}",
        "the cause is above, ranks' own words are in logs/; the same command goes on from the newest checkpoint",
    ),
    _Sign(
        lambda f: f.state == "stopped",
        lambda f: "the run was stopped, and its state is saved",
        "the same command goes on",
    ),
    _Sign(
        lambda f: f.state in ("stalled", "silent"),
        lambda f: f"no sign of life for {format_seconds(f.age_s)}",
        "press l for logs; `kill -USR1 PID` of a rank writes its stacks to logs/; faults.hang_after ends a hang",
    ),
    _Sign(
        lambda f: f.num_nonfinite > 0,
        lambda f: f"the loss or gradient of {_steps(f.num_nonfinite)} was no number",
        "lower optim.lr, use train.precision: bf16 or fp32; faults.nonfinite says what the run does then",
    ),
    _Sign(
        lambda f: f.spike is not None,
        lambda f: f.spike.sentence() if f.spike else "",
        "if it does not come back: lower optim.lr, a longer optim.warmup, or look at the data of that step",
    ),
    _Sign(
        lambda f: f.slowest is not None,
        lambda f: f.slowest.sentence() if f.slowest else "",
        "run `duoka doctor` on its machine: other programs, heat, a slow disk or card",
    ),
    _Sign(
        lambda f: f.slowest is None and f.num_ranks > 1 and f.share("wait") > _WAIT_SHARE,
        lambda f: f"all ranks wait {f.share('wait'):.0%} of the time: the exchange is slow, not a rank",
        "a larger train.global_batch exchanges less often, parallel.compress sends less; "
        "`duoka comm test` measures the network",
    ),
    _Sign(
        lambda f: f.share("data") > _DATA_SHARE,
        lambda f: f"{f.share('data'):.0%} of the time is spent waiting for data",
        "put data and cache on a faster disk; `duoka profile` shows where it goes",
    ),
    _Sign(
        lambda f: f.fullness > _FULL_SHARE,
        lambda f: f"memory is {f.fullness:.0%} full ({format_bytes(f.memory['max'])})",
        "a smaller train.micro_batch or train.recompute (1/2, or full) leaves room; results stay the same",
    ),
    _Sign(
        lambda f: f.clock_ahead_s != 0.0,
        lambda f: (
            f"the training machine's clock is {format_seconds(abs(f.clock_ahead_s))} "
            f"{'ahead of' if f.clock_ahead_s > 0 else 'behind'} the disk's"
        ),
        "ages here go by this machine's clock; set the other one (NTP)",
    ),
)


def find_hints(facts: Facts) -> list[Hint]:
    """All signs that hold, the gravest first."""
    return [Hint(sign.seen(facts), sign.do) for sign in _SIGNS if sign.holds(facts)]
