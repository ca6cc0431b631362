"""Stages sft, pretrain, mid: the mean loss over target tokens of the global batch; which tokens those are, data say."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from duoka.data.feed.loader import Batch, GlobalBatch
from duoka.model.build import LossModel
from duoka.model.loss import Goal
from duoka.parallel.inputs import model_inputs
from duoka.parallel.objective import Sums
from duoka.train.stages.stage import Stage


class Likelihood(Stage):
    """-log p of each target token, or what `train.loss` and `train.label_smoothing` make of it."""

    def wrap(self, lm: torch.nn.Module, *, own_logits: bool = False) -> LossModel:
        goal = Goal(self.config.train.label_smoothing, by_probability=self.config.train.loss == "dft")
        return LossModel(lm, goal, own_logits=own_logits)

    def why_left_out(self, batch: GlobalBatch) -> str:
        if batch.global_targets:
            return ""
        # Rows in which each document has one token: a mean over them is 0/0.
        return f"its batch of {batch.num_samples} holds no token to learn, and was left out"

    def denominators(self, batch: GlobalBatch) -> Mapping[str, float]:
        return {"tokens": batch.global_targets}

    def sums(self, model: torch.nn.Module, micro: Batch, device: torch.device) -> Sums:
        loss, _ = model(**model_inputs(micro, device))
        return Sums({"tokens": loss})
