"""Rates of `optim` that no weight of this model has: said by `duoka plan` and at the start of a run.

What the config alone tells, config/rules_optim.py says.
"""

from __future__ import annotations

from duoka.config.schema import RunConfig
from duoka.plan.shape import ModelShape
from duoka.plan.trained_weights import trains_embedding, trains_head


def unread_rates(config: RunConfig, shape: ModelShape) -> list[str]:
    """A line for each."""
    optim, chosen, notes = config.optim, config.train_only, list[str]()
    if config.lora is not None:
        return notes
    if optim.embedding_lr is not None and chosen is not None and not trains_embedding(shape, chosen):
        notes.append(
            f"optim.embedding_lr is {optim.embedding_lr:g}, and train_only leaves the embedding as it is: it changes "
            "nothing"
        )
    if optim.head_lr is None or config.stage.kind.scores:
        return notes
    if shape.tied:
        notes.append(
            f"optim.head_lr is {optim.head_lr:g}, and this model's head is its embedding (tie_word_embeddings): it "
            "changes nothing, embedding_lr is the rate of both"
        )
    elif chosen is not None and not trains_head(shape, chosen):
        notes.append(f"optim.head_lr is {optim.head_lr:g}, and train_only leaves the head as it is: it changes nothing")
    return notes
