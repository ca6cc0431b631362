"""How long a GPU took for the phases of a step: events beside its work, read when the host has waited for it anyway."""

from __future__ import annotations

from typing import Literal

import torch

Mark = Literal["forward", "backward", "end"]


class GpuClock:
    """Marks where phases begin. The host's own clock would only tell how long launching took."""

    def __init__(self) -> None:
        self._marks: list[tuple[Mark, torch.cuda.Event]] = []

    def mark(self, phase: Mark) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((phase, event))

    def read(self) -> tuple[float, float]:
        """Seconds of forward and backward passes; their end must have been waited for."""
        seconds = {"forward": 0.0, "backward": 0.0}
        for (phase, start), (_, stop) in zip(self._marks, self._marks[1:], strict=False):
            seconds[phase] += start.elapsed_time(stop) / 1000
        return seconds["forward"], seconds["backward"]
