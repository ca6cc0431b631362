"""Out of memory in the middle of a step: give back what it took, and do it again with less at once on all ranks.

How a batch is laid out changes no result, so the step that is done again gives the same numbers. A rank that ran out
still takes part in its step's exchange, with the smallest possible pass, so that no rank waits for it. Where that
cannot be (sharded models exchange inside every layer) the world ends, and the next one begins with the smaller size.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from duoka.config.schema import RunConfig
from duoka.data.build_feed import Feed
from duoka.data.feed.loader import GlobalBatch, Loader
from duoka.errors import DoesNotFit
from duoka.parallel.out_of_memory import Shortage
from duoka.plan.memory import estimate_memory
from duoka.plan.report import Plan
from duoka.plan.shortfall import Correction, Shortfall, correct_plan, plan_with_less
from duoka.runs.folder import RunFolder, read_json, write_json_atomic
from duoka.store.state import read_random_state, set_random_state
from duoka.train.record import Recorder
from duoka.train.rl.feed import RolloutFeed
from duoka.train.step import StepResult
from duoka.units import Amount, format_bytes

_PARTS = {
    "activations": "activations of {tokens:,} tokens",
    "loss": "the loss's logits",
    "working": "a layer's working memory for {tokens:,} tokens",
    "casts": "half-precision copies of the weights",
    "gathered": "gathered weights",
    "embedding": "the gradient of the embedding",
}


class OutOfMemory(DoesNotFit):
    """Memory ran out while training, and nothing smaller may be tried."""

    title = "out of memory"


class SmallerMicroBatch(OutOfMemory):
    """Out of memory where the step cannot be repeated; the next start takes a smaller micro-batch."""


class MemoryGuard:
    """One run's answer to allocations that fail. Every method is called by all ranks together, but `leave`."""

    def __init__(self, config: RunConfig, plan: Plan, record: Recorder, feed: Feed) -> None:
        self.config = config
        self.plan = plan
        self.record = record
        self.run = record.run
        self.world = record.world
        self.feed = feed
        # A stream has read on: its batch cannot be laid out again.
        can_lay_out = isinstance(feed, Loader | RolloutFeed) and not feed.rows_per_micro
        self.may_shrink = config.train.micro_batch == "auto" and can_lay_out

    def until_it_fits(
        self,
        attempt: Callable[[GlobalBatch], StepResult],
        batch: GlobalBatch,
        lay_out_again: Callable[[], GlobalBatch] | None = None,
    ) -> StepResult:
        """Try the step, with ever smaller micro-batches as long as memory is short on any rank."""
        random = read_random_state(self.world.device) if self.may_shrink else {}
        while True:
            result = attempt(batch)
            if result.shortage and not result.shortage.rejoined:
                self._leave(result.shortage)
            if not result.is_short:
                return result
            gc.collect()
            if self.world.device.type == "cuda":
                torch.cuda.empty_cache()
            sizes = [one for one in self.world.gather(_size(result.shortage)) if one is not None]
            self._shrink(sizes, result.shortage)
            set_random_state(random, self.world.device)
            assert isinstance(self.feed, Loader | RolloutFeed)
            batch = lay_out_again() if lay_out_again else self.feed.global_batch(batch.epoch, batch.index)

    def _shrink(self, sizes: list[tuple[int, int, str]], shortage: Shortage | None) -> None:
        """`sizes`: (samples, tokens, what the allocator said) of the micro-batches that did not fit."""
        num_samples, tokens, text = min(sizes)
        if not self.may_shrink or num_samples < 2:
            raise self._refusal(tokens, num_samples, text)
        ran_out_at = min(size for _, size, _ in sizes)
        less = self._less_than(ran_out_at)
        assert isinstance(self.feed, Loader | RolloutFeed)
        self.feed.micro = Amount(less.tokens, "tokens")
        self.plan = plan_with_less(self.plan, less.tokens, ran_out_at)
        if self.world.is_main:
            _remember(self.run, less.tokens, ran_out_at)
            write_json_atomic(self.run.plan, self.plan.to_json())
        text = (
            f"memory was short for {tokens:,} tokens at once; the step is done again with at most {less.tokens:,} "
            f"({less.sentence()})"
        )
        self.record.event("warning", step=self.world.heart.beat.step + 1, text=text)
        self.record.say(text)

    def _leave(self, shortage: Shortage) -> None:
        """Ends the process: only this rank knows, and the others lose its connection in their exchange."""
        num_samples, tokens, text = shortage.size
        if not self.may_shrink or num_samples < 2:
            raise self._refusal(tokens, num_samples, text)
        less = self._less_than(tokens)
        _remember(self.run, less.tokens, tokens)
        raise SmallerMicroBatch(
            f"a micro-batch of {tokens:,} tokens, in its {shortage.phase} pass ({text})",
            where=less.sentence(),
            fix=f"the same command goes on with at most {less.tokens:,} at once, which changes no result",
        )

    def _less_than(self, tokens: int) -> Correction:
        """What to try after so many tokens did not fit: the plan, corrected by that. The same on every rank."""
        return correct_plan(self.plan.work, self.plan.layout, Shortfall(tokens, self.plan.available_bytes))

    def _refusal(self, tokens: int, num_samples: int, text: str) -> OutOfMemory:
        memory = estimate_memory(self.plan.work, self.plan.layout, tokens)
        name, size = max(((name, memory.parts.get(name, 0)) for name in _PARTS), key=lambda part: part[1])
        term = _PARTS[name].format(tokens=tokens)
        return OutOfMemory(
            f"a micro-batch of {tokens:,} tokens ({num_samples} sample{'s' if num_samples > 1 else ''}): {text}",
            where=f"the term that grew: {term}, about {format_bytes(size)} of {format_bytes(memory.peak_bytes)}",
            fix="\n".join(("write one of:", *self._edits(num_samples)[:2])),
        )

    def _edits(self, num_samples: int) -> list[str]:
        train, data = self.config.train, self.config.data
        edits = []
        if not self.may_shrink and num_samples > 1:
            edits.append("train.micro_batch: auto   (halved by itself until it fits; changes no result)")
        if self.plan.layout.recompute != "full":
            edits.append("train.recompute: full   (activations are computed again; changes no result)")
        if self.world.size > 1 and not self.plan.layout.is_sharded:
            edits.append("parallel.strategy: fsdp   (the processes share one model; changes no result)")
        edits.append(f"data.max_length: {max(8, data.max_length // 2)}   (changes results)")
        if self.config.lora is None:
            edits.append("lora: {rank: 8}   (trains adapters instead of all weights)")
        if train.precision != "fp8":  # which keeps the least
            edits.append(f"train.precision: {'bf16' if train.precision != 'bf16' else 'auto'}")
        return [f"  {edit}" for edit in edits]


def read_shortage(run: RunFolder) -> tuple[int, int | None] | None:
    """(what a micro-batch may hold, with how many tokens memory ran out) in a run whose memory was short before."""
    known = read_json(run.path / "memory.json") or {}
    most, ran_out_at = known.get("most_tokens_at_once"), known.get("ran_out_at_tokens")
    if not isinstance(most, int) or most < 1:
        return None
    return most, ran_out_at if isinstance(ran_out_at, int) else None


def _remember(run: RunFolder, tokens: int, ran_out_at: int) -> None:
    write_json_atomic(run.path / "memory.json", {"most_tokens_at_once": tokens, "ran_out_at_tokens": ran_out_at})


def _size(shortage: Shortage | None) -> tuple[int, int, str] | None:
    return shortage.size if shortage else None
