"""Stage dpo: preference pairs, their better answer before their worse one, by any of the losses of pair_losses.py.

Where a loss has a reference, the log-probabilities of all answers at the run's start are in the batches
(train/reference.py puts them there): one model is in memory, the one that is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch

from duoka.comm.world import World
from duoka.config.schema import RunConfig
from duoka.data.feed.answers import CHOSEN, PADDING
from duoka.data.feed.loader import Batch, GlobalBatch
from duoka.data.feed.pairs import PairRows
from duoka.data.prepare import PreparedData
from duoka.model.build import LossModel
from duoka.model.dropout import stop_dropout
from duoka.parallel.inputs import model_inputs
from duoka.parallel.measure import Measured, measure_objective
from duoka.parallel.objective import Sums
from duoka.train.stages.documents import count_targets, document_sums, pair_weights, reference_of
from duoka.train.stages.pair_losses import Answers, PairSettings, pair_loss, reward
from duoka.train.stages.stage import Stage
from duoka.train.stages.start import check_start


class Pairs(Stage):
    """Mean loss of the pairs of the global batch, and -log p of their better answers beside it where that is asked."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.settings = PairSettings.of(config.stage)
        self.has_reference = config.stage.has_reference
        names = ["accuracy", "margin", "reward_chosen", "reward_rejected", "logp_chosen", "logp_rejected"]
        self.metrics = dict.fromkeys([*names, *(["drift"] if self.has_reference else [])], "pairs")
        self._chosen_targets: np.ndarray | None = None

    def wrap(self, lm: torch.nn.Module, *, own_logits: bool = False) -> LossModel:
        # What is dropped at random would count as a difference: from the reference, or between both answers.
        stop_dropout(lm, but_adapters=not self.has_reference)
        return LossModel(lm, own_logits=own_logits)

    def describe(self) -> str:
        return self.settings.sentence()

    def take_data(self, prepared: PreparedData) -> None:
        if self.settings.sft_weight and self.settings.sft_over_tokens:
            assert isinstance(prepared.train, PairRows)
            self._chosen_targets = prepared.train.chosen_targets

    def denominators(self, batch: GlobalBatch) -> Mapping[str, float]:
        pairs = {"pairs": float(batch.num_samples)}
        if not self.settings.sft_weight:
            return pairs
        if self._chosen_targets is None or not len(batch.sample_ids):  # without ids: a rehearsal, thrown away
            return pairs | {"chosen": pairs["pairs"]}
        return pairs | {"chosen": float(self._chosen_targets[batch.sample_ids].sum())}

    def counts(self, micro: Batch) -> Mapping[str, float]:
        pairs = float(micro.num_samples)
        if not self.settings.sft_over_tokens or micro.sides is None:
            return {"pairs": pairs, "chosen": pairs}
        return {"pairs": pairs, "chosen": float(count_targets(micro)[micro.sides == CHOSEN].sum())}

    def sums(self, model: torch.nn.Module, micro: Batch, device: torch.device) -> Sums:
        logps, _ = model(**model_inputs(micro, device), answer="logps")
        if micro.sides is None:  # a rank without pairs, or a rehearsal
            return Sums({name: -logps.sum() for name in self.denominators_named})
        chosen, rejected = self._answers(logps, micro)
        losses = {"pairs": pair_loss(chosen, rejected, self.settings).sum()}
        if self.settings.sft_weight:
            better = chosen.whole if self.settings.sft_over_tokens else chosen.whole / chosen.count
            losses["chosen"] = -self.settings.sft_weight * better.sum()
        with torch.no_grad():
            return Sums(losses, self._metrics(chosen, rejected))

    @property
    def denominators_named(self) -> tuple[str, ...]:
        return ("pairs", "chosen") if self.settings.sft_weight else ("pairs",)

    def _answers(self, logps: torch.Tensor, micro: Batch) -> tuple[Answers, Answers]:
        assert micro.sides is not None
        real = (micro.sides != PADDING).nonzero().view(-1, 2)  # (pairs, 2): chosen and rejected, side by side
        counts = count_targets(micro)
        weighted = whole = document_sums(logps, micro)
        if self.settings.ld_alpha != 1:
            weights = pair_weights(micro, self.settings.ld_alpha)
            weighted = document_sums(logps.double() * weights.to(logps.device), micro)
        reference = reference_of(micro)
        known = torch.zeros_like(counts) if reference is None else reference
        device = logps.device

        def side(at: torch.Tensor) -> Answers:
            there = at.to(device)
            return Answers(weighted[there], whole[there], counts[at].to(device), known[at].to(device))

        return side(real[:, 0]), side(real[:, 1])

    def _metrics(self, chosen: Answers, rejected: Answers) -> Mapping[str, torch.Tensor]:
        better, worse = reward(chosen, self.settings), reward(rejected, self.settings)
        found = {
            "accuracy": (better > worse).double().sum(),
            "margin": (better - worse).sum(),
            "reward_chosen": better.sum(),
            "reward_rejected": worse.sum(),
            "logp_chosen": chosen.whole.sum(),
            "logp_rejected": rejected.whole.sum(),
        }
        if self.has_reference:
            found["drift"] = ((chosen.moved.abs() + rejected.moved.abs()) / (chosen.count + rejected.count)).sum()
        return found

    def check_first(self, metrics: Mapping[str, float], precision: str) -> None:
        """At its first step the model is the reference: loss ln 2, margin 0. Else something is wrong that no curve of
        a loss would ever show."""
        check_start(metrics.get("drift", 0.0), precision, f"rewards by {metrics.get('margin', 0.0):.3g}")

    def measure(
        self,
        model: torch.nn.Module,
        batches: Iterable[Batch],
        world: World,
        precision: str,
        is_stopped: Callable[[], bool],
        token_bytes: torch.Tensor | None,
    ) -> Measured | None:
        return measure_objective(self, model, batches, world, precision, is_stopped)
