"""Stage rl: answers that the model drew, each of whose tokens is made likelier or less likely by the answer's reward.

Which answers there are, and their advantages, is train/rl's; here is the loss of one micro-batch of them, and what it
is divided by, for every row of config/rl.py:ALGORITHMS.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from duoka.config.schema import RunConfig
from duoka.data.build_feed import Feed
from duoka.data.feed.loader import Batch, GlobalBatch, Loader
from duoka.data.feed.prompts import PromptRows
from duoka.errors import ConfigError
from duoka.model.answer import behind_answers, closing_of
from duoka.model.build import LossModel, find_core
from duoka.model.dropout import stop_dropout
from duoka.model.dtypes import BY_PRECISION
from duoka.model.value_head import FILE, ValueModel
from duoka.parallel.engine import Engine
from duoka.parallel.gather import gather_state
from duoka.parallel.inputs import model_inputs
from duoka.parallel.objective import Sums
from duoka.tasks.rewards import RewardPool
from duoka.tasks.tool_pool import ToolPool
from duoka.train.moments import Concern
from duoka.train.record import Recorder
from duoka.train.rl.batch import AnswerBatch
from duoka.train.rl.drafts import ToolTurns
from duoka.train.rl.draw import Drawer
from duoka.train.rl.feed import RolloutFeed, Site
from duoka.train.rl.judges import Judges
from duoka.train.rl.outside import SERVERS, Outside
from duoka.train.rl.passes import AnswerPass, take_values
from duoka.train.rl.rollouts import FOLDER, Rollout
from duoka.train.rl.start import StartWeights
from duoka.train.rl.watch import RolloutWatch
from duoka.train.stages.documents import count_targets, document_sums
from duoka.train.stages.stage import Around, Stage
from duoka.units import parse_seconds

# Log-probabilities of a token, drawn with a cache and learned without one, that are the same but for rounding.
_NEAR = 0.3  # the same of an engine, whose kernels and types are others
_SAME = {"fp32": 1e-3, "bf16": 1e-1, "fp16": 1e-1}


class Policy(Stage):
    """Minus the sum of advantages times what the algorithm takes of the policy, over its denominator."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.rl, self.row = config.rl, config.rl.row
        names = ["entropy", "logp_gap"]
        names += ["ratio", "clip_low", "clip_high"] if self.row.ratio != "none" else []
        names += ["importance"] if self.rl.cap is not None else []
        names += ["kl"] if self.rl.kl else []
        names += ["value_loss"] if self.row.has_values else []
        self.metrics = dict.fromkeys(names, "learned")
        self._first_logps: dict[int, torch.Tensor] = {}  # by place among the rollouts, from their first update
        self._start: StartWeights | None = None
        self._feed: RolloutFeed | None = None

    def wrap(self, lm: torch.nn.Module, *, own_logits: bool = False) -> LossModel:
        stop_dropout(lm)  # what is dropped at random would be no part of the policy that drew
        return (ValueModel if self.row.has_values else LossModel)(lm, own_logits=own_logits)

    def describe(self) -> str:
        return self.rl.sentence()

    def beside(self, engine: Engine) -> Mapping[str, Mapping[str, torch.Tensor]]:
        if not isinstance(engine.bare, ValueModel):
            return {}
        whole = gather_state(engine.bare.v_head, keep=True)
        return {FILE: {f"v_head.{name}": tensor for name, tensor in whole.items()}}

    def take_start(self, engine: Engine) -> None:
        if self.rl.kl:
            self._start = StartWeights.of(engine)

    def feed(self, feed: Feed, around: Around) -> Feed:
        assert isinstance(feed, Loader) and isinstance(feed.store, PromptRows)
        rl, config, engine, layout = self.rl, self.config, around.engine, around.layout
        longest = config.data.max_length

        over = AnswerPass(engine, layout, longest, around.pad_id, rl.temperature)

        def look_back(rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
            if self._start is not None:
                around.release()
                rollouts = self._start.add(rollouts, over)
            if self.row.has_values:
                found = over.numbers(rollouts, "values", take_values, "values")
                rollouts = [replace(one, values=values) for one, values in zip(rollouts, found, strict=True)]
            return rollouts

        drawer = self._drawer(feed.store, around)
        functions = [name for name in rl.rewards if name not in rl.judges]
        pool = RewardPool(
            functions, around.base, deadline_s=parse_seconds(rl.reward_deadline), num_workers=rl.reward_workers
        )
        dtype, device = BY_PRECISION[layout.precision], engine.world.device
        judges = Judges(
            rl.rewards, around.base, around.folder, dtype=dtype, device=device, pad_id=around.pad_id,
            behind=behind_answers(around.tokenizer()) if rl.judges else {},
            closing=closing_of(around.tokenizer()) if rl.judges else (),
        )  # fmt: skip
        core: Any = find_core(engine.bare)
        site = Site(
            config, around.base, around.run.path / FOLDER, around.model, engine, layout, feed.store,
            core.config.get_text_config().vocab_size, drawer, pool, judges, look_back,
        )  # fmt: skip
        self._feed = RolloutFeed(feed, site)
        return self._feed

    def _drawer(self, prompts: PromptRows, around: Around) -> Drawer:
        rl, engine, tokenizer = self.rl, around.engine, around.tokenizer()
        turns = None
        if rl.tools:
            deadline_s = parse_seconds(rl.tool_deadline)
            tools = ToolPool(rl.tools, around.base, deadline_s=deadline_s, num_workers=rl.reward_workers)
            turns = ToolTurns(tools, rl.tool_rounds, tokenizer)
        drawer = Drawer(
            engine, around.layout, rl, self.config.train.seed, self.config.data.max_length, prompts, tokenizer, turns
        )
        if rl.engine is not None:
            kind, _, url = rl.engine.partition(":")
            core: Any = find_core(engine.bare)
            vocab, limit_s = core.config.get_text_config().vocab_size, parse_seconds(self.config.parallel.timeout)
            server = SERVERS[kind](url, drawer.stop_ids, vocab, limit_s)
            world = engine.mesh.everyone
            sign = world.agree(secrets.token_hex(4))
            drawer.outside = Outside(server, world, around.write, around.run.path / "engine", rl.rows, sign)
        return drawer

    def concerns(self, record: Recorder) -> tuple[Concern, ...]:
        assert self._feed is not None
        return (RolloutWatch(self._feed, record, self.after_step),)

    def after_step(self) -> None:
        found, self._first_logps = self._first_logps, {}
        if self._feed is not None and self._feed.is_first_of_several:
            self._feed.keep_first(found)

    def end(self) -> None:
        if self._feed is not None:
            self._feed.close()

    def why_left_out(self, batch: GlobalBatch) -> str:
        if batch.global_targets:
            return ""
        # Its gradient would be 0, and momentum and weight decay would move the weights all the same.
        what = ["have no reward"]
        what += ["are to a prompt all of whose answers got one reward"] if self.row.drop_equal else []
        what += ["were cut"] if self.rl.truncated == "mask" else []
        return f"none of its answers is learned from, as all {' or '.join(what)}; the weights stay as they are"

    def denominators(self, batch: GlobalBatch) -> Mapping[str, float]:
        answers, tokens = max(1.0, float(batch.num_samples)), max(1.0, float(batch.global_targets))
        counts = {"tokens": tokens, "answers": answers, "length": answers * self.rl.max_new_tokens}
        # 0 where no answer was left: then nothing is known of the policy, and metrics of it are left out.
        counts["learned"] = float(batch.global_targets)
        return counts | ({"values": tokens} if self.row.has_values else {})

    @property
    def _divided_by(self) -> str:
        return {"tokens": "tokens", "length": "length"}.get(self.row.normalize, "answers")

    def sums(self, model: torch.nn.Module, micro: Batch, device: torch.device) -> Sums:
        has_values = self.row.has_values
        asked = {"answer": "values" if has_values else "entropy", "temperature": self.rl.temperature}
        logps, more = model(**model_inputs(micro, device), **asked)
        entropy, values = more if has_values else (more, None)
        if not isinstance(micro, AnswerBatch):  # a rank without answers, or a rehearsal
            nothing = {} if values is None else {"values": values.double().sum() * 0.0}
            return Sums({self._divided_by: -logps.sum(), **nothing})
        assert micro.advantages is not None and micro.drawn is not None
        logps = logps.double()
        if micro.old is None and self.rl.updates > 1:
            self._keep(logps.detach(), micro)
        old = logps.detach() if micro.old is None else micro.old.to(device)
        counts = count_targets(micro).to(device)
        is_target = micro.labels.to(device) >= 0
        advantages = micro.advantages.to(device)
        shares = _on_tokens(1 / counts, micro)
        share = shares if self.row.normalize == "answers" else torch.ones_like(shares)
        gain, metrics = self._gain(logps, old, advantages, micro, counts, is_target)
        if self.rl.cap is not None:
            weight = (old - micro.drawn.to(device)).exp().clamp(max=self.rl.cap)
            gain, metrics["importance"] = gain * weight, (weight * is_target).sum()
        loss = -(gain * share * is_target).sum()
        if micro.start is not None:
            apart = micro.start.to(device) - logps
            k3 = (torch.expm1(apart) - apart) * is_target
            loss = loss + self.rl.kl * (k3 * share).sum()
            metrics["kl"] = k3.detach().sum()
        assert entropy is not None
        metrics["entropy"] = entropy.detach().double().sum()
        metrics["logp_gap"] = ((logps.detach() - micro.drawn.to(device)).abs() * is_target).sum()
        if values is None:
            return Sums({self._divided_by: loss}, metrics)
        missed = (self._missed(values.double(), micro, device) * is_target).sum()
        metrics["value_loss"] = missed.detach()
        return Sums({self._divided_by: loss, "values": self.rl.values.weight * missed}, metrics)

    def _missed(self, values: torch.Tensor, micro: AnswerBatch, device: torch.device) -> torch.Tensor:
        """(rows, tokens): half the squared distance from what came, at least as far as a value may have moved."""
        assert micro.returns is not None and micro.values is not None
        returns, before, most = micro.returns.to(device), micro.values.to(device), self.rl.values.clip
        missed = (values - returns) ** 2
        if most:
            missed = torch.maximum(missed, (before + (values - before).clamp(-most, most) - returns) ** 2)
        return missed / 2

    def _gain(
        self,
        logps: torch.Tensor,
        old: torch.Tensor,
        advantages: torch.Tensor,
        micro: AnswerBatch,
        counts: torch.Tensor,
        is_target: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(rows, tokens): what each token adds to what is maximized, and what is logged of it."""
        if self.row.ratio == "none":
            return advantages * logps, {}
        assert self.row.clip is not None
        low, high = 1 - self.row.clip[0], 1 + self.row.clip[1]
        moved = (logps - old) * is_target
        if self.row.ratio == "sequence":
            # One ratio an answer; each token carries its share, so that any normalizer holds.
            moved = _on_tokens(document_sums(moved, micro) / counts, micro)
        ratio = moved.exp()
        metrics = {
            "ratio": (ratio.detach() * is_target).sum(),
            "clip_low": ((ratio.detach() < low) & (advantages < 0) & is_target).double().sum(),
            "clip_high": ((ratio.detach() > high) & (advantages > 0) & is_target).double().sum(),
        }
        if self.row.ratio == "weight":
            return ratio.detach().clamp(max=high).clamp(min=low) * advantages * logps, metrics
        return torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages), metrics

    def _keep(self, logps: torch.Tensor, micro: AnswerBatch) -> None:
        """What later updates on the same answers take for the policy that drew them."""
        at_targets = logps[(micro.labels >= 0).to(logps.device)].cpu()
        sizes = [int(count) for count in count_targets(micro).tolist()]
        self._first_logps |= dict(zip(micro.places, at_targets.split(sizes), strict=True))

    def check_first(self, metrics: Mapping[str, float], precision: str) -> None:
        """At its first step the model is the policy that drew: else its ratios, and what is learned, mean nothing."""
        if self.rl.replay is not None or metrics.get("logp_gap", 0.0) <= _SAME[precision]:
            return
        if self.rl.engine is not None:
            if metrics["logp_gap"] <= _NEAR:
                return
            raise ConfigError(
                f"the engine answers with another model than the one that learns: log-probabilities differ by "
                f"{metrics['logp_gap']:.3g} a token at the first step",
                where="likely: it serves another base, or tells log-probabilities before rl.temperature",
                fix="start it with the same model; vLLM with   --logprobs-mode processed_logprobs",
            )
        raise ConfigError(
            f"the model that learns is not the one that drew: log-probabilities differ by {metrics['logp_gap']:.3g} a "
            "token at the first step",
            where="likely: an architecture whose key-value cache changes its answers, or code that draws at random",
            fix="write   train: {precision: fp32}   to tell rounding from a fault",
        )


def _on_tokens(values: torch.Tensor, micro: Batch) -> torch.Tensor:
    """(documents,) as (rows, tokens): each token has its document's."""
    if micro.boundaries is None:
        return values[:, None].expand(micro.labels.shape)
    return values.repeat_interleave(micro.boundaries.diff().to(values.device).long())[None]
