"""The loss over the evaluation data, as a function that the loop calls."""

from __future__ import annotations

from collections.abc import Callable

import torch

from duoka.config.schema import RunConfig
from duoka.data.feed.loader import eval_batches
from duoka.data.prepare import PreparedData
from duoka.parallel.engine import Engine
from duoka.parallel.measure import Measured
from duoka.plan.layout import Layout
from duoka.train.stages.stage import Stage


def build_evaluation(
    prepared: PreparedData, config: RunConfig, layout: Layout, engine: Engine, stage: Stage
) -> Callable[[Callable[[], bool]], Measured | None] | None:
    """None where there is nothing to evaluate on. The function returns None when a rank was asked to stop."""
    store, text_bytes, mesh = prepared.eval, prepared.text_bytes, engine.mesh
    if store is None:
        return None
    sizes = None if text_bytes is None else torch.from_numpy(text_bytes)

    def evaluate(is_stopped: Callable[[], bool]) -> Measured | None:
        batches = eval_batches(
            store, rank=mesh.data.rank, num_ranks=mesh.data.size, micro=layout.micro, packing=layout.packing,
            max_length=config.sample_tokens, pad_id=prepared.pad_id,
        )  # fmt: skip

        def all_are_stopped() -> bool:
            return mesh.everyone.sum([float(is_stopped())])[0] > 0

        # Ranks that compute a pass together, or gather its layers: none may leave it before the others.
        ask = all_are_stopped if layout.is_sharded or layout.axes else is_stopped
        with engine.evaluate() as model:
            parts = map(engine.part_of, batches)
            return stage.measure(model, parts, mesh.loss, layout.precision, ask, sizes)

    return evaluate
