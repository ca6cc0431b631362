"""The objective of language modelling: the mean loss over the target tokens of the global batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from duoka.data.feed.loader import Batch, GlobalBatch
from duoka.parallel.inputs import model_inputs
from duoka.parallel.objective import Sums


class TokenLoss:
    """Of a LossModel, which answers a micro-batch with the sum of its target tokens' losses."""

    metric_names: tuple[str, ...] = ()

    def denominators(self, batch: GlobalBatch) -> Mapping[str, float]:
        return {"tokens": batch.global_targets}

    def sums(self, model: torch.nn.Module, micro: Batch, device: torch.device) -> Sums:
        loss, _ = model(**model_inputs(micro, device))
        return Sums({"tokens": loss})
