"""Where a run stands. With the model's and the optimizer's tensors it is all that a checkpoint holds."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import numpy as np
import torch

from duoka.data.feed.loader import GlobalBatch, Place


@dataclass
class TrainState:
    """Counts since the run began; `epoch`, `index` and `streams` are the place of the next global batch."""

    step: int = 0
    epoch: int = 0
    index: int = 0
    streams: list[list[int]] = field(default_factory=list)  # the cursor of each, of data that is read while training
    num_samples: int = 0
    num_tokens: int = 0
    num_targets: int = 0
    best_loss: float | None = None  # of the evaluations so far
    best_step: int | None = None
    eval_pending: bool = False  # an evaluation was due after this step, and a request to stop came in the middle of it

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
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def read_random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The generators that training draws from (dropout, and what people's data does to samples): this rank's."""
    version, numbers, spare = random.getstate()
    _, keys, place, has_spare, other = np.random.get_state(legacy=True)
    states = {
        "cpu": torch.get_rng_state(),
        "python": torch.tensor([version, *numbers], dtype=torch.int64),
        "python_spare": torch.tensor([math.nan if spare is None else spare], dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), place, has_spare], dtype=torch.int64),
        "numpy_spare": torch.tensor([other], dtype=torch.float64),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(states: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    if "python" in states:  # checkpoints of older versions hold torch's alone
        version, *numbers = states["python"].tolist()
        spare = float(states["python_spare"])
        random.setstate((version, tuple(numbers), None if math.isnan(spare) else spare))
        *keys, place, has_spare = states["numpy"].tolist()
        state = ("MT19937", np.array(keys, np.uint32), place, has_spare, float(states["numpy_spare"]))
        np.random.set_state(state)
