"""Passes without gradients over a global batch, before its losses: for what these need to know of all of it.

One number of one sample then depends on every other sample of the step, wherever it is computed; so it is summed over
all ranks, in one exchange, before any rank computes a loss.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch

from duoka.comm.ledger import LEDGER
from duoka.data.feed.loader import GlobalBatch
from duoka.parallel.engine import Engine
from duoka.parallel.objective import LooksAhead
from duoka.parallel.out_of_memory import Shortage, describe_shortage, is_out_of_memory
from duoka.parallel.precision import compute_in


@dataclass(frozen=True)
class Looked:
    """`is_short`: of memory, on some rank; `shortage`: on this one. `pass_s` and `wait_s` are
    seconds: of the passes, and of waiting for others."""

    is_short: bool = False
    shortage: Shortage | None = None
    pass_s: float = 0.0
    wait_s: float = 0.0


@torch.no_grad()
def look_ahead(engine: Engine, batch: GlobalBatch, objective: LooksAhead) -> Looked:
    """The objective's look at all micro-batches of all ranks; they call it together."""
    device, shortage = engine.world.device, None
    began, waited = time.perf_counter(), LEDGER.waited_s
    sums = torch.zeros(objective.num_looked, dtype=torch.float64, device=device)
    with engine.evaluate() as model:
        was_training = model.training
        model.eval()
        for micro in batch.micro_batches:
            engine.world.heart.tell("forward")
            try:
                with compute_in(engine.numerics.precision, device):
                    sums += objective.look(model, micro, device)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                shortage = describe_shortage(micro, error, engine.world, is_last=False)
                break
        model.train(was_training)
    if shortage is not None:
        if engine.exchanges_in_passes:  # the others wait in the middle of this one
            return Looked(is_short=True, shortage=shortage)
        shortage = replace(shortage, rejoined=True)
    *totals, num_short = engine.mesh.loss.sum([*sums.tolist(), float(shortage is not None)])
    if num_short:
        return Looked(is_short=True, shortage=shortage)
    objective.has_looked(totals, batch)
    wait_s = LEDGER.waited_s - waited
    return Looked(pass_s=time.perf_counter() - began - wait_s, wait_s=wait_s)
