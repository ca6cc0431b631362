"""Answers to a step's prompts, drawn by the ranks that train, with the weights as they are.

On CPUs rows of any lengths are computed together, each as if it were alone (`answer_together`). Elsewhere, and for
architectures that cannot, what is computed at once is decided by the prompts alone (`make_units`): rows of one length,
without padding. Either way a rank computes of an answer the bits that any other would, and each token is drawn by a
number that is counted (seed, step, prompt, sample, position), whoever computes it. So one set of weights gives the same
answers on any number of ranks. After an update weights of another number of ranks differ in their last bits, and where
two tokens are nearly tied answers part. Answers that called tools go on, in parts of one length again where that
counts, which the turns before decide.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from duoka.config.rl import RlConfig
from duoka.data.feed.prompts import PromptRows
from duoka.data.tokens.tokenizer import ChatTokenizer
from duoka.model.answer import alone, answer_rows, stop_tokens, with_cache
from duoka.model.build import LossModel
from duoka.model.sampling import Sampling, draw_rows, uniform
from duoka.model.together import answer_together, answers_by_rows, with_slots
from duoka.parallel.engine import Engine
from duoka.parallel.precision import compute_in
from duoka.plan.layout import Layout
from duoka.train.rl.drafts import Draft, ToolTurns
from duoka.train.rl.outside import Outside
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


def share_rows(
    prompts: Sequence[int], lengths: Sequence[int], samples: int, rows: int, num_ranks: int
) -> list[list[Unit]]:
    """The answers of each rank, one row more or less, in parts of at most `rows`: the longest prompts first."""
    order = sorted(prompts, key=lambda prompt: (-lengths[prompt], prompt))
    every = [(prompt, sample) for prompt in order for sample in range(samples)]
    edges = [len(every) * rank // num_ranks for rank in range(num_ranks + 1)]
    shares = [tuple(every[begin:end]) for begin, end in itertools.pairwise(edges)]
    return [[share[at : at + rows] for at in range(0, len(share), rows)] for share in shares]


def width_of(answers: int, rows: int) -> int:
    """Rows of a pass that writes, of a step of so many answers: the same on any number of ranks."""
    whole = 64 if answers > 256 else 32
    return max(1, min(rows, whole, -(-answers // 8) * 8))


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
    turns: ToolTurns | None = None
    outside: Outside | None = None

    def __post_init__(self) -> None:
        assert isinstance(self.engine.bare, LossModel)
        self._is_by_rows, self._width = self.outside is None and answers_by_rows(self.engine.bare), 0
        self.stop_ids = stop_tokens(self.engine.bare.core, self.tokenizer)

    def draw(self, number: int, prompts: Sequence[int]) -> list[Rollout]:
        """All answers of a step, on every rank."""
        world = self.engine.mesh.data
        lengths, samples = self.prompts.lengths.tolist(), self.rl.samples
        if self._is_by_rows:
            own = share_rows(prompts, lengths, samples, self.rl.rows, world.size)[world.rank]
            self._width = width_of(len(prompts) * samples, self.rl.rows)
        else:
            own = share_units(make_units(prompts, lengths, samples, self.rl.rows), world.size)[world.rank]
        drafts = self._ask(number, own) if self.outside is not None else self._draw(number, own)
        order = {place: at for at, place in enumerate(prompts)}
        found = [one.rollout(self.prompts.questions[one.prompt].id, has_tools=self.turns is not None) for one in drafts]
        drawn = [one for part in world.gather(found) for one in part]
        return sorted(drawn, key=lambda one: (order[one.prompt], one.sample))

    def _draw(self, number: int, units: Sequence[Unit]) -> list[Draft]:
        with self.engine.evaluate() as model:
            assert isinstance(model, LossModel)
            was_training = model.training
            model.eval()
            try:
                with with_slots(model.core) if self._is_by_rows else with_cache(model.core):
                    return self._draw_share(model, number, units)
            finally:
                model.train(was_training)

    def _ask(self, number: int, units: Sequence[Unit]) -> list[Draft]:
        """This rank's answers, drawn by an engine, on all ranks together."""
        assert self.outside is not None
        heart, world = self.engine.world.heart, self.engine.mesh.data
        self.outside.load(number)
        found = [Draft(prompt, sample, self.prompts.ids[prompt]) for unit in units for prompt, sample in unit]
        going = found
        while world.sum([float(bool(going))])[0] > 0:
            asked = [(one.read, self._room(one), self._seed(number, one)) for one in going]
            drawn = self.outside.answer(asked, self._sampling, partial(heart.tell, "rollouts"))
            for one, answer in zip(going, drawn, strict=True):
                one.add(answer.ids, answer.stop, answer.logps, self.tokenizer)
                one.version = answer.version
            going = [] if self.turns is None else self.turns.answer(going, self._room, partial(heart.tell, "tools"))
        return found

    def _seed(self, number: int, draft: Draft) -> int:
        return int(uniform(self.seed, number, draft.prompt, draft.sample, len(draft.ids)) * (1 << 31))

    @property
    def _sampling(self) -> Sampling:
        return Sampling(temperature=self.rl.temperature, top_p=self.rl.top_p, top_k=self.rl.top_k)

    def _draw_share(self, model: LossModel, number: int, units: Sequence[Unit]) -> list[Draft]:
        """Ranks that gather weights for each pass make equally many of them."""
        world = self.engine.mesh.data
        together = self.layout.is_sharded and world.size > 1
        is_any: Callable[[bool], bool] = lambda going: world.sum([float(going)])[0] > 0  # noqa: E731
        goes_on = is_any if together else alone
        todo = deque([Draft(prompt, sample, self.prompts.ids[prompt]) for prompt, sample in unit] for unit in units)
        found: list[Draft] = []
        while goes_on(bool(todo)):
            drafts = todo.popleft() if todo else []
            found += [one for one in drafts if not one.rounds]
            with compute_in(self.layout.precision, self.engine.world.device):
                self._draw_turn(model, number, drafts, goes_on)
            if self.turns is not None:
                going = self.turns.answer(drafts, self._room, partial(self.engine.world.heart.tell, "tools"))
                todo.extend([going] if self._is_by_rows and going else _by_length(going))
        return found

    def _room(self, draft: Draft) -> int:
        return min(self.rl.max_new_tokens, self.max_length - len(draft.asked)) - len(draft.ids)

    def _draw_turn(
        self, model: LossModel, number: int, drafts: Sequence[Draft], is_any_going: Callable[[bool], bool]
    ) -> None:
        """A turn of answers; they have one length so far where rows are not computed by themselves."""
        heart, sampling = self.engine.world.heart, self._sampling

        def choose(
            logits: torch.Tensor, position: int, rows: Sequence[int] = range(len(drafts))
        ) -> tuple[torch.Tensor, torch.Tensor]:
            heart.tell("rollouts")
            places = [(drafts[row].prompt, drafts[row].sample, len(drafts[row].ids) + position) for row in rows]
            return draw_rows(logits.float(), sampling, [uniform(self.seed, number, *place) for place in places])

        if self._is_by_rows:
            mixed = [(one.read, self._room(one)) for one in drafts]
            answers = answer_together(model, mixed, self.stop_ids, self._width, choose, is_any_going)
        else:
            room = self._room(drafts[0]) if drafts else 0
            asked = [one.read for one in drafts] or [(0,)]
            answers = answer_rows(model, asked, self.stop_ids, room, choose, is_any_going)
        for one, answer in zip(drafts, answers, strict=False):
            one.add(answer.ids, answer.stop, answer.logps, self.tokenizer)

    def close(self) -> None:
        if self.turns is not None:
            self.turns.pool.close()
        if self.outside is not None:
            self.outside.close()


def _by_length(drafts: Sequence[Draft]) -> list[list[Draft]]:
    """Those that are computed at once."""
    found: dict[int, list[Draft]] = {}
    for one in drafts:
        found.setdefault(len(one.read), []).append(one)
    return list(found.values())
