"""Fault-injection trials: the same short training under each fault must end in the weights of an undisturbed run.

`duoka chaos` runs them in a scratch folder beside the run's own; nothing that exists is touched. The reference run
comes first; each trial then is one row of TRIALS. Faults from outside are fault_injection.py's, those from inside are
ordered by an environment variable that only the trial's own processes see.
"""

from __future__ import annotations

import hashlib
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from duoka.cluster.fault_injection import living_ranks, strike, wait_for_ranks
from duoka.errors import ConfigError
from duoka.process.environ import INJECT
from duoka.process.interpreter import python_module
from duoka.process.lifeline import die_with_parent
from duoka.registry import nearest
from duoka.runs.events import read_steps
from duoka.runs.folder import RunFolder
from duoka.runs.heart import Beat

NUM_STEPS, SAVE_EVERY = 12, 3
STRUCK_AT = 7  # the step of the fault; two checkpoints are written before it
WITHIN_S = 1800.0


class Lost(Exception):
    """The run did not survive: what was expected, and what happened."""


@dataclass
class TrialRun:
    """One trial's run: the config, where it works, and the process that a user would have started."""

    config: str
    overrides: tuple[str, ...]
    num_processes: int
    run: RunFolder
    log: Path
    seen: list[str] = field(default_factory=list)  # exit codes, in words
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    hang_after_s: float = 5.0  # several steps of this config here
    _process: subprocess.Popen[bytes] | None = None

    def start(self, *flags: str, env: Mapping[str, str] | None = None, most_bytes: int = 0) -> None:
        """The command, as a user types it; with `most_bytes`, no file may grow larger (a full disk, for one run)."""

        parent = os.getpid()

        def prepare() -> None:
            die_with_parent(parent)  # even if this process is killed, no training is left running
            if not most_bytes:
                return
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))

        words = [self.config, *self.overrides, f"output={self.run.path}", "--nproc", str(self.num_processes), *flags]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*python_module("duoka", "train"), *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={**os.environ, **(env or {})}, preexec_fn=prepare,
            )  # fmt: skip

    def wait_for_step(self, step: int = STRUCK_AT) -> list[Beat]:
        """All ranks, in order, once they have finished `step`, and a little later."""
        deadline = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                ranks = wait_for_ranks(self.run, self.num_processes, lambda beat: beat.step >= step, within_s=1.0)
            except TimeoutError:
                continue
            time.sleep(self.dice.random() * 0.05)
            return [ranks[rank] for rank in sorted(ranks)]
        raise Lost(f"it never reached step {step}; see {self.log}")

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def expect(self, code: int) -> None:
        """Wait for the command's end with this exit code."""
        try:
            ended = self.process.wait(WITHIN_S)
        except subprocess.TimeoutExpired:
            self.end()
            raise Lost(f"it did not end within {WITHIN_S:g} s") from None
        self.seen.append(signal.Signals(-ended).name if ended < 0 else f"exit {ended}")
        if ended != code:
            raise Lost(f"expected exit code {code}, got {self.seen[-1]}; see {self.log}")

    def expect_said(self, *words: str) -> None:
        text = self.log.read_text(encoding="utf-8", errors="replace")
        for part in words:
            if part not in text:
                raise Lost(f"its output lacks {part!r}; see {self.log}")

    def go_on(self) -> None:
        """The same command once more, to the end."""
        self.start()
        self.expect(0)

    def checkpoints(self) -> list[Path]:
        """Oldest first."""
        return sorted(path for path in self.run.checkpoints.glob("step-*") if path.is_dir())

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()  # its ranks have a parent-death signal
            self._process.wait()


def kill_rank(stage: TrialRun) -> None:
    stage.start("--restarts", "1")
    strike(stage.wait_for_step()[-1:], "SIGKILL")
    stage.expect(0)
    stage.expect_said("was killed by SIGKILL", "restart 1 of 1")


def kill_all(stage: TrialRun) -> None:
    stage.start("--restarts", "1")
    strike(stage.wait_for_step(), "SIGKILL")
    stage.expect(0)
    stage.expect_said("restart 1 of 1")


def kill_launcher(stage: TrialRun) -> None:
    stage.start()
    stage.wait_for_step()
    stage.process.kill()
    stage.expect(-signal.SIGKILL)
    deadline = time.monotonic() + 30
    while living_ranks(stage.run):
        if time.monotonic() > deadline:
            raise Lost(f"ranks outlive their launcher: {[beat.pid for beat in living_ranks(stage.run).values()]}")
        time.sleep(0.1)
    stage.go_on()


def ask_to_stop(stage: TrialRun) -> None:
    stage.start()
    stage.wait_for_step()
    stage.process.terminate()
    stage.expect(75)
    stage.go_on()


def stop_rank(stage: TrialRun) -> None:
    stage.start("--restarts", "1", f"faults.hang_after={stage.hang_after_s:g}")
    strike(stage.wait_for_step()[:1], "SIGSTOP")
    stage.expect(0)
    stage.expect_said("is stopped (SIGSTOP", "stacks of")


def wait_for_ever(stage: TrialRun) -> None:
    order = f"hang step={STRUCK_AT} rank={stage.num_processes - 1}"
    stage.start("--restarts", "1", f"faults.hang_after={stage.hang_after_s:g}", env={INJECT: order})
    stage.expect(0)
    stage.expect_said("the run hangs after step", "stacks of")


def become_nan(stage: TrialRun) -> None:
    order = f"nan step={STRUCK_AT} rank={stage.num_processes - 1}"
    stage.start("faults.nonfinite=rollback", env={INJECT: order})
    stage.expect(0)
    stage.expect_said("is not finite; back to step-")


def flip_byte(stage: TrialRun) -> None:
    _damage(stage, _flip)


def cut_file(stage: TrialRun) -> None:
    _damage(stage, lambda path: os.truncate(path, path.stat().st_size // 2))


def lose_file(stage: TrialRun) -> None:
    _damage(stage, Path.unlink)


def _damage(stage: TrialRun, harm: Callable[[Path], None]) -> None:
    stage.start()
    stage.wait_for_step()
    stage.process.terminate()
    stage.expect(75)
    newest = stage.checkpoints()[-1]
    harm(max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size))
    stage.go_on()
    stage.expect_said(newest.name, "damaged")


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0x10]))


def fill_disk(stage: TrialRun) -> None:
    reference = stage.run.path.parent / "reference" / "checkpoints"
    largest = max(path.stat().st_size for path in reference.glob("step-*/*.safetensors"))
    stage.start(most_bytes=largest - 1)
    stage.expect(6)
    stage.go_on()


@dataclass(frozen=True)
class Trial:
    name: str
    what: str
    strike: Callable[[TrialRun], None]


TRIALS = (
    Trial("kill-rank", "SIGKILL to a rank; restarted", kill_rank),
    Trial("kill-all", "SIGKILL to all ranks at once; restarted", kill_all),
    Trial("kill-launcher", "SIGKILL to the launcher; the same command again", kill_launcher),
    Trial("terminate", "SIGTERM; the same command again", ask_to_stop),
    Trial("stop-rank", "SIGSTOP to a rank; found and restarted", stop_rank),
    Trial("hang", "a rank hangs; found and restarted", wait_for_ever),
    Trial("nan", "a loss becomes NaN; rolled back to a checkpoint and retried", become_nan),
    Trial("flip", "one bit of the newest checkpoint flips; the previous one used", flip_byte),
    Trial("cut", "a file of the newest checkpoint is truncated; the previous one used", cut_file),
    Trial("lose", "a file of the newest checkpoint is missing; the previous one used", lose_file),
    Trial("full", "a checkpoint cannot be written; the same command again", fill_disk),
)


@dataclass(frozen=True)
class Outcome:
    trial: Trial
    seconds: float
    seen: str
    lost: str = ""  # why it did not survive; empty: it did


def choose_trials(names: str) -> tuple[Trial, ...]:
    """`kill-rank,flip`; empty: all."""
    known = {trial.name: trial for trial in TRIALS}
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            guess = nearest(name, known)
            raise ConfigError(
                f"there is no trial {name!r}" + (f"; did you mean {guess}?" if guess else ""), fix=", ".join(known)
            )
    return tuple(known[name] for name in wanted) if wanted else TRIALS


def run_reference(stage: TrialRun) -> str:
    """The run without a fault; returns the digest of its weights."""
    stage.start()
    try:
        stage.expect(0)
    finally:
        stage.end()
    num_steps = len(read_steps(stage.run))
    if num_steps < NUM_STEPS:
        raise Lost(f"it ended after {num_steps} of {NUM_STEPS} steps; see {stage.log}")
    return digest(stage.run.final)


def patience_for(run: RunFolder) -> float:
    """The silence that is a hang in this run: well above its longest step, and no longer than a trial should wait."""
    return max(5.0, 4 * max(float(event["step_s"]) for event in read_steps(run)[1:]))


def run_trial(trial: Trial, stage: TrialRun, reference: str, *, same_bits: bool) -> Outcome:
    """Inject the fault, wait for the end, compare the weights (where the device is deterministic bit for bit)."""
    started, lost = time.monotonic(), ""
    try:
        trial.strike(stage)
        if same_bits and digest(stage.run.final) != reference:
            lost = "its final weights differ from the undisturbed run's"
    except Lost as error:
        lost = str(error)
    finally:
        stage.end()
    return Outcome(trial, time.monotonic() - started, ", ".join(stage.seen), lost)


def digest(final: Path) -> str:
    """Of all weights in a result."""
    total = hashlib.blake2b(digest_size=16)
    for path in sorted(final.glob("*.safetensors")):
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                total.update(block)
    return total.hexdigest()


def clear(stage: TrialRun) -> None:
    """Remove what a trial wrote; its log stays."""
    shutil.rmtree(stage.run.path, ignore_errors=True)
