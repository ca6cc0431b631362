"""The launcher of one machine: a world of processes, and another one after a crash, as often as asked.

No world is repaired: each has a new rendezvous, new ports and new processes, so that nothing a dead one left can be
read by the next; training resumes from the newest valid checkpoint. A failure that repeats at the same step is
deterministic, and ends the run.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace

from duoka.cluster.launch import WorldSpec, check_port
from duoka.cluster.launcher import Say, Spec
from duoka.cluster.supervise import Request, listen_to_signals, run_once
from duoka.cluster.verdict import INTERRUPTED, Verdict, stopped
from duoka.errors import StoppedEarly
from duoka.runs.events import EventWriter, global_log
from duoka.runs.folder import RunFolder
from duoka.runs.status import update_status
from duoka.units import format_seconds

MOST_HALVES = 12  # of a micro-batch: from 16k tokens to 4
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0


@dataclass(frozen=True)
class LocalLauncher:
    """All ranks on this machine."""

    port: int = 0  # 0: a free one
    num_processes: int | None = None
    notes: tuple[str, ...] = ()
    num_machines: int = 1
    prepares: bool = True

    def check(self) -> None:
        if self.port:
            check_port(self.port)

    def start(self, spec: Spec, say: Say) -> Verdict:
        """Run to the end, with at most `spec.restarts` more worlds when a process dies or hangs."""
        world = WorldSpec(**vars(spec), port=self.port)
        request, wait_s, before = Request(), FIRST_WAIT_S, None
        with listen_to_signals(request, spec.forks):
            for count in range(spec.restarts + 1):
                verdict = _run_until_it_fits(world, request, say)
                if not verdict.may_go_better or request.stop_by:
                    return verdict
                if verdict.is_same_failure(before):
                    return with_line(verdict, f"the same failure at the same step twice{_after(count, spec.restarts)}")
                if count == spec.restarts:
                    return with_line(verdict, f"all {count} restarts are used up") if count else verdict
                if before is not None and verdict.step > before.step:
                    wait_s = FIRST_WAIT_S  # the last world got further: no reason to wait longer than at first
                before = verdict
                text = f"restart {count + 1} of {spec.restarts} in {format_seconds(wait_s)}"
                say("\n".join((*verdict.lines, f"  {text}")))
                what = verdict.lines[0] if verdict.lines else "the world ended"
                note_in_log(spec.run, f"{what}; {text}", verdict.step)
                if not _sleep(wait_s, request):
                    text = f"stopped by {request.stop_by} between two worlds; the same command goes on"
                    return _stopped(spec, text, request)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
                world = _next_world(world)
        raise AssertionError("every way through the loop returns")


def _run_until_it_fits(world: WorldSpec, request: Request, say: Say) -> Verdict:
    """After an OOM, start again with half the micro-batch until none is left to halve; does not count as a restart."""
    for left in reversed(range(MOST_HALVES)):
        verdict = run_once(world, request)
        if not verdict.again or request.stop_by or not left:
            break
        say("\n".join(verdict.lines))
        note_in_log(world.run, verdict.lines[0], verdict.step)
        world = _next_world(world)
    return verdict


def _next_world(world: WorldSpec) -> WorldSpec:
    return replace(world, num_restarts=world.num_restarts + 1)


def _after(count: int, most: int) -> str:
    left = most - count
    return f": not started again ({left} of {most} restarts left)" if left else ""


def with_line(verdict: Verdict, text: str) -> Verdict:
    return replace(verdict, lines=(*verdict.lines, f"  {text}"))


def _sleep(seconds: float, request: Request) -> bool:
    """Wait; False when a signal asked to stop meanwhile."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not request.stop_by:
        time.sleep(0.05)
    return not request.stop_by


def note_in_log(run: RunFolder, text: str, step: int) -> None:
    """Into the event log, which the report reads; the ranks, its only other writers, have ended."""
    with contextlib.suppress(OSError):
        log = EventWriter(global_log(run))
        log.write("warning", step=step, text=text)
        log.close()


def _stopped(spec: Spec, text: str, request: Request) -> Verdict:
    code = INTERRUPTED if request.leave_now else StoppedEarly.exit_code
    with contextlib.suppress(OSError):
        update_status(spec.run, state="stopped", exit_code=code, cause=text)
    return stopped(text, code)
