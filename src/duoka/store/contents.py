"""What a checkpoint holds, as live objects: saved from them, filled in place on loading."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from duoka.optim.build import optimizer_tensors
from duoka.parallel.apply import Parallelized
from duoka.parallel.ddp import DdpExchange
from duoka.parallel.precision import Numerics
from duoka.store.state import TrainState


@dataclass
class Contents:
    """What a run saves and restores: live objects, filled in place on loading."""

    parallel: Parallelized
    optimizer: torch.optim.Optimizer
    numerics: Numerics
    state: TrainState

    def tensors(self) -> dict[str, torch.Tensor]:
        named = self.parallel.named_trainable()
        tensors = {f"model.{name}": parameter.detach() for name, parameter in named.items()}
        tensors |= {f"optim.{name}": value for name, value in optimizer_tensors(self.optimizer, named).items()}
        exchange = self.parallel.exchange
        if isinstance(exchange, DdpExchange) and exchange.power is not None:
            tensors |= exchange.power.tensors()
        return tensors
