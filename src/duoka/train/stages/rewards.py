"""Stage reward: a model that scores answers, so that the better one of each preference pair scores higher.

-log sigma(R_w - R_l - m) of the scores R of both answers (arXiv 2203.02155) and the pair's margin m, where the data has
one (2307.09288), and `centering` times (R_w + R_l)^2 beside it (2312.09244): a difference says nothing of where scores
lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.nn.functional as F

from duoka.comm.world import World
from duoka.config.schema import RunConfig
from duoka.data.feed.answers import PADDING, AnswerRows
from duoka.data.feed.loader import Batch, GlobalBatch
from duoka.data.prepare import PreparedData
from duoka.model.build import LossModel
from duoka.model.dropout import stop_dropout
from duoka.model.scores import ScoreModel
from duoka.parallel.inputs import model_inputs
from duoka.parallel.measure import Measured, measure_objective
from duoka.parallel.objective import Sums
from duoka.train.stages.stage import Stage


class Rewards(Stage):
    """Mean loss of the pairs of the global batch."""

    metrics: Mapping[str, str] = dict.fromkeys(("accuracy", "margin", "reward_chosen", "reward_rejected"), "pairs")

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.centering = config.stage.centering or 0.0
        self.pad_id = 0
        self.has_margins = False

    def describe(self) -> str:
        beside = f" + {self.centering:g} x (sum of both scores)^2" if self.centering else ""
        less = ", less the pair's margin" if self.has_margins else ""
        return f"-log sigmoid of the better answer's score less the worse one's{less}{beside}"

    def take_data(self, prepared: PreparedData) -> None:
        self.pad_id = prepared.pad_id
        rows = prepared.train
        self.has_margins = isinstance(rows, AnswerRows) and rows.margins is not None

    def wrap(self, lm: torch.nn.Module, *, own_logits: bool = False) -> LossModel:
        stop_dropout(lm, but_adapters=True)  # what is dropped at random would count as a difference between answers
        return ScoreModel(lm, self.pad_id)

    def denominators(self, batch: GlobalBatch) -> Mapping[str, float]:
        return {"pairs": float(batch.num_samples)}

    def counts(self, micro: Batch) -> Mapping[str, float]:
        return {"pairs": float(micro.num_samples)}

    def sums(self, model: torch.nn.Module, micro: Batch, device: torch.device) -> Sums:
        scores, _ = model(**model_inputs(micro, device), answer="scores")
        if micro.sides is None:  # a rank without pairs, or a rehearsal
            return Sums({"pairs": scores.sum() * 0.0})
        real = (micro.sides != PADDING).nonzero().view(-1, 2)  # (pairs, 2): chosen and rejected, side by side
        places = last_tokens(micro, self.pad_id)[real].to(device)
        better, worse = scores.reshape(-1)[places].double().unbind(dim=1)
        ahead = better - worse if micro.margins is None else better - worse - micro.margins.to(device)
        loss = -F.logsigmoid(ahead)
        if self.centering:
            loss = loss + self.centering * (better + worse) ** 2
        with torch.no_grad():
            metrics = {
                "accuracy": (better > worse).double().sum(),
                "margin": (better - worse).sum(),
                "reward_chosen": better.sum(),
                "reward_rejected": worse.sum(),
            }
        return Sums({"pairs": loss.sum()}, metrics)

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


def last_tokens(micro: Batch, pad_id: int) -> torch.Tensor:
    """(documents,) on the host: the place, among all tokens, of each document's last one that is not `pad_id`."""
    ids = micro.input_ids
    edges = torch.arange(len(ids) + 1) * ids.shape[1] if micro.boundaries is None else micro.boundaries.long()
    starts, ends = edges[:-1].tolist(), edges[1:].tolist()
    is_token = ids.reshape(-1) != pad_id
    found = []
    for start, end in zip(starts, ends, strict=True):
        inside = is_token[start:end].nonzero()
        found.append(start + int(inside[-1]) if len(inside) else end - 1)
    return torch.tensor(found, dtype=torch.long)
