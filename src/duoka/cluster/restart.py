"""Start a world again after a crash, as often as asked: a fresh world each time, never a mended one.

Called by `duoka train` and `duoka launch`. A new world has a new rendezvous, new ports and new processes, so nothing
that a dead one left can be read by the next; training goes on from the newest valid checkpoint by itself. A failure
that repeats at the same step is no accident, and ends the run.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from dataclasses import replace

from duoka.cluster.blame import Verdict
from duoka.cluster.launch import WorldSpec
from duoka.cluster.supervise import Request, listen_to_signals, run_once
from duoka.errors import StoppedEarly, WorkerFailed
from duoka.runs.events import EventWriter, global_log
from duoka.runs.folder import RunFolder
from duoka.runs.status import update_status
from duoka.units import format_seconds

MOST_HALVES = 12  # of a micro-batch: from 16k tokens to 4
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0


def run_with_restarts(spec: WorldSpec, most: int, say: Callable[[str], None]) -> Verdict:
    """See the world to its end, in at most `most` more worlds when a process dies or hangs."""
    request = Request()
    wait_s, before = FIRST_WAIT_S, ("", -1)
    with listen_to_signals(request):
        for count in range(most + 1):
            verdict = _run_until_it_fits(spec, request, say)
            if verdict.exit_code != WorkerFailed.exit_code or request.stop_by:
                return verdict
            now = (failure_kind(verdict), verdict.step)
            if now == before:
                return _with_lines(verdict, f"the same failure at the same step twice{_after(count, most)}")
            if count == most:
                return _with_lines(verdict, f"all {most} restarts are used up") if most else verdict
            if verdict.step > before[1] >= 0:
                wait_s = FIRST_WAIT_S  # the last world got further: no reason to wait longer than at first
            before = now
            text = f"restart {count + 1} of {most} in {format_seconds(wait_s)}"
            say("\n".join((*verdict.lines, f"  {text}")))
            note_in_log(spec.run, f"{verdict.lines[0] if verdict.lines else 'the world ended'}; {text}", verdict.step)
            if not _sleep(wait_s, request):
                text = f"stopped by {request.stop_by} between two worlds; the same command goes on"
                return _stopped(spec, text, request)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            spec = replace(spec, started=time.time(), num_restarts=spec.num_restarts + 1)
    raise AssertionError("every way through the loop returns")


def _run_until_it_fits(spec: WorldSpec, request: Request, say: Callable[[str], None]) -> Verdict:
    """A world whose memory was short begins again with half at once, as often as there is a half: not a failure."""
    for left in reversed(range(MOST_HALVES)):
        verdict = run_once(spec, request)
        if not verdict.again or request.stop_by or not left:
            break
        say("\n".join(verdict.lines))
        note_in_log(spec.run, verdict.lines[0], verdict.step)
        spec = replace(spec, started=time.time(), num_restarts=spec.num_restarts + 1)
    return verdict


def failure_kind(verdict: Verdict) -> str:
    """What happened, without who and when: the same fault may hit another rank the next time."""
    return re.sub(r"ranks? \d+( of \d+)?|[0-9.]+", "#", verdict.lines[0]) if verdict.lines else ""


def _after(count: int, most: int) -> str:
    left = most - count
    return f": not started again ({left} of {most} restarts left)" if left else ""


def _with_lines(verdict: Verdict, text: str) -> Verdict:
    return replace(verdict, lines=(*verdict.lines, f"  {text}"))


def _sleep(seconds: float, request: Request) -> bool:
    """Wait; False when a signal asked to stop meanwhile."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not request.stop_by:
        time.sleep(0.05)
    return not request.stop_by


def note_in_log(run: RunFolder, text: str, step: int) -> None:
    """In the event log, where the report and the run's other readers see it; nobody else writes there now."""
    with contextlib.suppress(OSError):
        log = EventWriter(global_log(run))
        log.write("warning", step=step, text=text)
        log.close()


def _stopped(spec: WorldSpec, text: str, request: Request) -> Verdict:
    code = 130 if request.leave_now else StoppedEarly.exit_code
    with contextlib.suppress(OSError):
        update_status(spec.run, state="stopped", exit_code=code, cause=text)
    return Verdict(code, (text,), (), True)
