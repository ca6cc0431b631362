"""How the ranks of a world are used. One type, unchanged from plan to mesh to a checkpoint's manifest.

Part of no result: two layouts of one run give the same losses. The tensor, pipeline and sequence axes are planned
with; `TRAINABLE_AXES` says which of them this version trains with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

from duoka.config.layout_name import AXES as AXES
from duoka.config.layout_name import read_layout_name
from duoka.config.schema_running import Schedule
from duoka.config.schema_running import Strategy as Strategy
from duoka.plan.pipeline import ADDS_ONCE
from duoka.plan.recompute import check_recompute
from duoka.units import Amount, parse_amount

Precision = Literal["fp32", "bf16", "fp16", "fp8"]
Recompute = str  # none, selective, full, or a share of the layers such as 1/2 (plan/recompute.py)
Offload = Literal["none", "optimizer", "params"]
Elsewhere = Literal["none", "host", "disk"]
Compile = bool | Literal["reduce-overhead"]
OnDisk = Literal["none", "optimizer", "params"]  # params: the optimizer's state too

# Axes beside data parallelism that `duoka train` runs. Others are ranked by the plan, marked, and never chosen.
TRAINABLE_AXES: tuple[str, ...] = ("tp", "pp", "sp")
SHARDED: tuple[Strategy, ...] = ("zero1", "zero2", "fsdp", "hsdp")


@dataclass(frozen=True)
class Layout:
    """`dp` data ranks, each computing micro-batches of `micro` in `precision`; `shard` of them hold one copy.

    A data rank is `tp` ranks that cut every matrix, times `pp` that cut the stack of layers, times `sp` that cut
    every sequence. Of the ranks that add gradients, `ep` neighbors share the experts of a mixture, and are no
    ranks more. Each of the `pp` has `virtual` stages, and goes through them as `schedule` says. Of what is offloaded,
    `disk` lies in files.
    """

    dp: int = 1
    strategy: Strategy = "single"
    precision: Precision = "fp32"
    recompute: Recompute = "none"
    micro: Amount = field(default_factory=lambda: Amount(1, "samples"))
    packing: bool = True
    shard: int = 1
    offload: Offload = "none"
    disk: OnDisk = "none"
    offload_share: float = 1.0  # of the optimizer's state, where that is offloaded
    activations: Elsewhere = "none"  # where they lie between a layer's two passes
    compile: Compile = False
    tp: int = 1
    pp: int = 1
    sp: int = 1
    ep: int = 1
    schedule: Schedule = "1f1b"
    virtual: int = 1

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.sp, self.ep) < 1:
            sizes = f"tp {self.tp}, pp {self.pp}, sp {self.sp}, ep {self.ep}"
            raise ValueError(f"an axis has at least one rank, got {sizes}")
        if self.dp < 1:
            raise ValueError(f"a layout needs at least one replica, got {self.dp}")
        if self.strategy in ("single", "dp") and self.dp != 1:
            raise ValueError(f"strategy {self.strategy} is one process, got {self.dp}")
        if self.strategy in ("single", "dp") and self.sp > 1:
            raise ValueError(f"ranks of a sequence add their gradients: write ddp1.sp{self.sp}, not {self.strategy}")
        if self.shard < 1 or self.dp % self.shard:
            raise ValueError(f"{self.dp} ranks cannot be cut into groups of {self.shard}")

    @property
    def name(self) -> str:
        """Short, for lines and folders: single, ddp2, fsdp8·tp2, zero1x4, hsdp2x4 (replicas x ranks that share one)."""
        axes = "".join(f"·{axis}{size}" for axis, size in self.axes.items())
        axes += f"·ep{self.ep}" if self.ep > 1 else ""
        if self.strategy in ("single", "dp"):
            return self.strategy + axes
        if self.strategy == "hsdp":
            return f"hsdp{self.num_replicas}x{self.shard}{axes}"
        return f"{self.strategy}{'x' if self.strategy[-1].isdigit() else ''}{self.dp}{axes}"

    @property
    def axes(self) -> dict[str, int]:
        """Tensor, pipeline and sequence axes that are used, with their sizes."""
        return {axis: getattr(self, axis) for axis in AXES if getattr(self, axis) > 1}

    @property
    def is_trainable(self) -> bool:
        """Whether this version can train with it; what it cannot, it can still plan."""
        # ddp adds up gradients of whole tensors. Sharded, gradients would leave when some of them are there.
        is_refused = (self.strategy == "ddp" and self.tp > 1) or (self.adds_once and self.is_sharded)
        return not is_refused and all(axis in TRAINABLE_AXES for axis in self.axes)

    @property
    def adds_once(self) -> bool:
        """Whether the schedule's gradients are there at its end only, and are added by data ranks then."""
        return self.pp > 1 and self.schedule in ADDS_ONCE

    @property
    def is_sharded(self) -> bool:
        return self.strategy in SHARDED

    @property
    def num_replicas(self) -> int:
        """How many ranks hold the same part of the state."""
        return self.dp // self.shard

    @property
    def state_ranks(self) -> int:
        """How many ranks share one copy of what is sharded: those of a sequence hold different parts too."""
        return self.shard * self.sp

    @property
    def has_one_shard(self) -> bool:
        """Whether what is sharded has no second rank: a shard is the whole tensor, and is summed with none."""
        return self.strategy in ("fsdp", "hsdp") and self.world_size == 1

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp * self.sp

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
            **({"disk": self.disk} if self.disk != "none" else {}),
            **({"activations": self.activations} if self.activations != "none" else {}),
            **({"offload_share": self.offload_share} if self.offload_share != 1 else {}),
            "compile": self.compile,
            **self.axes,
            **({"ep": self.ep} if self.ep > 1 else {}),
            **({"schedule": self.schedule, "virtual": self.virtual} if self.pp > 1 else {}),
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
            recompute=check_recompute(str(raw["recompute"])),
            micro=parse_amount(str(raw["micro"])),
            packing=bool(raw["packing"]),
            shard=int(raw.get("shard", 1)),
            offload=cast(Offload, raw.get("offload", "none")),
            disk=cast(OnDisk, raw.get("disk", "none")),
            activations=cast(Elsewhere, raw.get("activations", "none")),
            offload_share=float(raw.get("offload_share", 1.0)),
            compile=cast(Compile, raw.get("compile", False)),
            tp=int(raw.get("tp", 1)),
            pp=int(raw.get("pp", 1)),
            sp=int(raw.get("sp", 1)),
            ep=int(raw.get("ep", 1)),
            schedule=cast(Schedule, raw.get("schedule", "1f1b")),
            virtual=int(raw.get("virtual", 1)),
        )


def parse_layout(text: str) -> Layout:
    """The layout of a name: `fsdp8·tp2`, `hsdp2x8`, `zero1x4`, `ddp8.tp4.pp12`. Raises ValueError with the reason."""
    name = read_layout_name(text)
    if name.strategy is None:
        raise ValueError(f"{text!r} is no layout; write for example fsdp8, hsdp2x8, zero1x4 or ddp8.tp4.pp12")
    strategy, dp = cast(Strategy, name.strategy), name.dp or 1
    tp, pp, sp = (name.axes.get(axis, 1) for axis in AXES)
    shard = name.shard or (dp if strategy in SHARDED else 1)
    layout = Layout(dp=dp, strategy=strategy, shard=shard, tp=tp, pp=pp, sp=sp, ep=name.ep)
    shares = layout.is_sharded or (layout.strategy == "single" and tp > 1)
    if name.ep > 1 and (not shares or layout.state_ranks * tp % name.ep):
        raise ValueError(f"{text!r}: experts are shared by ranks that share state (fsdp4.ep2) or layers (tp2.ep2)")
    return layout


def complete_layout(text: str, world_size: int) -> Layout:
    """As `parse_layout`, for a world of that size; `tp4.pp12` alone leaves the data ranks to be worked out.

    Raises ValueError for a product that is not the world: 48 data ranks of 12 stages and 4 tensor ranks need 2,304.
    """
    if re.match(r"^\s*(tp|pp|sp)\d", text.lower()):
        alone = "ddp1" if "sp" in text.lower() else "single"
        inner = parse_layout(f"{alone}.{text}").world_size
        if world_size % inner:
            raise ValueError(
                f"{text} is {inner} devices for one copy of the model, and {world_size} are no multiple of it"
            )
        copies = world_size // inner
        return parse_layout(f"zero1x{copies}.{text}" if copies > 1 else f"{alone}.{text}")
    layout = parse_layout(text)
    if layout.world_size != world_size:
        sizes = " x ".join(f"{axis} {size}" for axis, size in {"dp": layout.dp, **layout.axes}.items())
        raise ValueError(f"{layout.name} is {sizes} = {layout.world_size:,} devices, and there are {world_size:,}")
    return layout
