"""Local SGD: each rank steps by itself, and every few steps the ranks take the mean of their weights."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from duoka.errors import ConfigError


class LocalSGD:
    """`with LocalSGD(accelerator, model, local_sgd_steps=8) as local: ...; local.step()` after each step."""

    def __init__(self, accelerator: Any, model: torch.nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        self.enabled = enabled and accelerator.num_processes > 1
        if self.enabled and accelerator.layout.is_sharded:
            raise ConfigError("LocalSGD needs whole weights on each rank", fix='write:   Accelerator(strategy="ddp")')
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self.num_steps = 0

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self.accelerator.window.is_local = True
            self._quiet = self.model.no_sync()  # type: ignore[operator]
            self._quiet.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.enabled:
            self._quiet.__exit__(kind, error, trace)
            self.accelerator.window.is_local = False
            if kind is None:
                self._average()

    def step(self) -> None:
        """An optimizer step, or a micro-batch of one, is done."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        for parameter in self.accelerator.unwrap_model(self.model).parameters():
            parameter.copy_(self.accelerator.reduce(parameter, "mean"))
