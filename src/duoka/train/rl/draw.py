"""Answers to a step's prompts, drawn by the ranks that train, with the weights as they are.

What is computed at once is decided by the prompts alone (`make_units`): rows of one length, without padding, the same
for any number of ranks, so that a rank computes of a unit the bits that any other would. Each token is drawn by a
number that is counted (seed, step, prompt, sample, position), whoever computes it. So one set of weights gives the same
answers on any number of ranks. After an update weights of another number of ranks differ in their last bits, and where
two tokens are nearly tied answers part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from duoka.config.rl import RlConfig
from duoka.data.feed.prompts import PromptRows
from duoka.data.tokens.tokenizer import ChatTokenizer
from duoka.model.answer import Answered, answer_rows, stop_tokens, with_cache
from duoka.model.build import LossModel
from duoka.model.sampling import Sampling, draw_rows, uniform
from duoka.parallel.engine import Engine
from duoka.parallel.precision import compute_in
from duoka.plan.layout import Layout
from duoka.train.rl.rollouts import Rollout

Unit = tuple[tuple[int, int], ...]  # (prompt, sample) of each row


def make_units(prompts: Sequence[int], lengths: Sequence[int], samples: int, rows: int) -> list[Unit]:
    """All answers of a step in parts that are computed at once: prompts of one length, at most `rows` rows."""
    by_length: dict[int, list[tuple[int, int]]] = {}
    for prompt in sorted(prompts, key=lambda prompt: (-lengths[prompt], prompt)):
        by_length.setdefault(lengths[prompt], []).extend((prompt, sample) for sample in range(samples))
    return [tuple(some[at : at + rows]) for some in by_length.values() for at in range(0, len(some), rows)]


def share_units(units: Sequence[Unit], num_ranks: int) -> list[list[Unit]]:
    """The units of each rank: the fullest first, to whom has fewest rows so far."""
    shares: list[list[Unit]] = [[] for _ in range(num_ranks)]
    for unit in sorted(units, key=lambda unit: -len(unit)):
        min(shares, key=lambda share: sum(map(len, share))).append(unit)
    return shares


@dataclass
class Drawer:
    """One rank's share of the drawing; the same on every rank but for its place."""

    engine: Engine
    layout: Layout
    rl: RlConfig
    seed: int
    max_length: int
    prompts: PromptRows
    tokenizer: ChatTokenizer

    def __post_init__(self) -> None:
        assert isinstance(self.engine.bare, LossModel)
        self.stop_ids = stop_tokens(self.engine.bare.core, self.tokenizer)

    def draw(self, number: int, prompts: Sequence[int]) -> list[Rollout]:
        """All answers of a step, on every rank."""
        world = self.engine.mesh.data
        units = make_units(prompts, self.prompts.lengths.tolist(), self.rl.samples, self.rl.rows)
        shares = share_units(units, world.size)
        with self.engine.evaluate() as model:
            assert isinstance(model, LossModel)
            was_training = model.training
            model.eval()
            try:
                with with_cache(model.core):
                    own = self._draw_share(model, number, shares[world.rank], max(map(len, shares)))
            finally:
                model.train(was_training)
        order = {place: at for at, place in enumerate(prompts)}
        drawn = [one for part in world.gather(own) for one in part]
        return sorted(drawn, key=lambda one: (order[one.prompt], one.sample))

    def _draw_share(self, model: LossModel, number: int, units: Sequence[Unit], rounds: int) -> list[Rollout]:
        """Ranks that gather weights for each pass make equally many of them."""
        world = self.engine.mesh.data
        together = self.layout.is_sharded and world.size > 1
        asked: Callable[[bool], bool] = lambda going: world.sum([float(going)])[0] > 0  # noqa: E731
        found: list[Rollout] = []
        for place in range(rounds if together else len(units)):
            unit = units[place] if place < len(units) else ()
            with compute_in(self.layout.precision, self.engine.world.device):
                found += self._draw_unit(model, number, unit, asked if together else None)
        return found

    def _draw_unit(
        self, model: LossModel, number: int, unit: Unit, is_any_going: Callable[[bool], bool] | None
    ) -> list[Rollout]:
        heart, rl = self.engine.world.heart, self.rl
        sampling = Sampling(temperature=rl.temperature, top_p=rl.top_p, top_k=rl.top_k)

        def choose(logits: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor]:
            heart.tell("rollouts")
            numbers = [uniform(self.seed, number, prompt, sample, position) for prompt, sample in unit]
            return draw_rows(logits.float(), sampling, numbers)

        ids = [self.prompts.ids[prompt] for prompt, _ in unit]
        room = min(rl.max_new_tokens, self.max_length - len(ids[0])) if ids else 0
        more = {} if is_any_going is None else {"is_any_going": is_any_going}
        answers = answer_rows(model, ids or [(0,)], self.stop_ids, room, choose, **more)
        return [self._rollout(*row, answer) for row, answer in zip(unit, answers, strict=False)]

    def _rollout(self, prompt: int, sample: int, answer: Answered) -> Rollout:
        ids = (*answer.ids, *(() if answer.stop is None else (answer.stop,)))
        text = self.tokenizer.backend.decode(answer.ids, skip_special_tokens=True)
        return Rollout(
            prompt, sample, self.prompts.questions[prompt].id, self.prompts.ids[prompt], ids, answer.ended, text,
            tuple(answer.logps),
        )  # fmt: skip
