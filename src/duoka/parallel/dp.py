"""nn.DataParallel: one process drives all GPUs of a machine. For short trials; `ddp` is faster and just as exact.

Each call it copies the weights to every GPU, hands each a part of the rows, runs one thread per GPU, and brings the
answers back; the backward pass adds the gradients on the first GPU. Parts may be uneven: answers are sums over target
tokens, so that adding them is exact. Without several GPUs the module itself is called.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import parallel

from duoka.model.build import Answer, LossModel
from duoka.parallel.engine import Engine, EngineSpec
from duoka.parallel.precision import compute_in
from duoka.parallel.single import bring


class Replicas(torch.nn.Module):
    """LossModel over several GPUs: the same call, the same answer."""

    def __init__(self, bare: LossModel, device_ids: list[int], precision: str) -> None:
        super().__init__()
        self.replicas = torch.nn.DataParallel(_Precise(bare, precision), device_ids=device_ids)
        self._holds = False
        self._held: list[torch.nn.Module] = []

    @contextlib.contextmanager
    def replicated_once(self) -> Iterator[None]:
        """For passes between which the weights do not change: they are copied at the first, and used by all."""
        self._holds = True
        try:
            yield
        finally:
            self._holds, self._held = False, []

    def forward(
        self, *, answer: Answer = "loss", **inputs: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        inputs.pop("places", None)  # of the whole batch's targets; each GPU gets a part of its rows
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's note that it gathers scalars: they are meant to be
            first, second = self._ask_held(answer, inputs) if self._holds else self.replicas(answer=answer, **inputs)
        return (first.sum(), second.sum()) if answer == "loss" else (first, second)

    def _ask_held(self, answer: Answer, inputs: dict[str, torch.Tensor | None]) -> tuple[Any, ...]:
        devices = self.replicas.device_ids
        if not self._held:
            self._held = parallel.replicate(self.replicas.module, devices, detach=True)
        parts, named = parallel.scatter_gather.scatter_kwargs((), inputs, devices)
        named = tuple({**one, "answer": answer} for one in named)
        # A short last batch has parts for the first GPUs only.
        answers = parallel.parallel_apply(self._held[: len(named)], parts, named, devices[: len(named)])
        join, device = torch.stack if answer == "loss" else torch.cat, answers[0][0].device
        return tuple(
            None if part[0] is None else join([one.to(device) for one in part]) for part in zip(*answers, strict=True)
        )


class _Precise(torch.nn.Module):
    """The precision is set inside: DataParallel's threads forget which half type the caller chose."""

    def __init__(self, bare: LossModel, precision: str) -> None:
        super().__init__()
        self.bare = bare
        self.precision = precision

    def forward(self, input_ids: torch.Tensor, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        with compute_in(self.precision, input_ids.device):
            answer: tuple[torch.Tensor, torch.Tensor | None] = self.bare(input_ids, **inputs)
        return answer


class DataParallel(Engine):
    """The model over all GPUs of this machine; itself when there are fewer than two."""

    def __init__(self, spec: EngineSpec) -> None:
        bare = spec.bare
        assert isinstance(bare, LossModel)
        bring(spec)
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        super().__init__(spec, Replicas(bare, list(range(count)), spec.layout.precision) if count > 1 else None)

    @contextlib.contextmanager
    def evaluate(self) -> Iterator[torch.nn.Module]:
        """On all GPUs, copied to them once."""
        if not isinstance(self.model, Replicas):
            yield self.bare
            return
        with self.model.replicated_once():
            yield self.model
