"""What the model makes of a few beginnings of text, after each evaluation: by the likeliest tokens, a fixed number.

Where no rank has the whole model, all compute every token together; otherwise rank 0 does it alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from duoka.comm.world import World
from duoka.config.schema import LogConfig, RunConfig
from duoka.data.prepare import PreparedData
from duoka.data.tokens.tokenizer import ChatTokenizer
from duoka.model.build import LossModel
from duoka.parallel.engine import Engine
from duoka.parallel.pipeline_through import Through
from duoka.parallel.precision import compute_in
from duoka.plan.layout import Layout
from duoka.train.moments import Concern, StepEnd
from duoka.train.record import Recorder

NUM_NEW = 24
_BEGINNING = 12  # tokens of the evaluation data


class Sampler(Concern):
    """`log.samples`: after each evaluation, on rank 0's screen and in every sink. Without prompts it does nothing."""

    def __init__(self, engine: Engine, layout: Layout, record: Recorder, prompts: Prompts | None) -> None:
        self._engine, self._layout, self._record, self._prompts = engine, layout, record, prompts

    def after_step(self, end: StepEnd) -> None:
        if self._prompts is not None and end.is_evaluated:
            self._record.sampled(end.step, self._sample(self._prompts))

    def _sample(self, prompts: Prompts) -> list[tuple[str, str]]:
        """(beginning, what follows) on ranks that compute it."""
        world, text = self._engine.world, prompts.text
        if not (self._layout.is_sharded or self._layout.axes or world.is_main):
            return []
        with self._engine.evaluate() as model:
            assert isinstance(model, LossModel | Through)
            found = [_continue(model, prompt, self._layout.precision, world) for prompt in prompts.ids]
        return [(text(prompt), text(new)) for prompt, new in zip(prompts.ids, found, strict=True)]


@dataclass(frozen=True)
class Prompts:
    """The beginnings, as tokens."""

    ids: list[list[int]]
    tokenizer: ChatTokenizer

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(text_tokens(ids, self.tokenizer))


def read_prompts(
    prepared: PreparedData, config: RunConfig, read_tokenizer: Callable[[], ChatTokenizer]
) -> Prompts | None:
    """None where nothing is asked for."""
    if not config.log.samples or prepared.eval is None:
        return None
    tokenizer = read_tokenizer()
    return Prompts(_find_prompts(prepared, config.log, tokenizer), tokenizer)


def _find_prompts(prepared: PreparedData, log: LogConfig, tokenizer: ChatTokenizer) -> list[list[int]]:
    asked, rows = log.samples, prepared.eval
    assert rows is not None
    if isinstance(asked, tuple):
        begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        return [begin + tokenizer.encode(text)[0] for text in asked]
    places = np.linspace(0, len(rows) - 1, num=min(asked, len(rows)), dtype=int)
    longest = [max(rows.segments(int(place)), key=lambda part: len(part.input_ids)) for place in places]
    return [part.input_ids[:_BEGINNING].tolist() for part in longest]


@torch.no_grad()
def _continue(model: LossModel | Through, prompt: list[int], precision: str, world: World) -> list[int]:
    """Never fewer tokens than asked for: ranks that gather weights together must not part."""
    was_training = model.training
    model.eval()
    ids = list(prompt)
    try:
        for _ in range(NUM_NEW):
            world.heart.tell("evaluate")
            with compute_in(precision, world.device):
                ids.append(model.next_token(torch.tensor([ids], device=world.device)))
    finally:
        model.train(was_training)
    return ids[len(prompt) :]


def text_tokens(ids: list[int], tokenizer: ChatTokenizer) -> list[int]:
    """The tokens up to the end of the document."""
    kept = ids[1:] if ids[:1] == [tokenizer.bos_id] else ids  # first: one token may be both
    return kept[: kept.index(tokenizer.eos_id)] if tokenizer.eos_id in kept else kept
