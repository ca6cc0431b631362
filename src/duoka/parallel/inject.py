"""Faults on order, for `duoka chaos` and tests: DUOKA_INJECT="nan step=7 rank=1; oom step=3". Unset: nothing happens.

Kinds: nan and inf (the loss of a micro-batch), nan_grad (one value of this rank's gradients, after their exchange), oom
(the allocator says no), hang (sleeps for ever before its backward pass), drift (one weight changes after the step).
Each strikes once per process (`times=always`: every time), on all ranks unless one is named, and only in the run's
first world unless `world=N` (the restarts before it) says otherwise.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping

import torch

from duoka.process.environ import INJECT
from duoka.process.rank import NUM_RESTARTS


def is_ordered(kind: str, step: int, rank: int) -> bool:
    """True once for each order that fits."""
    if not os.environ.get(INJECT):
        return False
    world = int(os.environ.get(NUM_RESTARTS, "0"))
    for order in os.environ[INJECT].split(";"):
        name, *settings = order.split()
        wanted = {"rank": str(rank), "world": "0"} | dict(one.split("=") for one in settings)
        here = {"step": str(step), "rank": str(rank), "world": str(world)}
        if name == kind and (order, step) not in _DONE and all(wanted.get(key) == here[key] for key in here):
            if wanted.get("times") != "always":
                _DONE.add((order, step))
            return True
    return False


def strike_loss(loss: torch.Tensor, step: int, rank: int) -> torch.Tensor:
    """The loss, or what a fault makes of it."""
    for kind in ("nan", "inf"):
        if is_ordered(kind, step, rank):
            return loss * float(kind)
    return loss


def strike_forward(step: int, rank: int) -> None:
    if is_ordered("oom", step, rank):
        raise torch.OutOfMemoryError("injected: tried to allocate 2.00 GiB")
    while is_ordered("hang", step, rank):
        time.sleep(3600.0)


def strike_gradients(gradients: Callable[[], Iterable[torch.Tensor]], step: int, rank: int) -> None:
    """`gradients` finds this rank's parts of them."""
    if is_ordered("nan_grad", step, rank):
        next(part for part in gradients() if part.numel()).view(-1)[0] = torch.nan


def strike_weights(named: Mapping[str, torch.Tensor], step: int, rank: int) -> None:
    if is_ordered("drift", step, rank):
        with torch.no_grad():
            next(iter(named.values())).view(-1)[0] += 1e-3


def forget() -> None:
    """Orders that were carried out may strike again: for several runs in one process."""
    _DONE.clear()


_DONE: set[tuple[str, int]] = set()
