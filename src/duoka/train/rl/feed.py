"""What stage rl learns from, step by step: prompts of the epoch plan, answers to them, their rewards, a global batch.

Stands where the loader stands; the loop asks it for the next batch, on all ranks together. A step whose answers lie in
the run's folder, drawn by the same weights, is not drawn again; with `rl.replay` none is drawn at all.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from duoka.comm.checksum import checksum
from duoka.config.adapters import WEIGHTS
from duoka.config.paths import given_path
from duoka.config.schema import RunConfig
from duoka.data.feed.loader import GlobalBatch, Loader, Place
from duoka.data.feed.prompts import PromptRows
from duoka.data.feed.token_keys import step_key
from duoka.errors import ConfigError, DataError
from duoka.hub.base import model_fingerprint
from duoka.parallel.engine import Engine
from duoka.plan.layout import Layout
from duoka.tasks.check import reward_files, tools_digest
from duoka.tasks.rewards import Rewarded, RewardPool
from duoka.train.rl.batch import AnswerRows, build_answers
from duoka.train.rl.draw import Drawer
from duoka.train.rl.judges import Judges
from duoka.train.rl.learned import facts_of, learned_of
from duoka.train.rl.rollouts import Rollout, RolloutStep, read_rollouts, rollout_file, write_rollouts
from duoka.units import parse_seconds, steps_of_epochs


@dataclass(frozen=True)
class Site:
    """Where answers are drawn, rewarded and kept; the same on every rank but for the rank's own place."""

    config: RunConfig
    base: Path  # of the YAML's relative paths
    folder: Path  # RUN/rollouts
    model: str  # what tells the frozen weights from others
    engine: Engine
    layout: Layout
    prompts: PromptRows
    vocab_size: int
    drawer: Drawer
    pool: RewardPool  # of functions
    judges: Judges
    look_back: Callable[[Sequence[Rollout]], Sequence[Rollout]]  # with what passes over all answers say of them

    def rewarders(self) -> str:
        """Digest of what rewards: functions' files and reward models, by their content."""
        digest = hashlib.blake2b(json.dumps([self.config.rl.rewards, self.config.rl.reward_weights]).encode())
        for file in reward_files(self.config, self.base).values():
            digest.update(file.read_bytes() if file is not None else b"")
        if self.judges.folders and self.judges.behind:
            digest.update(json.dumps(sorted(self.judges.behind.items())).encode())
        if self.judges.folders and self.judges.closing:
            digest.update(json.dumps(["closing", *self.judges.closing]).encode())
        for folder in self.judges.folders:
            adapter = folder / WEIGHTS
            digest.update(adapter.read_bytes() if adapter.is_file() else model_fingerprint(folder).encode())
        return digest.hexdigest()[:32]

    def fingerprint(self, prompts: Sequence[int]) -> str:
        """Of all that decides a step's answers: weights, prompts, settings."""
        world, rl = self.engine.mesh.everyone, self.config.rl
        parts: list[str] = world.gather(checksum(self.engine.named_trainable()))
        parts = parts if self.layout.is_sharded else parts[:1]
        facts = [
            parts, self.model, self.prompts.fingerprint, list(prompts), self.config.train.seed,
            rl.samples, rl.max_new_tokens, rl.temperature, rl.top_k, rl.top_p, rl.rows, self.config.data.max_length,
            self.layout.precision, rl.rewards, rl.reward_weights, rl.kl > 0,
            *(["values"] if rl.row.has_values else ()),
            *([rl.engine] if rl.engine else ()),
            *([rl.tools, rl.tool_rounds, tools_digest(self.config, self.base)] if rl.tools else ()),
        ]  # fmt: skip
        return hashlib.blake2b(json.dumps(facts, default=str).encode(), digest_size=16).hexdigest()


class RolloutFeed:
    """The feed of stage rl. `plan` orders prompts; places count optimizer steps, `rl.updates` to a step's answers."""

    def __init__(self, loader: Loader, site: Site) -> None:
        self.plan, self.site = loader.plan, site
        self.micro, self.rows_per_micro = loader.micro, 0
        self._loader = loader
        self._now: RolloutStep | None = None
        self._is_checked = False
        world = self.site.engine.mesh.everyone
        self._scored_by: str = world.agree(site.rewarders() if world.is_main else "")
        self.facts: dict[str, float] = {}  # of the newest answers
        self.is_first_of_several = False  # updates on the same answers, the first of which was laid out last
        self._own: frozenset[int] = frozenset()  # this rank's answers of the batch laid out last, by place
        self.num_failed = 0  # answers whose rewards failed, since the start
        self.faults: Counter[str] = Counter()  # of those that were scored last

    # --- as every feed ---

    @property
    def steps_per_epoch(self) -> int:
        return self.plan.num_batches() * self.site.config.rl.updates

    def num_steps(self, num_epochs: float) -> int:
        return steps_of_epochs(num_epochs, self.steps_per_epoch)

    def num_samples_between(self, start: int, end: int) -> int:
        updates, samples = self.site.config.rl.updates, self.site.config.rl.samples
        return self.plan.num_samples_between(start // updates, math.ceil(end / updates)) * samples

    def summary(self) -> str:
        return f"{self.num_failed:,} answers whose reward failed" if self.num_failed else ""

    def batches(self, place: Place, num_epochs: float) -> Generator[GlobalBatch]:
        """Drawn when they are asked for: each by the weights that the step before left."""
        per_epoch = self.steps_per_epoch
        for step in range(place.epoch * per_epoch + place.index, self.num_steps(num_epochs)):
            yield self.global_batch(*divmod(step, per_epoch))

    def close(self) -> None:
        self.site.pool.close()
        self.site.drawer.close()

    # --- one batch ---

    def global_batch(self, epoch: int, index: int) -> GlobalBatch:
        """This rank's part of one; a second call for the same place draws nothing."""
        per_epoch, updates = self.steps_per_epoch, self.site.config.rl.updates
        step = epoch * per_epoch + index
        number, update = divmod(step, updates)
        if self._now is None or self._now.number != number:
            self._now = self._step_of(number, is_begun=update > 0)
        now = self._now if update else self._now.with_old({})
        self.facts, self.is_first_of_several = facts_of(now, self.site.config.rl), updates > 1 and update == 0
        rows = AnswerRows(learned_of(now, self.site.config.rl))
        if update and any(one.rollout.old is None for one in rows.answers):
            raise self._gone(number, "has answers without the log-probabilities of its first update")
        own = self._share(rows)
        self._own = frozenset(rows.answers[index].place for micro in own for index in micro.sample_ids)
        key = step_key(self.plan.seed, step)
        layout, pad_id = self.site.layout, self._loader.pad_id
        micros = [build_answers(rows, micro, layout.packing, pad_id, key) for micro in own]
        return GlobalBatch(
            micro_batches=[micro.pinned() for micro in micros] if self._loader.pin_memory else micros,
            global_targets=rows.num_targets,
            num_samples=len(rows),
            num_tokens=int(rows.lengths.sum()),
            epoch=epoch,
            index=index,
            sample_ids=np.arange(len(rows)),
            after=Place(*divmod(step + 1, per_epoch)),
            epochs_done=(step + 1) / per_epoch,
            facts=self.facts,
        )

    def _share(self, rows: AnswerRows) -> list[Any]:
        engine, most = self.site.engine, self.site.config.data.max_length
        shares = rows.share(engine, self.micro, packing=self.site.layout.packing, max_length=most)
        return shares[engine.mesh.data.rank]

    # --- where answers come from ---

    def _step_of(self, number: int, *, is_begun: bool) -> RolloutStep:
        """A step's answers with rewards; `is_begun`: it was learned from already, by weights that are gone."""
        site, world = self.site, self.site.engine.mesh.everyone
        if site.config.rl.replay is not None and not is_begun:
            return self._replayed(number, site.config.rl.replay)
        prompts = self.plan.batch(*divmod(number, self.plan.num_batches())).tolist()
        fingerprint = "" if is_begun else site.fingerprint(prompts)
        kept: RolloutStep | None = world.agree(read_rollouts(site.folder, number) if world.is_main else None)
        if is_begun:
            if kept is None or not kept.is_scored:
                raise self._gone(number, "was learned from once, and its answers are gone")
            return kept
        if kept is None or kept.fingerprint != fingerprint:
            self._check_rewards()
            drawn = site.look_back(site.drawer.draw(number, prompts))
            kept = RolloutStep(number, fingerprint, tuple(drawn))
            self._write(kept)
        # Answers that a function rewarded which was mended since are rewarded again, or steps would mix two of them.
        if not kept.is_scored or kept.scored_by != self._scored_by:
            kept = replace(kept, rollouts=tuple(self._score(kept.rollouts)), scored_by=self._scored_by)
            self._write(kept)
        return kept

    def _gone(self, number: int, what: str) -> DataError:
        file = rollout_file(self.site.folder, number)
        return DataError(
            f"step {number} {what}", where=str(file.parent),
            fix=f"put {file.name} back as it was, or go on from an earlier checkpoint",
        )  # fmt: skip

    def _replayed(self, number: int, name: str) -> RolloutStep:
        base, world = self.site.base, self.site.engine.mesh.everyone
        folder = next((one for one in (given_path(name), base / given_path(name)) if one.is_dir()), None)
        found: RolloutStep | None = world.agree(
            read_rollouts(folder, number) if folder is not None and world.is_main else None
        )
        if found is None or not found.is_scored:
            raise ConfigError(
                f"rl.replay is {name}, and no scored answers of step {number} are there",
                fix="name the folder rollouts of a run that came so far, or write a smaller train.max_steps",
            )
        self._check_fits(found, name)
        # What another run's policies said of them is nothing to this one.
        plain = [replace(one, old=None, start=None, values=None) for one in found.rollouts]
        found = replace(found, rollouts=tuple(self.site.look_back(plain)))
        self._write(found)
        return found

    def _check_fits(self, step: RolloutStep, name: str) -> None:
        """Recorded answers are this model's tokens, and as long as its micro-batches hold."""
        site, most = self.site, self.site.config.data.max_length
        longest = max(len(one.prompt_ids) + len(one.ids) for one in step.rollouts)
        largest = max(max(*one.prompt_ids, *one.ids) for one in step.rollouts)
        if longest > most:
            raise ConfigError(
                f"rl.replay is {name}, and step {step.number} has {longest} tokens of a prompt with its answer, more "
                f"than data.max_length ({most})",
                fix=f"write   max_length: {longest}   or more, as the run that recorded them",
            )
        if largest >= site.vocab_size:
            raise ConfigError(
                f"rl.replay is {name}, and step {step.number} has token {largest}; this model has {site.vocab_size}",
                fix="name answers of a model with the same tokenizer",
            )

    def _write(self, step: RolloutStep) -> None:
        world = self.site.engine.mesh.everyone
        if world.is_main:
            write_rollouts(self.site.folder, step)
        world.barrier()  # what is on the disk for one is there for all

    def _score(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Rewards of all answers, each computed by one rank."""
        site, world, rl = self.site, self.site.engine.mesh.everyone, self.site.config.rl
        own = list(range(world.rank, len(rollouts), world.size))
        found: dict[int, Rewarded] = {}
        while len(found) < len(rollouts):
            asked = [self._question(rollouts[place]) for place in own]
            # In turns that are shorter than a collective may take: one rank's rewards may be much slower than others'.
            alive = partial(world.heart.tell, "rewards")
            scored = site.pool.score(asked, alive=alive, for_s=self._turn_s)
            scored = site.judges.judge([rollouts[place] for place in own], scored, alive)
            for part in world.gather(dict(zip(own, scored, strict=False))):
                found |= part
            own = own[len(scored) :]
        weights = rl.reward_weights or (1.0,) * len(rl.rewards)
        out = []
        for place, one in enumerate(rollouts):
            rewarded = found[place]
            total = rewarded.total(weights)
            out.append(replace(one, rewards=rewarded.values, reward=total, faults=rewarded.faults))
        self._check_failures(out)
        return out

    def _check_rewards(self) -> None:
        """Before the first answers are drawn: what cannot be loaded rewards none of them."""
        if self._is_checked:
            return
        for rank, faults in enumerate(self.site.engine.mesh.everyone.gather(self.site.pool.faults())):
            if faults:
                raise ConfigError(
                    f"rl.rewards cannot be loaded: {faults[0]}", where=f"in a process of rank {rank}",
                    fix="mend the file, or install what it imports",
                )  # fmt: skip
        self._is_checked = True

    @property
    def _turn_s(self) -> float:
        return parse_seconds(self.site.config.parallel.timeout) / 3

    def _question(self, one: Rollout) -> dict[str, Any]:
        asked = self.site.prompts.questions[one.prompt].to_json()
        called = {} if one.calls is None else {"calls": one.calls}
        return {**asked, "completion": one.text, "is_cut": not one.ended, **called}

    def _check_failures(self, rollouts: Sequence[Rollout]) -> None:
        failed = [one for one in rollouts if one.faults]
        self.num_failed += len(failed)
        self.faults = Counter(fault for one in failed for fault in one.faults)
        if len(failed) <= self.site.config.rl.max_failed * len(rollouts):
            return
        (most, count), *_ = self.faults.most_common(1)
        raise DataError(
            f"rewards of {len(failed)} of {len(rollouts)} answers failed, more than rl.max_failed "
            f"({self.site.config.rl.max_failed:g}) allows",
            where=f"{count} times: {most}",
            fix="mend the function; rl.reward_deadline says how long it may take. The answers are kept and not drawn "
            "again",
        )

    # --- several updates on the same answers ---

    def keep_first(self, logps: dict[int, Any]) -> None:
        """The log-probabilities that the first update saw, of this rank's answers: beside the answers, for the next."""
        assert self._now is not None
        self.is_first_of_several = False
        # A step that was not finite, and from which the run went back, has left some of its own there.
        own = {place: values.tolist() for place, values in logps.items() if place in self._own}
        found: dict[int, list[float]] = {}
        for part in self.site.engine.mesh.everyone.gather(own):
            found |= part
        self._now = self._now.with_old(found)
        self._write(self._now)
