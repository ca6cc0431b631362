"""What happens to a batch whose loss or gradient is NaN or Inf, or that teaches nothing: every rank decides the same,
from the global numbers.

The loop asks before the optimizer has changed anything. The batch's samples are written to nonfinite.jsonl in the run
folder, whatever the policy is.
"""

from __future__ import annotations

import json
import math
from typing import Literal

from duoka.data.feed.loader import GlobalBatch, Place
from duoka.errors import WorkerFailed
from duoka.store.contents import Contents
from duoka.store.resume import choose_checkpoint
from duoka.store.saving import Saver
from duoka.train.record import Recorder
from duoka.train.step import StepResult

MOST_IN_A_ROW = 10


class NonFinite:
    """One run's bad batches: all ranks call it together, with the same numbers."""

    def __init__(self, policy: Literal["stop", "skip", "rollback"], saver: Saver, record: Recorder) -> None:
        self.policy = policy
        self.saver = saver
        self.record = record
        self._tried_again: set[Place] = set()
        self._last_step, self._in_a_row = -1, 0

    def goes_back(self, batch: GlobalBatch, contents: Contents, loss: float, norm: float) -> bool:
        """True when the state is now that of an earlier checkpoint; False when the batch is left out.

        Raises when the run should end. The optimizer has not seen the batch, so the weights are as before it.
        """
        step = contents.state.step + 1
        self._in_a_row = self._in_a_row + 1 if step == self._last_step + 1 else 1
        self._last_step = step
        place = batch.after
        # A fault of the machine doesn't come twice, and what it did to the weights before is undone by going back;
        # a fault of the batch does.
        found = None
        if self.policy == "rollback" and place not in self._tried_again:
            self.saver.settle()
            run, world = self.record.run, self.record.world
            found = choose_checkpoint(run, "auto", run.path, world, self.record.say)
        ends = self.policy == "stop" or (found is None and self._in_a_row >= MOST_IN_A_ROW)
        did = "stop" if ends else "rollback" if found else "skip"
        self._write(batch, step, loss, norm, did)
        if ends:
            raise self._end(batch, step, loss, norm)
        what = "the loss" if not math.isfinite(loss) else "the gradient"
        if found is None:
            text = f"step {step}: {what} is not finite; its {batch.num_samples} samples were left out (nonfinite.jsonl)"
            self.record.event("warning", step=step, text=text, loss=loss, grad_norm=norm)
            self.record.say(text)
            return False
        self._tried_again.add(place)
        self.saver.store.load(found, contents)
        text = f"step {step}: {what} is not finite; back to {found.name}, the batch is tried once more"
        self.record.event("resume", step=contents.state.step, reason=text)
        self.record.event("warning", step=step, text=text, loss=loss, grad_norm=norm)
        self.record.say(text)
        return True

    def leave_out(self, batch: GlobalBatch, step: int, why: str, flags: list[float]) -> StepResult:
        """A batch in which no rank has anything to learn: nothing is computed; `flags` are summed as at any step."""
        text = f"step {step}: {why}"
        self.record.event("warning", step=step, text=text)
        self.record.say(text)
        return StepResult(metrics=batch.facts, flag_counts=self.record.world.sum(flags))

    def _end(self, batch: GlobalBatch, step: int, loss: float, norm: float) -> WorkerFailed:
        what = "loss" if not math.isfinite(loss) else "gradient"
        many = f", and those of {self._in_a_row - 1} steps before it" if self._in_a_row > 1 else ""
        fixes = ["lower optim.lr, raise optim.warmup, or look at these samples; the weights were not changed"]
        if self.policy == "stop":
            fixes.append("to leave such batches out:   faults: {nonfinite: skip}")
        more = len(batch.sample_ids) - 16
        samples = f"{batch.sample_ids[:16].tolist()}" + (f" and {more} more" if more > 0 else "")
        return WorkerFailed(
            f"the {what} of step {step} is not finite{many} (loss {loss:.6g}, gradient norm {norm:.6g})",
            where=f"samples of the batch: {samples}, all in {self.record.run.path / 'nonfinite.jsonl'}",
            fix="\n".join(fixes),
        )

    def _write(self, batch: GlobalBatch, step: int, loss: float, norm: float, did: str) -> None:
        if not self.record.world.is_main:
            return
        line = {
            "step": step, "epoch": batch.epoch, "batch": batch.index, "loss": str(loss), "grad_norm": str(norm),
            "did": did, "samples": batch.sample_ids.tolist(),
        }  # fmt: skip
        try:
            with (self.record.run.path / "nonfinite.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            self.record.say(f"warning: nonfinite.jsonl cannot be written: {error.strerror or error}")
