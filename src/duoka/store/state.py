"""Where a run stands. With the model's and the optimizer's tensors it is all that a checkpoint holds."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

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
    best_by: str | None = None  # what these two are of, as checkpoint.best_by has it
    eval_pending: bool = False  # an evaluation was due after this step, and a request to stop came in the middle of it

    @property
    def place(self) -> Place:
        return Place(self.epoch, self.index, tuple(tuple(cursor) for cursor in self.streams))

    def advance(self, batch: GlobalBatch, *, has_learned: bool = True) -> None:
        """One optimizer step was done on `batch`, or it was left out: then nothing of it counts but its place."""
        self.step += 1
        self.epoch, self.index = batch.after.epoch, batch.after.index
        self.streams = [list(cursor) for cursor in batch.after.streams]
        if not has_learned:
            return
        self.num_samples += batch.num_samples
        self.num_tokens += batch.num_tokens
        self.num_targets += batch.global_targets


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@dataclass(frozen=True)
class Generators:
    """This rank's random generators as they are at one moment: cheap to take, before each batch if need be."""

    cpu: torch.Tensor
    python: tuple[Any, ...]
    numpy: Any
    cuda: torch.Tensor | None

    def tensors(self) -> dict[str, torch.Tensor]:
        version, numbers, spare = self.python
        _, keys, place, has_spare, other = self.numpy
        states = {
            "cpu": self.cpu,
            "python": torch.tensor([version, *numbers], dtype=torch.int64),
            "python_spare": torch.tensor([math.nan if spare is None else spare], dtype=torch.float64),
            "numpy": torch.tensor([*keys.tolist(), place, has_spare], dtype=torch.int64),
            "numpy_spare": torch.tensor([other], dtype=torch.float64),
        }
        return states if self.cuda is None else {**states, "cuda": self.cuda}


def take_generators(device: torch.device) -> Generators:
    """The generators that training draws from (dropout, and what people's data does to samples)."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return Generators(torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=True), cuda)


def read_random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """This rank's generators as tensors, as checkpoints hold them."""
    return take_generators(device).tensors()


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
