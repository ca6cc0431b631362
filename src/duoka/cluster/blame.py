"""Root cause of a failed world: from the exits of all ranks to one cause, one message and one exit code.

The first failure in time is the cause, unless it only says that another rank was lost: then that one is. Pure
reading of files and exit codes; supervise.py asks, the command line prints.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Container, Sequence
from pathlib import Path

from duoka.cluster.hang import LEFT_EARLY, Hang
from duoka.cluster.launch import WorldSpec
from duoka.cluster.verdict import INTERRUPTED, KIND_OF_CODE, LEFT_AT_ONCE, Kind, Verdict, failed, stopped
from duoka.errors import DuokaError, StoppedEarly, StorageError, WorkerFailed
from duoka.plan.hardware import count_oom_kills, read_cgroup_limit
from duoka.process.exits import ENDED_BY_STOP, RankExit
from duoka.process.no_memory import no_memory, says_no_memory
from duoka.process.no_process import no_process, says_no_process
from duoka.process.open_files import says_too_many_files, too_many_files
from duoka.process.rank import START_MARK, log_name
from duoka.runs.events import global_log
from duoka.runs.failure import Failure, read_failures
from duoka.runs.folder import RunFolder
from duoka.runs.heart import Beat, describe_place, read_beats
from duoka.runs.manifest import list_checkpoints
from duoka.units import format_bytes

# Codes that duoka's commands document: a rank that ends with one has said what a user needs to know.
DOCUMENTED = (2, 3, 4, 6, 75)
# Errors of a rank that lost its peer: never the root cause while another rank has an error of its own.
SECOND_HAND = (
    "connection closed by peer", "connection reset by peer", "connection refused", "broken pipe", "socket closed",
    "connectfullmesh", "remote process exited", "failed to recv", "failed to send", "nccl remote error",
    "connection was closed", "recvvalue failed", "sendbytes failed", "unhandled system error",
    "watchdog caught collective operation timeout",
)  # fmt: skip
SMALLER = "SmallerMicroBatch"  # the kind of failure after which a start uses a smaller micro-batch
_HINTS = {
    "SIGKILL": "nothing in duoka kills a healthy rank: the kernel does when memory is short (see dmesg), or a person",
    "SIGSEGV": "a crash in compiled code: logs may show where, and PYTHONFAULTHANDLER=1 shows the Python line",
}
_NO_LAST_WORDS = (-signal.SIGKILL, -signal.SIGTERM)
_LAST_LINES = 20
_TAIL_BYTES = 256 * 1024
_RANK_PREFIX = re.compile(r"^\[rank\d+\]:? ?")


def judge_world(
    spec: WorldSpec,
    exits: Sequence[RankExit],
    *,
    stopped_by: str,
    left_at_once: bool,
    killed_late_s: float = 0.0,
    hang: Hang | None = None,
) -> Verdict:
    failures = {one.rank: one for one in read_failures(spec.run)}
    bad = [one for one in exits if one.code != 0]
    if left_at_once:
        return stopped(LEFT_AT_ONCE, INTERRUPTED)
    if hang is not None:
        details = (*_where(spec, hang.rank), *_goes_on(spec, hang.step))
        return failed(Kind.HUNG, *hang.lines, details=details, rank=hang.rank, step=hang.step)
    if killed_late_s:
        late = [one for one in bad if one.code == -signal.SIGKILL]
        were = "was" if len(late) == 1 else "were"
        text = f"{_ranks(late)} did not stop within {killed_late_s:.0f} s of {stopped_by}, and {were} killed"
        details = (*_where(spec), *_goes_on(spec, last_step(spec.run, spec.log_from)))
        is_written = spec.resumes and spec.stop_within_s is not None
        fix = ["  faults.stop_within: auto would have waited as long as they moved"] if is_written else []
        return failed(Kind.NOT_STOPPING, text, *fix, details=details)
    if not bad:
        return _judge_no_failure(spec, exits, stopped_by)
    if stopped_by and all(one.code in (StoppedEarly.exit_code, *ENDED_BY_STOP) for one in bad):
        return _judge_stop(spec, bad, stopped_by)
    has_saved = any(one.code == StoppedEarly.exit_code for one in bad)  # all ranks save before any of them leaves
    ended_by_us = (-signal.SIGTERM, -signal.SIGKILL) if has_saved else (-signal.SIGTERM,)
    if all(one.code == StoppedEarly.exit_code or (one.by_us and one.code in ended_by_us) for one in bad):
        return stopped()
    return _judge_failure(spec, exits, failures)


def _judge_no_failure(spec: WorldSpec, exits: Sequence[RankExit], stopped_by: str) -> Verdict:
    if stopped_by and len(exits) < spec.num_processes:
        return _judge_stop(spec, [], stopped_by)
    return Verdict(Kind.DONE)


def _judge_stop(spec: WorldSpec, bad: list[RankExit], stopped_by: str) -> Verdict:
    """All ranks left on request. Exit code 75: a checkpoint was saved, and rank 0 has printed so."""
    if any(one.code == StoppedEarly.exit_code for one in bad):
        return stopped()
    return stopped_unsaved(spec.run, stopped_by, resumes=spec.resumes)


def stopped_unsaved(run: RunFolder, stopped_by: str, *, resumes: bool) -> Verdict:
    """Of ranks that left on request while they loaded: they could not answer yet."""
    if not resumes:
        return stopped(f"stopped by {stopped_by}", 128 + getattr(signal, stopped_by))
    if saved := list_checkpoints(run.checkpoints):
        return stopped(f"stopped by {stopped_by} with nothing new saved; the same command goes on from {saved[0].name}")
    return stopped(f"stopped by {stopped_by} before anything could be saved; the same command starts again")


def _judge_failure(spec: WorldSpec, exits: Sequence[RankExit], failures: dict[int, Failure]) -> Verdict:
    bad = [one for one in exits if one.code != 0]
    cause = find_cause(spec.run, bad, failures)
    failure = failures.get(cause.rank)
    is_second_hand = _distance(spec.run, cause, failure) == 1
    if is_second_hand and (left := _left_before(exits, cause, failure)):
        return _judge_left_early(spec, left, bad)
    who = f"rank {cause.rank} of {spec.num_processes}"
    beat = _beat_of(spec.run, cause)  # it counts on where the event log finds no room
    step = max(last_step(spec.run, spec.log_from), failure.step if failure else 0, beat.step if beat else 0)
    after = f" after step {step}" if step else ""
    traceback: list[str] = []
    if failure is not None and not failure.traceback and failure.exit_code != 1:
        code, what = failure.exit_code, f"{failure.kind}: {failure.lines[0] if failure.lines else ''}"
        lines = list(failure.lines)
        if spec.num_processes > 1:
            lines.append(f"  (seen by {who}{after})")
    else:
        code = cause.code if cause.code in DOCUMENTED else WorkerFailed.exit_code
        how, what, traceback = _describe(spec, cause, failure)
        lines = [f"{WorkerFailed.title}: {who} {how}{after}"]
        lines += _last_seen(spec.run, cause) if failure is None else []
        lines += [f"  {_hint(spec, what)}"] if failure is None and what in _HINTS and not cause.by_us else []
        fault = _find_fault(spec.run, cause) if failure is None and code == WorkerFailed.exit_code else None
        if fault is not None:
            code, traceback = fault.exit_code, []
            lines = [*fault.lines(), f"  (seen by {who}{after}, which {how})"]
    lines += _others(bad, cause.rank)
    hint = _goes_on(spec, step) if code == WorkerFailed.exit_code else ()
    kind = KIND_OF_CODE.get(code, Kind.LOST_RANK if is_second_hand else Kind.WORKER_DIED)
    again = failure is not None and failure.kind == SMALLER
    details = (*traceback, *_where(spec, cause.rank), *hint)
    return Verdict(kind, code, tuple(lines), details, cause.rank, what, step, again)


def _hint(spec: WorldSpec, signal_name: str) -> str:
    killed = count_oom_kills() if signal_name == "SIGKILL" and spec.oom_kills is not None else None
    if killed is None or spec.oom_kills is None or killed <= spec.oom_kills:
        return _HINTS[signal_name]
    limit = read_cgroup_limit()
    room = "this machine" if limit is None else f"this container or job ({format_bytes(limit.limit_bytes)})"
    return f"the kernel killed it, for {room} was out of memory; what a run needs:   duoka plan CONFIG"


def _left_before(exits: Sequence[RankExit], cause: RankExit, failure: Failure | None) -> RankExit | None:
    """The first rank that exited with 0 early, when others then failed because it was gone: an `exit(0)` somewhere."""
    failed_at = max(cause.time, failure.time if failure else 0.0)
    left = [one for one in exits if one.code == 0 and one.time <= failed_at]
    return min(left, key=lambda one: one.time, default=None)


def _judge_left_early(spec: WorldSpec, left: RankExit, bad: list[RankExit]) -> Verdict:
    step = last_step(spec.run, spec.log_from)
    after = f" after step {step}" if step else ""
    text = f"rank {left.rank} of {spec.num_processes} {LEFT_EARLY}{after}, and the others still needed it"
    hint = "  something in its process called exit(0): a library, a hook, or code of the model or data"
    details = (*_where(spec, left.rank), *_goes_on(spec, step))
    return failed(
        Kind.LEFT_EARLY, text, hint, *_others(bad, left.rank), details=details, rank=left.rank, cause="exit code 0",
        step=step,
    )  # fmt: skip


def _find_fault(run: RunFolder, cause: RankExit) -> DuokaError | None:
    """What ended a process that could not record it: its signal or a library's last line may be all there is."""
    if cause.code == -signal.SIGBUS:
        return _lost_mapping()
    words = _last_words(run.logs / log_name(cause.rank)).splitlines()
    said = "" if cause.code in _NO_LAST_WORDS else "\n".join(words[-_LAST_LINES:])
    if says_too_many_files(said):
        return too_many_files()
    if says_no_memory(said):
        return no_memory()
    return no_process() if says_no_process(said) else None


def _lost_mapping() -> StorageError:
    """SIGBUS: the kernel has no other way to say that a page of a mapped file is not to be had."""
    return StorageError(
        "a file that was mapped into memory could not be read or written: its disk failed, is full, or was taken away",
        where="mapped are weights under parallel.offload (params: disk), model files, token stores, and /dev/shm",
        fix="see   dmesg   and   duoka doctor; with a sound disk the same command goes on from the newest checkpoint",
    )


def _last_seen(run: RunFolder, cause: RankExit) -> list[str]:
    """Where a rank was that ended without a word."""
    beat = _beat_of(run, cause)
    return [] if beat is None else [f"  it was {describe_place(beat)}"]


def _beat_of(run: RunFolder, cause: RankExit) -> Beat | None:
    beat = read_beats(run).get(cause.rank)
    return None if beat is None or beat.pid != cause.pid else beat


def _others(bad: list[RankExit], rank: int) -> list[str]:
    others = len({one.rank for one in bad} - {rank})
    return [f"  {others} other rank{'s were' if others > 1 else ' was'} stopped because of it"] if others else []


def _goes_on(spec: WorldSpec, step: int) -> tuple[str, ...]:
    goes_on = spec.resumes and step > 0 and spec.run.checkpoints.is_dir()
    return ("  the same command goes on from the newest checkpoint",) if goes_on else ()


def find_cause(run: RunFolder, bad: list[RankExit], failures: dict[int, Failure]) -> RankExit:
    """The first exit in time that is not a consequence of another one."""

    def order(one: RankExit) -> tuple[int, float]:
        failure = failures.get(one.rank)
        # A rank's own clock is exact; an exit was noticed up to a tenth of a second late.
        return _distance(run, one, failure), failure.time if failure else one.time

    return min(bad, key=order)


def has_lost_peer(run: RunFolder, end: RankExit) -> bool:
    """Whether all that a rank has to say of its end is that another one was gone."""
    failures = {one.rank: one for one in read_failures(run)}
    return _distance(run, end, failures.get(end.rank)) == 1


def own_reasons(run: RunFolder, but: Container[int]) -> list[str]:
    """What other ranks than `but` left in the run folder of an end that was no consequence: a line each."""
    own = [one for one in read_failures(run) if one.rank not in but and not _is_second_hand(one)]
    return [f"  rank {one.rank} raised {one.kind}: {one.lines[0] if one.lines else ''}" for one in own]


def _is_second_hand(failure: Failure) -> bool:
    text = "\n".join((*failure.lines, failure.traceback[-4000:])).lower()
    return any(words in text for words in SECOND_HAND)


def _distance(run: RunFolder, one: RankExit, failure: Failure | None) -> int:
    """0: a reason of its own; 1: it lost another rank; 2: it left in good order, or we ended it."""
    ended_by_us = one.by_us and failure is None and one.code in (-signal.SIGTERM, -signal.SIGKILL)
    if one.code == StoppedEarly.exit_code or ended_by_us:
        return 2
    if failure is None and one.code < 0 and one.code != -signal.SIGABRT:
        return 0
    if failure is not None:
        return int(_is_second_hand(failure))
    log = run.logs / log_name(one.rank)
    # NCCL's watchdog ends a rank that waited for another one: without a traceback, and by SIGABRT.
    text = _last_words(log) if one.code == -signal.SIGABRT else "\n".join(read_last_traceback(log))
    return 1 if any(words in text.lower() for words in SECOND_HAND) else 0


def _describe(spec: WorldSpec, cause: RankExit, failure: Failure | None) -> tuple[str, str, list[str]]:
    """What happened in words, the cause alone, and the traceback when it was not on the screen before."""
    if failure is not None:
        what = f"{failure.kind}: {failure.lines[0]}" if failure.lines and failure.lines[0] else failure.kind
        return f"raised {what}", what, [f"  {line}" for line in failure.traceback.rstrip().splitlines()]
    if cause.code < 0:
        name = signal_name(-cause.code)
        # By the launcher: it was asked first.
        was_late = cause.by_us and name == "SIGKILL"
        return "did not leave when it was asked to, and was killed" if was_late else f"was killed by {name}", name, []
    traceback = read_last_traceback(spec.run.logs / log_name(cause.rank))
    what = traceback[-1].strip() if traceback else f"exit code {cause.code}"
    # Rank 0's output went to the terminal, its traceback too.
    shown = [] if cause.rank == 0 else [f"  {line}" for line in traceback]
    return f"raised {what}" if traceback else f"ended with {what}", what, shown


def signal_name(number: int) -> str:
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


def last_step(run: RunFolder, log_from: int) -> int:
    """The last optimizer step that was recorded, or gone on from, behind byte `log_from` of the event log; or 0.

    A place and no moment: the clock may be set while a run goes on, and two machines' clocks differ.
    """
    last = 0
    for line in _tail(global_log(run), log_from).splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue  # the first line of the tail is cut, the last one may be
        if isinstance(event, dict) and event.get("type") in ("step", "resume"):
            last = int(event["step"])
    return last


def _tail(path: Path, first: int = 0) -> str:
    """The end of a file, from byte `first` on; of one that was begun anew since, from its beginning."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            file.seek(max(first if first <= size else 0, size - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _last_words(log: Path) -> str:
    """What a rank wrote since its latest start, the end of it."""
    return _tail(log).rpartition(START_MARK)[2]


def read_last_traceback(log: Path) -> list[str]:
    """The last traceback of a rank's latest start, without torch's rank prefix; empty when there is none."""
    lines = [_RANK_PREFIX.sub("", line) for line in _last_words(log).splitlines()]
    starts = [index for index, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if not starts:
        return []
    found = [lines[starts[-1]]]
    for line in lines[starts[-1] + 1 :]:
        found.append(line)
        if line and not line.startswith(" "):
            return found
    return []  # cut: its last line, the error itself, is not there
