"""The arithmetic of a step: the one table of precisions, autocast, and the loss scaler of fp16."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from duoka.model.dtypes import BY_PRECISION
from duoka.model.onednn_products import use_onednn
from duoka.model.wide_products import widen_products
from duoka.torch_private import found_inf

HALF = {name: BY_PRECISION[name] for name in ("bf16", "fp16", "fp8")}


def _prepare(precision: str, device: torch.device) -> None:
    if device.type == "cpu" and precision == "fp32":
        use_onednn()
    if device.type == "cpu" and HALF.get(precision) is torch.bfloat16:
        widen_products()


@contextlib.contextmanager
def compute_in(precision: str, device: torch.device) -> Iterator[None]:
    """fp32 as it is, bf16 and fp16 through autocast over fp32 masters; fp8 as bf16, with modules of model/fp8.py."""
    if precision == "fp32":
        yield
        return
    _prepare(precision, device)
    with torch.autocast(device.type, dtype=HALF[precision]):
        yield


@dataclass(frozen=True)
class Numerics:
    """The arithmetic of a step; the scaler does nothing unless the precision is fp16."""

    precision: str
    scaler: torch.amp.GradScaler

    def note_overflow(self, optimizer: torch.optim.Optimizer) -> None:
        """The scaler knows this rank's gradients only, and all ranks must go on with one scale."""
        if self.scaler.is_enabled():
            for found in found_inf(self.scaler, optimizer):
                found.fill_(1.0)


def build_numerics(precision: str, device: torch.device) -> Numerics:
    _prepare(precision, device)  # also for engines of others, which enter autocast themselves
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    if scaler.is_enabled():
        # It makes its scale at its first product, and a rank without memory for its first pass needs it before that.
        scaler.scale(torch.zeros((), device=device))
    return Numerics(precision, scaler)
