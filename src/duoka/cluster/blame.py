"""Who is to blame: from the ends of all ranks to one cause, one message and one exit code.

The first failure in time is the cause, unless it only says that another rank was lost: then that one is. Pure
reading of files and exit codes; supervise.py asks, the command line prints.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from duoka.cluster.hang import Hang
from duoka.cluster.launch import WorldSpec
from duoka.errors import StoppedEarly, WorkerFailed
from duoka.process.exits import RankExit
from duoka.process.rank import START_MARK, log_name
from duoka.runs.events import global_log
from duoka.runs.failure import Failure, read_failures
from duoka.runs.folder import RunFolder

# Codes that duoka's commands document: a rank that ends with one has said what a user needs to know.
DOCUMENTED = (2, 3, 4, 6, 75)
# What a rank says when it lost another one: never the cause while another rank has a reason of its own.
SECOND_HAND = (
    "connection closed by peer", "connection reset by peer", "connection refused", "broken pipe", "socket closed",
    "connectfullmesh", "remote process exited", "failed to recv", "failed to send", "nccl remote error",
    "connection was closed", "recvvalue failed", "sendbytes failed", "unhandled system error",
)  # fmt: skip
SMALLER = "SmallerMicroBatch"  # the kind of failure after which a start uses a smaller micro-batch
_HINTS = {
    "SIGKILL": "nothing in duoka kills a healthy rank: the kernel does when memory is short (see dmesg), or a person",
    "SIGSEGV": "a crash in compiled code: logs may show where, and PYTHONFAULTHANDLER=1 shows the Python line",
    "SIGBUS": "often a full /dev/shm or disk under memory-mapped files: see duoka doctor",
}
_TAIL_BYTES = 256 * 1024
_RANK_PREFIX = re.compile(r"^\[rank\d+\]:? ?")


@dataclass(frozen=True)
class Verdict:
    """How a world ended. `lines` is the message, `details` what may follow once (a traceback, where logs are)."""

    exit_code: int
    lines: tuple[str, ...] = ()
    details: tuple[str, ...] = ()
    stopped: bool = False  # on request, or saved and left: no failure
    step: int = 0  # of a failure: the last optimizer step that was recorded
    again: bool = False  # the world left only to begin again with less at once


def judge_world(
    spec: WorldSpec,
    exits: Sequence[RankExit],
    *,
    stopped_by: str,
    left_at_once: bool,
    killed_late: bool,
    hang: Hang | None = None,
) -> Verdict:
    failures = {one.rank: one for one in read_failures(spec.run)}
    bad = [one for one in exits if one.code != 0]
    if left_at_once:
        return Verdict(130, ("left at once, as asked; nothing more was saved",), (), True)
    if hang is not None:
        lines = (f"{WorkerFailed.title}: {hang.lines[0]}", *hang.lines[1:])
        return Verdict(
            WorkerFailed.exit_code, lines, (*_where(spec, hang.rank), *_goes_on(spec, hang.step)), step=hang.step
        )
    if killed_late:
        late = [one for one in bad if one.code == -signal.SIGKILL]
        text = f"{_ranks(late)} did not stop within {spec.stop_grace_s:g} s of {stopped_by}"
        return Verdict(WorkerFailed.exit_code, (f"{WorkerFailed.title}: {text}, and were killed",), _where(spec))
    if not bad:
        return _judge_no_failure(spec, exits, stopped_by)
    ended_by_stop = (StoppedEarly.exit_code, -signal.SIGTERM, 128 + signal.SIGTERM)
    if stopped_by and all(one.code in ended_by_stop for one in bad):
        return _judge_stop(spec, bad, stopped_by)
    if all(one.code == StoppedEarly.exit_code or (one.by_us and one.code == -signal.SIGTERM) for one in bad):
        return Verdict(StoppedEarly.exit_code, (), (), True)
    return _judge_failure(spec, bad, failures)


def _judge_no_failure(spec: WorldSpec, exits: Sequence[RankExit], stopped_by: str) -> Verdict:
    if stopped_by and len(exits) < spec.num_processes:
        return _judge_stop(spec, [], stopped_by)
    return Verdict(0)


def _judge_stop(spec: WorldSpec, bad: list[RankExit], stopped_by: str) -> Verdict:
    """Everybody left because somebody asked. Who left with 75 has saved, and said so."""
    if any(one.code == StoppedEarly.exit_code for one in bad):
        return Verdict(StoppedEarly.exit_code, (), (), True)
    if spec.resumes:
        text = f"stopped by {stopped_by} before anything could be saved; the same command starts again"
        return Verdict(StoppedEarly.exit_code, (text,), (), True)
    return Verdict(128 + getattr(signal, stopped_by), (f"stopped by {stopped_by}",), (), True)


def _judge_failure(spec: WorldSpec, bad: list[RankExit], failures: dict[int, Failure]) -> Verdict:
    cause = find_cause(spec.run, bad, failures)
    failure = failures.get(cause.rank)
    others = len({one.rank for one in bad} - {cause.rank})
    who = f"rank {cause.rank} of {spec.num_processes}"
    step = max(last_step(spec.run, spec.started), failure.step if failure else 0)
    after = f" after step {step}" if step else ""
    traceback: list[str] = []
    if failure is not None and not failure.traceback and failure.exit_code != 1:
        code = failure.exit_code
        lines = list(failure.lines)
        if spec.num_processes > 1:
            lines.append(f"  (seen by {who}{after})")
    else:
        code = cause.code if cause.code in DOCUMENTED else WorkerFailed.exit_code
        how, traceback = _describe(spec, cause, failure)
        lines = [f"{WorkerFailed.title}: {who} {how}{after}"]
        name = signal.Signals(-cause.code).name if cause.code < 0 else ""
        lines += [f"  {_HINTS[name]}"] if failure is None and name in _HINTS else []
    if others:
        lines.append(f"  {others} other rank{'s were' if others > 1 else ' was'} stopped because of it")
    hint = _goes_on(spec, step) if code == WorkerFailed.exit_code else ()
    again = failure is not None and failure.kind == SMALLER
    return Verdict(code, tuple(lines), (*traceback, *_where(spec, cause.rank), *hint), step=step, again=again)


def _goes_on(spec: WorldSpec, step: int) -> tuple[str, ...]:
    goes_on = spec.resumes and step > 0 and spec.run.checkpoints.is_dir()
    return ("  the same command goes on from the newest checkpoint",) if goes_on else ()


def find_cause(run: RunFolder, bad: list[RankExit], failures: dict[int, Failure]) -> RankExit:
    """The first end in time that is no consequence of another one."""

    def order(one: RankExit) -> tuple[int, float]:
        failure = failures.get(one.rank)
        # A rank's own clock is exact; an exit was noticed up to a tenth of a second late.
        return _distance(run, one, failure), failure.time if failure else one.time

    return min(bad, key=order)


def _distance(run: RunFolder, one: RankExit, failure: Failure | None) -> int:
    """0: a reason of its own; 1: it lost another rank; 2: it left in good order, or we ended it."""
    ended_by_us = one.by_us and failure is None and one.code in (-signal.SIGTERM, -signal.SIGKILL)
    if one.code == StoppedEarly.exit_code or ended_by_us:
        return 2
    if failure is None and one.code < 0 and one.code != -signal.SIGABRT:
        return 0
    if failure is not None:
        text = "\n".join((*failure.lines, failure.traceback[-4000:]))
    else:
        text = "\n".join(read_last_traceback(run.logs / log_name(one.rank)))
    return 1 if any(words in text.lower() for words in SECOND_HAND) else 0


def _describe(spec: WorldSpec, cause: RankExit, failure: Failure | None) -> tuple[str, list[str]]:
    """(what happened in words, the traceback when it was not on the screen before)."""
    if failure is not None:
        text = failure.lines[0] if failure.lines else ""
        return f"raised {failure.kind}: {text}" if text else f"raised {failure.kind}", [
            f"  {line}" for line in failure.traceback.rstrip().splitlines()
        ]
    if cause.code < 0:
        return f"was killed by {_signal_name(-cause.code)}", []
    traceback = read_last_traceback(spec.run.logs / log_name(cause.rank))
    raised = f"raised {traceback[-1].strip()}" if traceback else f"ended with exit code {cause.code}"
    # Rank 0's output went to the terminal, its traceback too.
    return raised, [] if cause.rank == 0 else [f"  {line}" for line in traceback]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _ranks(exits: list[RankExit]) -> str:
    names = ", ".join(str(one.rank) for one in sorted(exits, key=lambda one: one.rank))
    return f"rank{'s' if len(exits) != 1 else ''} {names}" if exits else "some ranks"


def _where(spec: WorldSpec, rank: int | None = None) -> tuple[str, ...]:
    logs = spec.run.logs
    return (f"  logs: {logs if rank is None else logs / log_name(rank)}",)


def last_step(run: RunFolder, since: float) -> int:
    """The last optimizer step that was recorded, or gone on from, after the moment `since`; or 0."""
    last = 0
    for line in _tail(global_log(run)).splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue  # the first line of the tail is cut, the last one may be
        if isinstance(event, dict) and event.get("type") in ("step", "resume") and event.get("t", 0) >= since:
            last = int(event["step"])
    return last


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def read_last_traceback(log: Path) -> list[str]:
    """The last traceback of a rank's latest start, without torch's rank prefix; empty when there is none."""
    lines = [_RANK_PREFIX.sub("", line) for line in _tail(log).rpartition(START_MARK)[2].splitlines()]
    starts = [index for index, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if not starts:
        return []
    found = [lines[starts[-1]]]
    for line in lines[starts[-1] + 1 :]:
        found.append(line)
        if line and not line.startswith(" "):
            break
    return found
