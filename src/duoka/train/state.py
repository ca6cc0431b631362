"""Where a run stands. With the model's and the optimizer's tensors it is all that a checkpoint holds."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from duoka.data.loader import GlobalBatch, Place


@dataclass
class TrainState:
    """Counts since the run began; `epoch`, `index` and `streams` are the place of the next global batch."""

    step: int = 0
    epoch: int = 0
    index: int = 0
    streams: list[list[int]] = field(default_factory=list)  # the cursor of each, of data that is read while learned
    num_samples: int = 0
    num_tokens: int = 0
    num_targets: int = 0
    best_loss: float | None = None  # of the evaluations so far
    best_step: int | None = None

    @property
    def place(self) -> Place:
        return Place(self.epoch, self.index, tuple(tuple(cursor) for cursor in self.streams))

    def advance(self, batch: GlobalBatch) -> None:
        """One optimizer step was done on `batch`."""
        self.step += 1
        self.epoch, self.index = batch.after.epoch, batch.after.index
        self.streams = [list(cursor) for cursor in batch.after.streams]
        self.num_samples += batch.num_samples
        self.num_tokens += batch.num_tokens
        self.num_targets += batch.global_targets


def seed_everything(seed: int) -> None:
    import random

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def read_random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The generators that training draws from (dropout): this rank's."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(states: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
