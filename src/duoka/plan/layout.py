"""How the ranks of a world are used. One type, unchanged from plan to mesh to a checkpoint's manifest.

Part of no result: two layouts of one run give the same losses. Tensor, pipeline and sequence axes, sharding and
offload will be further fields here, each with a default that means "not used".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from duoka.units import Amount, parse_amount

Strategy = Literal["single", "ddp"]
Precision = Literal["fp32", "bf16", "fp16"]
Recompute = Literal["none", "full"]


@dataclass(frozen=True)
class Layout:
    """`dp` replicas, each computing micro-batches of `micro` in `precision`."""

    dp: int = 1
    strategy: Strategy = "single"
    precision: Precision = "fp32"
    recompute: Recompute = "none"
    micro: Amount = field(default_factory=lambda: Amount(1, "samples"))
    packing: bool = True

    def __post_init__(self) -> None:
        if self.dp < 1:
            raise ValueError(f"a layout needs at least one replica, got {self.dp}")
        if self.strategy == "single" and self.dp != 1:
            raise ValueError(f"strategy single is one process, got {self.dp}")

    @property
    def name(self) -> str:
        """Short, for lines and folders: single, ddp2."""
        return "single" if self.strategy == "single" else f"{self.strategy}{self.dp}"

    @property
    def world_size(self) -> int:
        return self.dp

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "dp": self.dp,
            "strategy": self.strategy,
            "precision": self.precision,
            "recompute": self.recompute,
            "micro": f"{self.micro.count} {self.micro.unit}",
            "packing": self.packing,
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Layout:
        """The layout that `to_json` wrote. Raises ValueError or KeyError for anything else."""
        if raw["strategy"] not in ("single", "ddp"):
            raise ValueError(f"there is no strategy {raw['strategy']!r}")
        return cls(
            dp=int(raw["dp"]),
            strategy=cast(Strategy, raw["strategy"]),
            precision=cast(Precision, raw["precision"]),
            recompute=cast(Recompute, raw["recompute"]),
            micro=parse_amount(str(raw["micro"])),
            packing=bool(raw["packing"]),
        )
