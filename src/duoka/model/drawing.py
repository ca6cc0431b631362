"""Nothing in a counted training pass may draw: what torch's generators give depends on how a batch is laid out.

LossModel asks after each pass whether a generator moved. What drew is looked for, and is refused with its name, unless
the answer does not depend on it (layer dropping at a share of 0 draws, and compares with 0).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch

from duoka.errors import ConfigError
from duoka.torch_private import TorchDispatchMode


def read_generators(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The states of the default generators that a pass on this device can draw from."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), cuda


def has_drawn(before: tuple[torch.Tensor, torch.Tensor | None], device: torch.device) -> bool:
    pairs = zip(before, read_generators(device), strict=True)
    return any(one is not None and not torch.equal(one, other) for one, other in pairs if other is not None)


def check_harmless(answer: Callable[[], torch.Tensor], device: torch.device) -> None:
    """Refuse a model whose answer depends on what it draws. `answer` computes it."""
    devices = [device] if device.type == "cuda" else []
    found, answers = _Finder(device), []
    with torch.no_grad():
        for seed in range(4):
            with torch.random.fork_rng(devices):
                torch.manual_seed(seed)
                with found:
                    answers.append(answer())
    if any(not torch.equal(one, answers[0]) for one in answers):
        raise ConfigError(
            f"the model draws random numbers in training: {', '.join(found.drawn) or 'by itself'}",
            where="they depend on how a batch is laid out, so that another split would give other results",
            fix="set what draws them (noise of a router, layer dropping, ...) to 0 in the model's config.json",
        )


class _Finder(TorchDispatchMode):
    """Notes which operations draw, and where in the model's code."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.drawn: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = read_generators(self.device) if torch.Tag.nondeterministic_seeded in func.tags else None
        answer = func(*args, **(kwargs or {}))
        if before is not None and has_drawn(before, self.device):  # attention has the tag too, and need not draw
            frames = [f for f in traceback.extract_stack()[:-1] if "/torch/" not in f.filename]
            where = f" in {frames[-1].name} ({frames[-1].filename.rsplit('/', 1)[-1]}, line {frames[-1].lineno})"
            self.drawn.setdefault(f"{func.__name__.split('.')[0]}{where if frames else ''}")
        return answer
