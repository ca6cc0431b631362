"""What a run of stage rl does between steps: keep what later updates need, and say why nothing is learned, if so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from duoka.train.moments import Concern, StepEnd
from duoka.train.record import Recorder
from duoka.train.rl.feed import RolloutFeed

WINDOW = 20  # steps
_SILENT = 0.8  # of the prompts
_AGAIN_AFTER = 100


class RolloutWatch(Concern):
    """`keep`: what the stage keeps of a step for later ones."""

    def __init__(self, feed: RolloutFeed, record: Recorder, keep: Callable[[], None]) -> None:
        self._feed, self._record, self._keep = feed, record, keep
        self._recent: deque[dict[str, float]] = deque(maxlen=WINDOW)
        self._said_at = -_AGAIN_AFTER
        self._told = 0  # of answers whose rewards failed

    def after_step(self, end: StepEnd) -> None:
        self._keep()
        facts = self._feed.facts
        if not facts:
            return
        self._recent.append(facts)
        self._tell_faults(end.step)
        if "groups_equal" in facts and len(self._recent) == WINDOW and end.step - self._said_at >= _AGAIN_AFTER:
            said = why_silent(list(self._recent))
            if said:
                self._said_at = end.step
                self._warn(end.step, said)

    def _tell_faults(self, step: int) -> None:
        count = self._feed.num_failed - self._told
        if count:
            most, _ = self._feed.faults.most_common(1)[0]
            self._warn(step, f"{count} answers of this step have no reward, as {most}")
        self._told = self._feed.num_failed

    def _warn(self, step: int, text: str) -> None:
        self._record.event("warning", step=step, text=text)
        self._record.say(f"note: {text}")


def why_silent(recent: list[dict[str, float]]) -> str:
    """In plain words, why so little is learned from these steps; "" where enough is."""
    share = sum(one["groups_equal"] for one in recent) / len(recent)
    if share < _SILENT:
        return ""
    unrewarded = sum(one["unrewarded"] for one in recent) / len(recent)
    if unrewarded > _SILENT:
        return (
            f"in the last {len(recent)} steps {unrewarded:.0%} of the answers got no reward, and nothing is learned "
            "from these: look at what rl.rewards give (None is no reward)"
        )
    reward = sum(one["reward"] for one in recent) / len(recent)
    truncated = sum(one["truncated"] for one in recent) / len(recent)
    what = (
        f"in the last {len(recent)} steps {share:.0%} of the prompts got answers that all have one reward (mean "
        f"{reward:.3g}), and nothing is learned from these"
    )
    if truncated > 0.5:
        return f"{what}; {truncated:.0%} of the answers are cut: write a larger rl.max_new_tokens"
    advice = (
        "easier prompts, more rl.samples, or more of stage sft before; if nearly all are right, the task is learned"
    )
    return f"{what}: {advice}"
