"""The parts of torch that it may change at will: each does here what duoka relies on, and only one file uses any."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import duoka
from duoka import torch_private

SOURCE = Path(duoka.__file__).parent
HERE = SOURCE / "torch_private.py"
# Private attributes that only torch's objects have.
ATTRIBUTES = {
    "_spec", "_get_fsdp_state", "_fsdp_param_groups", "_fsdp_param_group", "_found_inf_per_device",
    "_new_with_weak_ptr", "_cdata", "_local_tensor", "_call_impl", "_rebuild_buckets",
}  # fmt: skip


def private_uses(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found += [
                f"{node.lineno}: {node.module}" for name in names if name.startswith("_") and name != "__future__"
            ]
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if node.attr in ATTRIBUTES or (isinstance(root, ast.Name) and root.id in ("torch", "dist")):
                found.append(f"{node.lineno}: {node.attr}")
    return found


def test_only_one_file_reaches_behind_torchs_api():
    assert private_uses(HERE), "the check sees something"
    files = [path for path in SOURCE.rglob("*.py") if path != HERE]
    assert {str(path.relative_to(SOURCE)): uses for path in files if (uses := private_uses(path))} == {}


def names_of(path: Path, modules: dict[str, str]) -> set[str]:
    """Dotted names below the modules that a file knows by `modules`' keys, such as torch.distributed.all_reduce."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts, node = [node.attr, *parts], node.value
        if parts and isinstance(node, ast.Name) and node.id in modules:
            found.add(".".join((modules[node.id], *parts)))
    return found


def is_there(name: str) -> bool:
    first, *rest = name.split(".")
    found = importlib.import_module(first)
    for place, part in enumerate(rest, 2):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join((first, *rest[: place - 1])))
            except ImportError:
                return False
        found = getattr(found, part)
        if not inspect.ismodule(found):
            return True  # what a class or a function has is not torch's list of names
    return True


def test_names_for_other_versions_are_names_of_torch():
    """The older name of what was renamed is read on an older torch alone: a slip in it is seen nowhere else."""
    known = {"torch": "torch", "dist": "torch.distributed", "F": "torch.nn.functional"}
    used = {name for path in SOURCE.rglob("*.py") for name in names_of(path, known)}
    assert "torch.distributed.all_gather_into_tensor" in used, "the check sees something"
    assert sorted(name for name in used if not is_there(name)) == []


def test_every_name_is_there():
    assert [name for name in torch_private.__all__ if not hasattr(torch_private, name)] == []


@pytest.fixture
def fake_world():
    dist.init_process_group("fake", rank=0, world_size=2, store=torch_private.fake_store())
    yield dist.device_mesh.init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_sharded_tensors(fake_world):
    whole = distribute_tensor(torch.arange(6.0).reshape(3, 2), fake_world, [Shard(0)])
    like = torch_private.like_sharded(whole, torch.ones(2, 2))
    assert isinstance(like, DTensor) and like.shape == (3, 2) and torch_private.innermost(like).sum() == 4
    shape, offset = torch_private.compute_local_shape_and_global_offset(whole.shape, fake_world, whole.placements)
    assert (shape, offset) == ((2, 2), (0, 0))


def test_gradients_that_fsdp_has_not_exchanged(fake_world):
    model = fully_shard(torch.nn.Linear(4, 4), mesh=fake_world)
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 4)).sum().backward()
    held = list(torch_private.gradients_not_exchanged(model))
    assert all(isinstance(one, torch.Tensor) for one in held)


def send_nothing(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def test_ddps_buckets_are_formed_once_more_and_say_whom_they_wait_for(fake_world):
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=0.02)
    replica.register_comm_hook(None, send_nothing)
    assert not torch_private.form_buckets(replica), "nothing was exchanged yet"
    replica(torch.ones(1, 64)).sum().backward()
    assert torch_private.form_buckets(replica) and not torch_private.form_buckets(replica), "once"
    storages = {parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert 1 < len(storages) < 8, "gradients that were there are views of them"
    model[2].forward = lambda states: states
    replica(torch.ones(1, 64)).sum().backward()
    assert list(map(id, torch_private.unused_parameters(replica))) == list(map(id, model[2].parameters()))


def test_a_backward_pass_says_whose_gradients_are_added():
    class Watch(torch_private.TorchDispatchMode):
        added = ()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.add.Tensor:
                self.added += (torch_private.running_node(),)
            return func(*args, **(kwargs or {}))

    weight = torch.nn.Parameter(torch.ones(4, 2))
    with Watch() as watch:
        (torch.nn.functional.embedding(torch.tensor([1]), weight) @ weight.t()).sum().backward()
    assert watch.added == ("EmbeddingBackward0",) and torch_private.running_node() == ""


def test_what_the_scaler_found():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    for found in torch_private.found_inf(scaler, optimizer):
        assert found.item() == 0
        found.fill_(1.0)
    scaler.step(optimizer)
    assert weight.tolist() == [1, 1], "the update was left out"


def test_storages_that_live():
    tensor = torch.ones(3)
    storage = tensor.untyped_storage()
    reference, key = torch_private.StorageWeakRef(storage), torch_private.storage_key(storage)
    assert torch_private.living_bytes(reference) == 12 and key == torch_private.storage_key(
        tensor[1:].untyped_storage()
    )
    del tensor, storage
    assert torch_private.living_bytes(reference) is None


def test_a_module_is_called_otherwise():
    model = torch.nn.Linear(2, 2)
    seen = []
    model.register_forward_hook(lambda *_: seen.append("hook"))
    torch_private.set_call(model, call := lambda x: torch_private.plain_call(model, x) * 0)
    assert not model(torch.ones(1, 2)).any() and seen == ["hook"] and torch_private.call_of(model) is call


def test_small_ones():
    tensors = [torch.ones(4), torch.zeros(2)]
    assert [norm.item() for norm in torch_private.foreach_norm(tensors)] == [2, 0]
    asked = []

    class Asked(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            asked.append(func)
            return func(*args, **(kwargs or {}))

    with Asked():
        assert int(torch.tensor(3)) == 3
    assert torch_private.read_number in asked
    torch_private.foreach_mul_(tensors, 3)
    assert tensors[0].sum() == 12
    torch_private.foreach_zero_(tensors)
    assert tensors[0].sum() == 0
    assert isinstance(torch.nn.BatchNorm1d(2), torch_private.NormBase)
    assert torch_private.tree_map_only(int, lambda number: number + 1, {"a": [1, "b"]}) == {"a": [2, "b"]}
    with torch_private.FakeTensorMode() as mode:
        assert isinstance(torch.empty(2) + 1, type(mode.from_tensor(torch.ones(1))))
    a, one = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.tensor(2.0)
    product = torch_private.scaled_mm(
        a, a.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=False
    )
    assert product.dtype is torch.bfloat16 and (product == 64).all()
    assert issubclass(torch_private.DefaultAllGather, torch_private.AllGather)
    assert issubclass(torch_private.DefaultReduceScatter, torch_private.ReduceScatter)
    shaped = torch_private.in_shape_of(torch.empty(2, 3, 5), rows := torch.ones(6, 4))
    assert shaped.shape == (2, 3, 4) and shaped.data_ptr() == rows.data_ptr() and not shaped._is_view()
