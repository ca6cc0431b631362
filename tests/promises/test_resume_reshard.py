"""Promise 3: what one layout wrote, any other reads, tensor by tensor and bit by bit, odd sizes included."""

from pathlib import Path

import torch
from worlds import run_world

SHAPES = {"even": (8, 4), "odd": (7, 5), "three": (4, 6, 3), "vector": (9,), "fewer": (1, 3), "number": ()}
KINDS = ("whole", "rows", "columns", "replicated")


class Saved:
    """What a store writes and fills: tensors of this test instead of a model's."""

    def __init__(self, tensors):
        from duoka.parallel.precision import build_numerics
        from duoka.store.state import TrainState

        self.named = tensors
        self.state = TrainState(step=1)
        self.optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
        self.numerics = build_numerics("fp32", torch.device("cpu"))

    def filled(self):
        pass

    def tensors(self):
        return self.named


def lay_out(full, kind, mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def one(tensor):
        if kind == "whole" or not tensor.ndim:
            return tensor.clone()
        placement = {"rows": Shard(0), "columns": Shard(tensor.ndim - 1), "replicated": Replicate()}[kind]
        return distribute_tensor(tensor, mesh, [placement])

    return {name: one(tensor) for name, tensor in full.items()}


def write_and_read_all(folder):
    from torch.distributed.device_mesh import init_device_mesh

    from duoka.comm.world import end_world, start_world
    from duoka.config.schema import ParallelConfig
    from duoka.plan.layout import Layout
    from duoka.store.checkpoint import CheckpointStore
    from duoka.store.checkpoint import Saved as Ended
    from duoka.store.retention import Keep

    world = start_world(ParallelConfig())
    mesh = init_device_mesh("cpu", (world.size,))
    torch.manual_seed(0)
    full = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    full["half"] = torch.randn(5, 4).bfloat16()
    for written in KINDS:
        place = Path(folder) / written
        place.mkdir(exist_ok=True)
        store = CheckpointStore(place, world, Layout())
        ended = store.save(Saved(lay_out(full, written, mesh)), Keep(1)) or store.wait()
        assert isinstance(ended, Ended), ended
        for read in KINDS:
            named = lay_out({name: torch.zeros_like(tensor) for name, tensor in full.items()}, read, mesh)
            store.load(ended.path, Saved(named))
            for name, wanted in full.items():
                got = named[name].full_tensor() if hasattr(named[name], "full_tensor") else named[name]
                assert torch.equal(got, wanted), f"{name}, written {written}, read {read}"
        store.close()
    end_world(world)


def test_any_layout_reads_what_any_other_wrote(tmp_path):
    run_world(2, write_and_read_all, str(tmp_path))
    for kind in KINDS:
        files = sorted(path.name for path in (tmp_path / kind / "step-00000001").glob("tensors-*"))
        assert files == ["tensors-00000.safetensors", "tensors-00001.safetensors"], "both ranks write"
