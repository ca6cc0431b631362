"""How the ranks of a world are used. One type, unchanged from plan to mesh to a checkpoint's manifest.

Part of no result: two layouts of one run give the same losses. Tensor, pipeline and sequence axes will be further
fields here, each with a default that means "not used".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

from duoka.units import Amount, parse_amount

Strategy = Literal["single", "dp", "ddp", "zero1", "zero2", "fsdp", "hsdp"]
Precision = Literal["fp32", "bf16", "fp16"]
Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer", "params"]

SHARDED: tuple[Strategy, ...] = ("zero1", "zero2", "fsdp", "hsdp")


@dataclass(frozen=True)
class Layout:
    """`dp` ranks, each computing micro-batches of `micro` in `precision`; `shard` of them hold one copy."""

    dp: int = 1
    strategy: Strategy = "single"
    precision: Precision = "fp32"
    recompute: Recompute = "none"
    micro: Amount = field(default_factory=lambda: Amount(1, "samples"))
    packing: bool = True
    shard: int = 1
    offload: Offload = "none"
    compile: bool = False

    def __post_init__(self) -> None:
        if self.dp < 1:
            raise ValueError(f"a layout needs at least one replica, got {self.dp}")
        if self.strategy in ("single", "dp") and self.dp != 1:
            raise ValueError(f"strategy {self.strategy} is one process, got {self.dp}")
        if self.shard < 1 or self.dp % self.shard:
            raise ValueError(f"{self.dp} ranks cannot be cut into groups of {self.shard}")

    @property
    def name(self) -> str:
        """Short, for lines and folders: single, ddp2, fsdp4, zero1x4, hsdp2x4 (replicas x ranks that share one)."""
        if self.strategy in ("single", "dp"):
            return self.strategy
        if self.strategy == "hsdp":
            return f"hsdp{self.num_replicas}x{self.shard}"
        return f"{self.strategy}{'x' if self.strategy[-1].isdigit() else ''}{self.dp}"

    @property
    def is_sharded(self) -> bool:
        return self.strategy in SHARDED

    @property
    def num_replicas(self) -> int:
        """How many ranks hold the same part of the state."""
        return self.dp // self.shard

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
            "shard": self.shard,
            "offload": self.offload,
            "compile": self.compile,
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Layout:
        """The layout that `to_json` wrote. Raises ValueError or KeyError for anything else."""
        if raw["strategy"] not in get_args(Strategy):
            raise ValueError(f"there is no strategy {raw['strategy']!r}")
        return cls(
            dp=int(raw["dp"]),
            strategy=cast(Strategy, raw["strategy"]),
            precision=cast(Precision, raw["precision"]),
            recompute=cast(Recompute, raw["recompute"]),
            micro=parse_amount(str(raw["micro"])),
            packing=bool(raw["packing"]),
            shard=int(raw.get("shard", 1)),
            offload=cast(Offload, raw.get("offload", "none")),
            compile=bool(raw.get("compile", False)),
        )
