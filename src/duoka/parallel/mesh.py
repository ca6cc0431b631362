"""The device mesh: the ranks of a world on named axes, and process groups named by what their ranks share.

Every process group beside the default one is made here, by all ranks in one order. Axes, the outermost first:

- pp: which part of the stack of layers a rank has.
- replicate: which copy of the model it belongs to.
- shard: which part of that copy's state it holds; ranks of a node are neighbors on it.
- sp: which part of each sequence it computes; under sharded strategies it shards the state too.
- tp: which part of each matrix it holds.

All five are always there, with size 1 where a layout does not use them. Trainer, engines and accelerator take the view
that says what they mean: with one axis more, `world` would be wrong for some of them and silently so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from duoka.comm.blockwise import Nodes
from duoka.comm.world import World, keep_group
from duoka.plan.layout import Layout
from duoka.plan.pipeline import rank_of

AXES = ("pp", "replicate", "shard", "sp", "tp")
LOSS_AXES = ("replicate", "shard", "sp")  # whose ranks have the same place in the model, and see other tokens
# Of a mesh of its own, over the ranks of a stage: copies of groups that share experts.
EXPERT_AXIS = "ep"


@dataclass(frozen=True)
class Mesh:
    """One rank's place on all axes. Views are Worlds: sum, agree, gather and barrier happen among their ranks."""

    everyone: World = field(default_factory=World)
    sizes: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(AXES, 1))
    place: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(AXES, 0))
    data: World = field(default_factory=World)  # who reads which samples: ranks of it get different ones
    loss: World = field(default_factory=World)  # whose sums make the loss, and whose gradients are added
    copies: World = field(default_factory=World)  # who holds the same bits of weights and optimizer state
    pipeline: World = field(default_factory=World)  # whose layers make a whole model
    sequence: World = field(default_factory=World)  # who has the other stretches of the same rows
    tensor: World = field(default_factory=World)  # whose parts of each matrix make a whole layer
    experts: World = field(default_factory=World)  # who has the other experts of each layer
    expert_copies: World = field(default_factory=World)  # who has the same experts, and saw other tokens
    copy_axes: tuple[str, ...] = ("replicate", "sp")
    loss_place: int = 0  # on pp: who has the last stage

    @property
    def counts_loss(self) -> bool:
        """Whether a sum over everyone takes this rank's loss: others have the same one, or none."""
        return self.place["tp"] == 0 and self.place["pp"] == self.loss_place

    def describe_place(self) -> str:
        """`pipeline rank 1 of 2, tensor rank 0 of 2`: of the axes that ranks of one model share; "" without any."""
        used = (("pp", "pipeline rank"), ("sp", "sequence rank"), ("tp", "tensor rank"))
        words = [f"{name} {self.place[axis]} of {self.sizes[axis]}" for axis, name in used if self.sizes[axis] > 1]
        words += [f"expert rank {self.experts.rank} of {self.experts.size}"] if self.experts.size > 1 else []
        return ", ".join(words)

    @property
    def first_copy(self) -> int:
        """The first rank of the world that holds the same bits as this one."""
        return self._first_of(self.copy_axes)

    @property
    def first_of_loss(self) -> int:
        """The first rank of the world that has the same place in the model as this one."""
        return self._first_of(LOSS_AXES)

    def _first_of(self, axes: tuple[str, ...]) -> int:
        return _rank_at(self.sizes, {**self.place, **dict.fromkeys(axes, 0)})

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """The axes in use, for torch's own sharding: sp as a part of shard, and shard always. All ranks ask at once."""
        sizes = {**self.sizes, "shard": self.sizes["shard"] * self.sizes["sp"], "sp": 1}
        names = tuple(axis for axis in AXES if axis == "shard" or sizes[axis] > 1)
        return init_device_mesh(self.everyone.device.type, tuple(sizes[name] for name in names), mesh_dim_names=names)

    @cached_property
    def expert_mesh(self) -> DeviceMesh:
        """(copies, ep) of a stage: neighbors share the experts. All ranks ask at once."""
        sizes, names = (self.expert_copies.size, self.experts.size), ("expert_copies", EXPERT_AXIS)
        kind, stages = self.everyone.device.type, self.sizes["pp"]
        if stages == 1:
            return init_device_mesh(kind, sizes, mesh_dim_names=names)
        return init_device_mesh(kind, (stages, *sizes), mesh_dim_names=("expert_stage", *names))[names]

    @property
    def sharding(self) -> DeviceMesh:
        """What FSDP2 shards over: (replicate, shard), or shard alone where there is one copy."""
        names = ("replicate", "shard") if self.sizes["replicate"] > 1 else ("shard",)
        whole = self.device_mesh
        return whole if whole.mesh_dim_names == names else whole[names]

    def separate_loss_group(self) -> dist.ProcessGroup | None:
        """A new group of the `loss` ranks, for exchanges that cross those of other groups. All ranks call it."""
        return _group_over(self.everyone, self.sizes, self.place, LOSS_AXES, is_new=True)

    @cached_property
    def node_size(self) -> int:
        """Ranks of each node; 0 where nodes differ, which a rank cannot see by itself. All ranks ask at once."""
        sizes = set(self.everyone.gather(self.everyone.local_size))
        return sizes.pop() if len(sizes) == 1 else 0

    def nodes(self) -> Nodes | None:
        """The ranks that share state, by node: groups of their own. None where they are of one, or nodes differ.

        All ranks call it.
        """
        inside, size = self.node_size, self.everyone.size
        if self.loss.size != size or not 1 < inside < size or size % inside:
            return None
        if self.everyone.gather(self.everyone.node) != [rank // inside for rank in range(size)]:
            return None  # neighbors are not of one machine
        own, rank = list[dist.ProcessGroup | None](), self.everyone.rank
        for members in (
            *([*range(first, first + inside)] for first in range(0, size, inside)),
            *([*range(place, size, inside)] for place in range(inside)),
        ):
            group = keep_group(dist.new_group(members))
            own += [group] if rank in members else []
        return Nodes(own[0], own[1], inside, size // inside)

    def pipeline_edges(self) -> dict[tuple[int, int], dist.ProcessGroup | None]:
        """A new group for each direction between neighbors of a pipeline, its ends too. All ranks call it.

        By places on pp (from, to). One group for both directions would let messages of one wait behind the other's.
        """
        num_stages, own = self.sizes["pp"], {}
        others = {axis: size for axis, size in self.sizes.items() if axis != "pp"}
        ring = [(place, (place + 1) % num_stages) for place in range(num_stages)]
        edges = dict.fromkeys([*ring, *((to, source) for source, to in ring)])
        for at in itertools.product(*(range(size) for size in others.values())):
            place = dict(zip(others, at, strict=True))
            for edge in edges:
                members = sorted(_rank_at(self.sizes, {**place, "pp": one}) for one in edge)
                group = keep_group(dist.new_group(members))
                if self.everyone.rank in members:
                    own[edge] = group
        return own


def build_mesh(layout: Layout, world: World) -> Mesh:
    """The mesh of a layout. All ranks call it together."""
    sizes = {
        "pp": layout.pp, "replicate": layout.num_replicas, "shard": layout.shard, "sp": layout.sp, "tp": layout.tp,
    }  # fmt: skip
    if layout.world_size != world.size:
        raise ValueError(f"the layout {layout.name} is of {layout.world_size} ranks, and the world has {world.size}")
    place: dict[str, int] = {}
    rest = world.rank
    for axis in reversed(AXES):
        rest, place[axis] = divmod(rest, sizes[axis])
    groups: dict[tuple[str, ...], dist.ProcessGroup | None] = {}

    def view(name: str, *axes: str) -> World:
        used = tuple(axis for axis in axes if sizes[axis] > 1)
        size = math.prod(sizes[axis] for axis in used)
        if size == world.size:
            return replace(world, name=name)
        if size > 1 and used not in groups:
            groups[used] = _group_over(world, sizes, place, used)
        rank = _rank_at({axis: sizes[axis] for axis in used}, place)
        return replace(world, rank=rank, size=size, group=groups.get(used), name=name)

    # A group of its own: attention's exchanges cross those of gradients and weights, which may be of the same ranks.
    sequence = view("sequence", "sp")
    if layout.sp > 1:
        sequence = replace(sequence, group=_group_over(world, sizes, place, ("sp",), is_new=True))
    experts, expert_copies = _expert_views(world, layout.ep, layout.pp)
    # Where weights are sharded, the ranks of a sequence hold different parts of them.
    copy_axes = ("replicate",) if layout.is_sharded else ("replicate", "sp")
    return Mesh(
        everyone=world,
        sizes=sizes,
        place=place,
        data=view("data", "replicate", "shard"),
        loss=view("loss", *LOSS_AXES),
        copies=view("copies", *copy_axes),
        pipeline=view("pipeline", "pp"),
        sequence=sequence,
        tensor=view("tensor", "tp"),
        experts=experts,
        expert_copies=expert_copies,
        copy_axes=copy_axes,
        loss_place=rank_of(layout.pp * layout.virtual - 1, layout.schedule, layout.pp),
    )


def _expert_views(world: World, size: int, stages: int) -> tuple[World, World]:
    """(who shares experts, who has the same ones). Groups of their own: tokens travel between gradients.

    Ranks of one stage are neighbors, and only these have the same layers.
    """
    if size == 1:
        return World(), World()
    ranks = range(world.size)
    sharing = [[rank for rank in ranks if rank // size == group] for group in range(world.size // size)]
    span = world.size // stages
    places = [(stage, place) for stage in range(stages) for place in range(size)]
    copies = [[rank for rank in ranks if (rank // span, rank % size) == one] for one in places]
    found = []
    for name, groups in (("experts", sharing), ("expert_copies", copies)):
        for members in groups:
            if len(members) == 1:
                continue
            group = keep_group(dist.new_group(members))
            if world.rank in members:
                found.append(replace(world, rank=members.index(world.rank), size=len(members), group=group, name=name))
    return found[0], found[1] if len(found) > 1 else World()


def _rank_at(sizes: Mapping[str, int], place: Mapping[str, int]) -> int:
    """The number of a place, the last axis counting fastest."""
    rank = 0
    for axis, size in sizes.items():
        rank = rank * size + place[axis]
    return rank


def _group_over(
    world: World, sizes: Mapping[str, int], place: Mapping[str, int], axes: tuple[str, ...], *, is_new: bool = False
) -> dist.ProcessGroup | None:
    """This rank's group among the groups along `axes`, of which every rank makes all."""
    if math.prod(sizes[axis] for axis in axes) == world.size:
        return keep_group(dist.new_group()) if is_new else world.group
    own: dist.ProcessGroup | None = None
    others = [range(1) if axis in axes else range(size) for axis, size in sizes.items()]
    for start in itertools.product(*others):
        along = [range(sizes[axis]) if axis in axes else (at,) for axis, at in zip(sizes, start, strict=True)]
        members = [_rank_at(sizes, dict(zip(sizes, at, strict=True))) for at in itertools.product(*along)]
        group = keep_group(dist.new_group(members))
        own = group if world.rank in members else own
    return own
