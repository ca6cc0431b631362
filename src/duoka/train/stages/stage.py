"""What a run optimizes: the parts of a stage that training asks for, and `build_stage`, which finds a config's own.

A stage is a file here and a row in config/stages.py, which says what must be known before torch is there: the kinds of
records it reads, and the models it holds beside the trained one. The engine knows a stage as an `Objective`.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from duoka.comm.world import World
from duoka.config.schema import RunConfig
from duoka.data.build_feed import Feed
from duoka.data.feed.loader import Batch, GlobalBatch
from duoka.data.prepare import PreparedData
from duoka.data.tokens.tokenizer import ChatTokenizer
from duoka.model.build import LossModel
from duoka.parallel.engine import Engine
from duoka.parallel.measure import Measured, measure_loss
from duoka.parallel.objective import Sums
from duoka.plan.layout import Layout
from duoka.runs.folder import RunFolder
from duoka.train.moments import Concern
from duoka.train.record import Recorder


@dataclass(frozen=True)
class Around:
    """What a stage may need of a run beside its config, when its feed is made."""

    base: Path  # of the YAML's relative paths
    folder: Path  # of the base model
    run: RunFolder
    model: str  # what tells this base model from others
    pad_id: int
    tokenizer: Callable[[], ChatTokenizer]
    engine: Engine
    layout: Layout
    write: Callable[[Path], None]  # the trained weights into a folder, as the run's result; on all ranks together
    release: Callable[[], None]  # before weights change outside of an optimizer's step: a save may be reading them


class Stage(ABC):
    """An `Objective` (parallel/objective.py says what its methods promise), made from a run's config.

    Losses are functions of what the model answers (LossModel.forward: a summed loss, or log-probabilities of each
    target), called as `model(...)`, so that DDP and FSDP see the call. They are sums: what a sum is divided by is a
    global count of the optimizer step, so that no split into ranks and micro-batches can change a number.
    """

    metrics: Mapping[str, str] = {}  # what it logs -> the denominator of that

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def describe(self) -> str:
        """What is minimized, for the banner, where the stage's name does not say it."""
        return ""

    def take_data(self, prepared: PreparedData) -> None:
        """Learn of the data what denominators need; by default, nothing."""
        return

    def take_start(self, engine: Engine) -> None:
        """Learn of the weights that the run begins with, before a checkpoint is read; by default, nothing."""
        return

    def feed(self, feed: Feed, around: Around) -> Feed:
        """What the loop asks for batches: the data's own feed, or one that makes something of it."""
        return feed

    def concerns(self, record: Recorder) -> tuple[Concern, ...]:
        """What the stage sees to between steps."""
        return ()

    def after_step(self) -> None:
        """Keep of a step what later ones need, on all ranks together; by default, nothing. A run's concerns call it."""
        return

    def end(self) -> None:
        """No batch is asked for any more, however the run ended: end processes of the stage's own."""
        return

    def beside(self, engine: Engine) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Files of the result beside the model's own, with their tensors; all ranks call it. By default, none."""
        return {}

    def wrap(self, lm: torch.nn.Module, *, own_logits: bool = False) -> LossModel:
        """The model that is trained, before its layout is laid on it; `own_logits` is LossModel's."""
        return LossModel(lm, own_logits=own_logits)

    def why_left_out(self, batch: GlobalBatch) -> str:
        """Of a global batch that holds nothing to learn from, on no rank: why; it is left out. By default, none is."""
        return ""

    @abstractmethod
    def denominators(self, batch: GlobalBatch) -> Mapping[str, float]: ...

    @abstractmethod
    def sums(self, model: torch.nn.Module, micro: Batch, device: torch.device) -> Sums: ...

    def check_first(self, metrics: Mapping[str, float], precision: str) -> None:
        """Look at a run's first step: raises where its numbers cannot be; by default, it never does."""
        return

    def measure(
        self,
        model: torch.nn.Module,
        batches: Iterable[Batch],
        world: World,
        precision: str,
        is_stopped: Callable[[], bool],
        token_bytes: torch.Tensor | None,
    ) -> Measured | None:
        """An evaluation, as measure_loss says it: here the likelihood of targets, whatever training makes of it."""
        return measure_loss(model, batches, world, precision, is_stopped, token_bytes)


def build_stage(config: RunConfig) -> Stage:
    module, _, name = config.stage.kind.stage.partition(":")
    made = getattr(importlib.import_module(module), name)(config)
    assert isinstance(made, Stage)
    return made
