"""Alerts: follows one run and tells a command or a webhook when it is done, failed, stands still, or its loss jumps.

A process of its own (`duoka alerts`). Who is told is tried once and for a limited time; a run that goes on meanwhile is
looked at again afterwards.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass

from duoka.runs.cache import try_lock
from duoka.runs.folder import RunFolder
from duoka.watch.follow import FollowedRun
from duoka.watch.spike import find_spike
from duoka.watch.standing import read_standing

LIMIT_S = 30.0  # for a command or a webhook
_LOOK_S = 2.0
# An end counts when it still stands after this: a launcher may be about to start the ranks again.
SETTLE_S = 5.0
_QUIET_STEPS = 200  # after a jump of the loss, none is told again within so many
_ENDS = {"done": "done", "failed": "failed", "dead": "failed", "stopped": ""}


@dataclass(frozen=True)
class Alert:
    kind: str
    run: str
    path: str
    text: str
    step: int
    loss: float | None

    def environment(self) -> dict[str, str]:
        return {"DUOKA_ALERT": self.kind, "DUOKA_RUN": self.run, "DUOKA_TEXT": self.text, "DUOKA_STEP": str(self.step)}


class Watchman:
    """Looks at one run; each thing is told once."""

    def __init__(self, run: RunFolder) -> None:
        self._followed = FollowedRun(run)
        self._followed.catch_up()
        steps = self._followed.history.steps
        self._seen = self._quiet_until = steps[-1].step if steps else 0
        self._num_left_out = len(self._followed.history.left_out)
        self._is_stalled = False
        self._ended_at: float | None = None
        self.is_over = False

    def look(self) -> list[Alert]:
        self._followed.catch_up()
        now = read_standing(self._followed)
        found: list[tuple[str, str]] = []
        jump = self._find_jump()
        found += [("spike", jump)] if jump else []
        if now.state in ("stalled", "silent") and not self._is_stalled:
            found.append(("stalled", f"no sign of life for {now.age_s:.0f} s, after step {now.step:,}"))
        self._is_stalled = now.state in ("stalled", "silent")
        if now.state not in _ENDS:
            self._ended_at = None
        elif self._ended_at is None:
            self._ended_at = time.monotonic()
        if self._ended_at is not None and time.monotonic() - self._ended_at >= SETTLE_S:
            self.is_over = True
            kind = _ENDS[now.state]
            cause = f": {now.cause[0]}" if now.cause else ""
            found += [(kind, f"{kind} after step {now.step:,}{cause}")] if kind else []
        return [Alert(kind, now.name, now.path, f"{now.name}: {text}", now.step, now.loss) for kind, text in found]

    def _find_jump(self) -> str:
        steps, left_out = self._followed.history.steps, self._followed.history.left_out
        last = steps[-1].step if steps else 0
        num_new = max(0, min(last - self._seen, 1000))
        self._seen = last  # also where it went back to a checkpoint
        # A batch whose loss or gradient is no number is left out, and no step is logged for it.
        bad = left_out[-1] if len(left_out) > self._num_left_out else None
        self._num_left_out = len(left_out)
        if max(last, bad or 0) < self._quiet_until:
            return ""
        spike = find_spike(steps, newest=num_new) if num_new else None
        if spike is not None:
            said = spike.sentence()
        elif bad is not None:
            said = f"the loss or gradient of step {bad:,} was no number"
        elif any(map(math.isnan, steps.column("loss", num_new))):
            said = f"the loss is no number any more, by step {last:,}"
        else:
            return ""
        self._quiet_until = max(last, bad or 0) + _QUIET_STEPS
        return said

    @property
    def next_look_s(self) -> float:
        return max(_LOOK_S, self._followed.next_look_s)


def follow_and_tell(
    run: RunFolder, tell: Callable[[Alert], None], kinds: tuple[str, ...], *, wait: Callable[[float], None] = time.sleep
) -> None:
    """Until the run has ended."""
    watchman = Watchman(run)
    while not watchman.is_over:
        for alert in watchman.look():
            if alert.kind in kinds:
                tell(alert)
        if not watchman.is_over:
            wait(watchman.next_look_s)


def run_command(command: str, alert: Alert, *, limit_s: float = LIMIT_S) -> str:
    """What went wrong with it, or nothing. Whatever it has started ends with it."""
    try:
        process = subprocess.Popen(
            command, shell=True, env={**os.environ, **alert.environment()}, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return f"the command could not be started: {error.strerror}"
    try:
        code = process.wait(limit_s)
        return f"the command ended with exit code {code}" if code else ""
    except subprocess.TimeoutExpired:
        return f"the command took longer than {limit_s:g} s and was ended"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def post(address: str, alert: Alert, *, limit_s: float = LIMIT_S) -> str:
    """What went wrong with it, or nothing. In a thread: a server that sends a byte now and then has no timeout."""
    said = [f"the webhook did not answer within {limit_s:g} s"]

    def work() -> None:
        body = json.dumps(asdict(alert), ensure_ascii=False).encode()
        head: Mapping[str, str] = {"Content-Type": "application/json"}
        try:
            with urllib.request.urlopen(urllib.request.Request(address, body, dict(head)), timeout=limit_s):
                said[0] = ""
        except (OSError, ValueError, http.client.HTTPException) as error:
            said[0] = _reason(error, limit_s)

    thread = threading.Thread(target=work, name="duoka-webhook", daemon=True)
    thread.start()
    thread.join(limit_s)
    return said[0]


def _reason(error: Exception, limit_s: float) -> str:
    late = isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError)
    if late:
        return f"the webhook did not answer within {limit_s:g} s"
    if isinstance(error, (ValueError, http.client.InvalidURL)):  # its words have the address, which may be a secret
        return "the webhook failed: what is named is no http or https address"
    if isinstance(error, http.client.HTTPException):
        return f"the webhook failed: what it answered is no HTTP ({type(error).__name__})"
    return f"the webhook failed: {error}"


@contextlib.contextmanager
def only_one(run: RunFolder) -> Iterator[bool]:
    """False where another process tells of this run already."""
    run.logs.mkdir(parents=True, exist_ok=True)
    with (run.logs / "alerts.lock").open("w") as file:
        yield try_lock(file.fileno())
