"""Answers that a model drew, with rewards, as data: a file for each step beside the run, written before it learns.

    RUN/rollouts/step-00000012.jsonl   a line about the step, then a line per answer, by prompts and samples in order

A file is written when all answers are drawn, again when they are scored, and where answers are learned several times,
again with the log-probabilities that these begin with. Each time it is whole: half a file has another name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from duoka.errors import DataError
from duoka.runs.folder import json_lines, write_text_atomic

FOLDER = "rollouts"
VERSION = 1


@dataclass(frozen=True)
class Rollout:
    """One answer. `ids` end with the stop token where `ended`; lists of numbers have one for each that was drawn."""

    prompt: int  # its place among the prompts
    sample: int
    question: str  # the prompt's name
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    ended: bool  # by a stop token; else it was cut
    text: str  # with tools: what was said after the last of their answers
    drawn: tuple[float, ...]  # log-probabilities where it was drawn
    rewards: tuple[float | None, ...] | None = None  # of each function; None: not scored yet
    reward: float | None = None  # their sum; None: it has none
    faults: tuple[str, ...] = ()
    old: tuple[float, ...] | None = None  # log-probabilities as training computes them, before the first update
    start: tuple[float, ...] | None = None  # and where the run began
    values: tuple[float, ...] | None = None  # of the value head before the first update: what is still to come
    own: tuple[bool, ...] | None = None  # which of `ids` the model drew, and tools did not answer; None: all
    calls: tuple[dict[str, Any], ...] | None = None  # of tools: name, arguments, answer; None: there are none

    version: str | None = None  # of the weights of an engine that drew it

    @property
    def num_own(self) -> int:
        return len(self.ids) if self.own is None else sum(self.own)


@dataclass(frozen=True)
class RolloutStep:
    """All answers of one step, by prompts in their order, `samples` to each."""

    number: int
    fingerprint: str  # of weights, prompts and settings that they were drawn with
    rollouts: tuple[Rollout, ...]
    scored_by: str = ""  # digest of the functions and models that rewarded them

    @property
    def is_scored(self) -> bool:
        return all(one.rewards is not None for one in self.rollouts)

    def with_old(self, logps: Mapping[int, Sequence[float]]) -> RolloutStep:
        """`logps` by place among the rollouts; what was not learned has none."""
        found = [
            replace(one, old=tuple(logps[place]) if place in logps else None) for place, one in enumerate(self.rollouts)
        ]
        return replace(self, rollouts=tuple(found))


def rollout_file(folder: Path, number: int) -> Path:
    return folder / f"step-{number:08d}.jsonl"


def write_rollouts(folder: Path, step: RolloutStep) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    head = {
        "version": VERSION, "step": step.number, "fingerprint": step.fingerprint, "scored_by": step.scored_by,
        "answers": len(step.rollouts),
    }  # fmt: skip
    lines = [head, *(_told(one) for one in step.rollouts)]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    write_text_atomic(rollout_file(folder, step.number), text)


def _told(rollout: Rollout) -> dict[str, Any]:
    return {name: value for name, value in asdict(rollout).items() if value is not None or name == "reward"}


def read_rollouts(folder: Path, number: int) -> RolloutStep | None:
    """None where no file is there, or one of another version. Raises DataError for a file that is damaged."""
    path = rollout_file(folder, number)
    if not path.is_file():
        return None
    try:
        head, *lines = json_lines(path.read_text(encoding="utf-8"))
        if head["version"] != VERSION:
            return None
        if head["answers"] != len(lines):
            raise ValueError(f"{len(lines)} of {head['answers']} answers are there")
        return RolloutStep(number, head["fingerprint"], tuple(map(_read, lines)), head.get("scored_by", ""))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} holds no recorded answers: {error}", fix="delete it: they are drawn again") from None


def _read(line: dict[str, Any]) -> Rollout:
    found: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in line.items()}
    return Rollout(**found)
