"""Every view of a mesh is of the ranks that its name says, and what happens in it happens among them alone."""

from pathlib import Path

import pytest
import torch
from worlds import run_world

# Ranks by hand, pp outermost, then replicate, shard, sp, tp. Per layout: the groups of each view, the ranks whose loss
# counts, and what FSDP2 shards over.
WHOLE = [[0, 1, 2, 3]]
ALONE = [[0], [1], [2], [3]]
NEIGHBORS, OPPOSITE = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
MESHES = {
    "ddp4": {"data": WHOLE, "loss": WHOLE, "copies": WHOLE, "pipeline": ALONE, "counts": {0, 1, 2, 3}},
    "fsdp4": {"data": WHOLE, "loss": WHOLE, "copies": ALONE, "pipeline": ALONE, "counts": {0, 1, 2, 3}, "over": WHOLE},
    "hsdp2x2": {
        "data": WHOLE, "loss": WHOLE, "copies": OPPOSITE, "pipeline": ALONE, "counts": {0, 1, 2, 3},
        "over": [[0, 1, 2, 3]],
    },
    "ddp2·tp2": {"data": OPPOSITE, "loss": OPPOSITE, "copies": OPPOSITE, "pipeline": ALONE, "counts": {0, 2}},
    "fsdp2·tp2": {
        "data": OPPOSITE, "loss": OPPOSITE, "copies": ALONE, "pipeline": ALONE, "counts": {0, 2}, "over": OPPOSITE,
    },
    "ddp2·sp2": {"data": OPPOSITE, "loss": WHOLE, "copies": WHOLE, "pipeline": ALONE, "counts": {0, 1, 2, 3}},
    "fsdp2·sp2": {
        "data": OPPOSITE, "loss": WHOLE, "copies": ALONE, "pipeline": ALONE, "counts": {0, 1, 2, 3}, "over": WHOLE,
    },
    "ddp2·pp2": {"data": NEIGHBORS, "loss": NEIGHBORS, "copies": NEIGHBORS, "pipeline": OPPOSITE, "counts": {2, 3}},
}  # fmt: skip
THREE_AXES = {
    "ddp2·tp2·pp2": {
        "data": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "loss": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "copies": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "pipeline": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "counts": {4, 6},
    },
}


def group_of(rank, groups):
    return next(members for members in groups if rank in members)


def look_around(meshes):
    import torch.distributed as dist

    from duoka.comm.ledger import LEDGER
    from duoka.comm.world import end_world, start_world
    from duoka.config.schema import ParallelConfig
    from duoka.parallel.mesh import AXES, build_mesh
    from duoka.plan.layout import parse_layout

    world = start_world(ParallelConfig(strategy="fsdp"))
    for name, expected in meshes.items():
        mesh = build_mesh(parse_layout(name), world)
        assert tuple(mesh.sizes) == AXES and mesh.everyone is world
        for view in ("data", "loss", "copies", "pipeline"):
            members = group_of(world.rank, expected[view])
            one = getattr(mesh, view)
            where = f"{view} of {name} on rank {world.rank}"
            assert (one.rank, one.size) == (members.index(world.rank), len(members)), where
            assert one.gather(world.rank) == members, where
            assert one.agree(world.rank + 100) == members[0] + 100, where
            LEDGER.take()
            assert one.sum([float(world.rank), 1.0]) == [sum(members), len(members)], where
            assert bool(LEDGER.take()) == (len(members) > 1), f"{where}: a sum of a step is in its ledger"
            one.barrier()
        assert mesh.counts_loss == (world.rank in expected["counts"]), name
        assert mesh.first_copy == group_of(world.rank, expected["copies"])[0], name
        if "over" in expected:
            assert sorted(mesh.sharding.mesh.flatten().tolist()) == group_of(world.rank, expected["over"]), name
        owners = mesh.separate_loss_group()
        assert dist.get_process_group_ranks(owners) == group_of(world.rank, expected["loss"]), name
    with pytest.raises(ValueError, match="is of 2 ranks"):
        build_mesh(parse_layout("ddp2"), world)
    world.barrier()  # rank 0 keeps the store in which the others meet for new groups
    end_world(world)


def test_each_view_is_of_the_ranks_that_its_name_says():
    run_world(4, look_around, MESHES)


def test_each_view_of_three_axes_is_of_the_ranks_that_its_name_says():
    run_world(8, look_around, THREE_AXES)


class Numbers:
    """A source of weights: all of them, counted through."""

    def knows(self, name, shape):
        return True

    def read(self, name, shape, box=None):
        whole = torch.arange(float(shape.numel())).view(shape)
        return whole if box is None else whole[box.slices]

    def close(self):
        pass


class Part(torch.nn.Module):
    def __init__(self, stage):
        super().__init__()
        setattr(self, f"layer{stage}", torch.nn.Linear(3, 2))
        torch.nn.init.constant_(getattr(self, f"layer{stage}").weight, float(stage))


class Named:
    def __init__(self, named):
        self.named = named

    def tensors(self):
        return self.named


def cross_axes(folder):
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from duoka.comm.world import end_world, start_world
    from duoka.config.schema import ParallelConfig
    from duoka.errors import ConfigError
    from duoka.parallel.fill import fill_weights
    from duoka.parallel.gather import gather_state
    from duoka.parallel.matrices import RowMatrices, rows_per_rank
    from duoka.parallel.mesh import build_mesh
    from duoka.plan.layout import Layout, parse_layout
    from duoka.store.checkpoint import SMALL_FILES_BYTES, CheckpointStore

    world = start_world(ParallelConfig(strategy="fsdp"))
    device_mesh = build_mesh(parse_layout("fsdp2·tp2"), world).device_mesh
    assert device_mesh.mesh_dim_names == ("shard", "tp")

    # Weights that two axes cut, by rows and by columns: each rank reads its own box.
    model = torch.nn.Linear(6, 4, bias=False)
    cut = distribute_tensor(torch.zeros(4, 6), device_mesh, [Shard(0), Shard(1)], src_data_rank=None)
    model.weight = torch.nn.Parameter(cut)
    fill_weights(model, Numbers(), world.device)
    assert torch.equal(model.weight.full_tensor(), torch.arange(24.0).view(4, 6))

    # Muon brings rows together along the axis that cuts them, wherever it lies in the mesh; not those of two axes.
    rows = distribute_tensor(torch.zeros(5, 6), device_mesh, [Shard(0), Replicate()], src_data_rank=None)
    sharing = RowMatrices([rows])
    assert dist.get_process_group_ranks(sharing.group) == group_of(world.rank, OPPOSITE)
    assert rows_per_rank(rows) == [3, 2]
    with pytest.raises(ConfigError, match="muon"):
        RowMatrices([cut])

    # The layers of a pipeline's ranks come together on the one that keeps them.
    mesh = build_mesh(parse_layout("ddp2·pp2"), world)
    state = gather_state(Part(mesh.place["pp"]), keep=world.is_main, pipeline=mesh.pipeline)
    if world.is_main:
        assert sorted(state) == ["layer0.bias", "layer0.weight", "layer1.bias", "layer1.weight"]
        assert float(state["layer1.weight"].mean()) == 1.0 and state["layer1.bias"].shape == (2,)
    else:
        assert state == {}

    # A checkpoint takes what all ranks have, not what rank 0 knows of.
    store = CheckpointStore(Path(folder), world, Layout(dp=4, strategy="ddp"))
    mine = {f"model.layer{mesh.place['pp']}": torch.zeros(10 * (1 + mesh.place["pp"]))}
    needed, _, _ = store.measure_room(Named(mine))
    assert needed == 4 * (10 + 20) + 4 * SMALL_FILES_BYTES
    store.close()
    end_world(world)


def test_what_one_axis_allowed_to_assume_holds_on_two(tmp_path):
    run_world(4, cross_axes, str(tmp_path))
