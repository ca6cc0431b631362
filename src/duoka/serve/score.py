"""Scores of answers by a reward model, a JSON line for each: `duoka score RUN DATA`, in each process of its world.

Each answer is computed alone and by transformers' own forward pass. So a score depends on nothing but its answer: not
on the others, nor on how many processes there are; and it is what others read from the saved model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duoka.config.schema import DataSource, ModelConfig, RunConfig, StageConfig
from duoka.errors import ConfigError, DataError
from duoka.runs.folder import write_text_atomic
from duoka.serve.load_run import Say, Trained, agree_on_checkpoint, choose_dtype, data_for, load_trained

if TYPE_CHECKING:
    from duoka.comm.world import World
    from duoka.data.prepare import PreparedData

SIDES = ("chosen", "rejected")
_HAVE_ANSWERS = ("conversation", "preference", "labeled")


@dataclass(frozen=True)
class Scored:
    """What was written; of pairs, in how many the better answer scores higher."""

    path: Path
    num_answers: int
    num_dropped: int  # wrong records that the run skips, and those without an answer that is left
    world_size: int
    num_ahead: int | None = None

    def lines(self) -> list[str]:
        how = "1 process" if self.world_size == 1 else f"{self.world_size} processes"
        out = [f"{self.num_answers:,} answers, by {how}: {self.path}"]
        if self.num_ahead is not None:
            pairs = self.num_answers // 2
            out.append(
                f"the better answer is ahead in {self.num_ahead:,} of {pairs:,} pairs ({self.num_ahead / pairs:.1%})"
            )
        if self.num_dropped:
            out.append(f"note: {self.num_dropped:,} records were wrong or had no answer left, and have no number")
        return out


def read_answers(trained: Trained, name: str, *, max_length: int | None, say: Say) -> PreparedData:
    """The data set's answers, each with its prompt, by the run's template; a pair has two."""
    from duoka.data.prepare import prepare_data
    from duoka.data.read.example import KIND_WORDS
    from duoka.data.read.registry import find_sets

    known = trained.config
    model = ModelConfig(name=trained.name, template=trained.template, trust_remote_code=trained.trust_remote_code)
    config = known or RunConfig(model=model, data=data_for(trained, (DataSource(name=name),)))
    changed: dict[str, Any] = {"train": (DataSource(name=name),), "eval": 0.0, "targets": "last", "on_long": "truncate"}
    changed |= {} if max_length is None else {"max_length": max_length}
    data = config.data.model_copy(update=changed)
    config = config.model_copy(update={"data": data, "stage": StageConfig(name="reward")})
    for found in find_sets(config, trained.config_base):
        if found.form.kind not in _HAVE_ANSWERS:
            raise ConfigError(
                f"{name!r} holds {KIND_WORDS[found.form.kind]}, and a score is of an answer", where=str(found.files[0]),
                fix="name a set of conversations, of preference pairs or of labeled answers",
            )  # fmt: skip
    return prepare_data(config, trained.config_base, trained.base, say=say)


def score(trained: Trained, prepared: PreparedData, target: Path, *, precision: str = "auto") -> Scored | None:
    """Write `target` together with the other processes; the summary on rank 0, None on others."""
    from duoka.comm.world import end_world, start_world
    from duoka.config.schema import ParallelConfig
    from duoka.data.feed.pairs import PairRows

    world = start_world(ParallelConfig())
    try:
        trained = agree_on_checkpoint(world, trained)
        own = list(_score_own(world, trained, prepared, precision))
        found = sorted((row for rows in world.gather(own) for row in rows), key=lambda row: (row[0], row[1]))
    finally:
        end_world(world)
    if not world.is_main:
        return None
    paired = isinstance(prepared.train, PairRows)
    lines = [
        json.dumps({"sample": sample, **({"answer": SIDES[side]} if paired else {}), "tokens": tokens, "score": value})
        for sample, side, tokens, value in found
    ]
    write_text_atomic(target, "\n".join(lines) + "\n")
    counts = [one.counts for one in prepared.report.sets]
    dropped = sum(one.num_dropped_masked + one.num_dropped_long + one.num_bad for one in counts)
    values = [value for *_, value in found]
    ahead = sum(one > other for one, other in zip(values[::2], values[1::2], strict=True)) if paired else None
    return Scored(target, len(found), dropped, world.size, ahead)


def _score_own(
    world: World, trained: Trained, prepared: PreparedData, precision: str
) -> Iterator[tuple[int, int, int, float]]:
    """(sample, which of its answers, tokens, score) of this rank's samples."""
    import torch

    lm: Any = load_trained(trained, dtype=choose_dtype(precision), scores=True).to(world.device)
    core = lm.get_base_model() if hasattr(lm, "get_base_model") else lm
    facts = core.config.get_text_config()
    # A whole model says itself what it reads a score before.
    if trained.adapter or trained.checkpoint or facts.pad_token_id is None:
        facts.pad_token_id = prepared.pad_id
    for sample in range(world.rank, prepared.num_shown, world.size):
        for side, segment in enumerate(prepared.shown(sample)):
            ids = torch.from_numpy(segment.input_ids.astype("int64"))[None].to(world.device)
            with torch.no_grad():
                value = float(lm(input_ids=ids, use_cache=False).logits[0, 0])
            if value != value:
                raise DataError(f"the score of sample {sample} is no number", fix="look at it: duoka data inspect")
            yield sample, side, ids.shape[1], value
