"""Names of layouts: `fsdp8.tp2.pp2`, `hsdp2x8`, `zero1x4`, or axes alone (`tp4.pp12`).

`parallel.layout` of the YAML, lines of a plan and `--layout` are all read here; what a name means is the plan's affair.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

AXES = ("tp", "pp", "sp")
AXIS_KEYS = {"tp": "tensor", "pp": "pipeline", "sp": "sequence"}
_STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp")
_FIRST = re.compile(rf"^({'|'.join(_STRATEGIES)})(?:(?<=\d)x)?(\d+)?(?:x(\d+))?$")
_AXIS = re.compile(r"^(tp|pp|sp|ep)(\d+)$")


@dataclass(frozen=True)
class LayoutName:
    """What a name says; None: nothing of it."""

    text: str
    strategy: str | None
    dp: int | None
    shard: int | None  # of hsdp
    axes: dict[str, int]
    ep: int = 1  # of these ranks, and none beside them

    @property
    def world_size(self) -> int | None:
        """None where the name leaves the data ranks to the number of processes."""
        return None if self.dp is None else self.dp * math.prod(self.axes.values())

    def meant(self) -> dict[str, Any]:
        """The keys of `parallel:` that it stands for."""
        # One process, or one model over several: which it is follows from the axes.
        strategy = "auto" if self.strategy in (None, "single") and self.axes else self.strategy
        axes = {AXIS_KEYS[axis]: self.axes.get(axis, 1) for axis in AXES}
        return {"strategy": strategy, "shard_ranks": self.shard, **axes, "expert": self.ep}


def read_layout_name(text: str) -> LayoutName:
    """Raises ValueError with the reason."""
    first, *rest = [part for part in re.split(r"[·.,*\s]+", text.strip().lower()) if part] or [""]
    found = _FIRST.match(first)
    if not found and not _AXIS.match(first):
        raise ValueError(f"{text!r} is no layout; write for example fsdp8, hsdp2x8, zero1x4, tp2.pp2 or fsdp8.tp4.pp12")
    axes: dict[str, int] = {}
    for part in rest if found else (first, *rest):
        axis = _AXIS.match(part)
        if not axis or axis.group(1) in axes or not int(axis.group(2)):
            raise ValueError(f"{part!r} of {text!r} is no axis; tp2, pp4, sp2 and ep2 are, each once")
        axes[axis.group(1)] = int(axis.group(2))
    ep = axes.pop("ep", 1)
    if not found:
        return LayoutName(text, None, None, None, axes, ep)
    strategy, size, second = found.groups()
    if (strategy == "hsdp") != (second is not None) or "0" in (size, second):
        raise ValueError(f"{text!r}: hsdp2x8 is 2 copies, each shared by 8 ranks; other strategies have one number")
    strategy = "fsdp" if strategy == "zero3" else strategy
    if second:
        return LayoutName(text, strategy, int(size) * int(second), int(second), axes, ep)
    count = 1 if strategy == "single" else int(size) if size else None
    return LayoutName(text, strategy, count, None, axes, ep)
