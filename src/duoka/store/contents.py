"""What a checkpoint holds, as live objects: saved from them, filled in place on loading."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from duoka.parallel.engine import Engine
from duoka.parallel.precision import Numerics
from duoka.store.state import TrainState


@dataclass
class Contents:
    """What a run saves and restores: live objects, filled in place on loading."""

    engine: Engine
    optimizer: torch.optim.Optimizer
    state: TrainState

    @property
    def numerics(self) -> Numerics:
        return self.engine.numerics

    def tensors(self) -> dict[str, torch.Tensor]:
        tensors = {f"model.{name}": value for name, value in self.engine.trained_tensors().items()}
        tensors |= {f"optim.{name}": value for name, value in self.engine.optimizer_tensors(self.optimizer).items()}
        return tensors | self.engine.extra_tensors()

    def filled(self) -> None:
        """These were filled in place: bring up to date what is made of them."""
        self.engine.filled()
