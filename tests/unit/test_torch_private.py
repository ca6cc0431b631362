"""Every use of torch's private names is listed here, and there: a torch that moved one is found before a run is."""

import importlib
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp

SOURCE = Path(__file__).parents[2] / "src" / "duoka"
IMPORTED = {
    "torch.distributed.tensor._utils": ("compute_local_shape_and_global_offset",),
    "torch.distributed.fsdp._fully_shard._fsdp_api": ("AllGather", "ReduceScatter"),
    "torch.distributed.fsdp._fully_shard._fsdp_collectives": ("DefaultAllGather", "DefaultReduceScatter"),
    "torch._subclasses.fake_tensor": ("FakeTensorMode",),
    "torch.utils._python_dispatch": ("TorchDispatchMode",),
    "torch.utils._pytree": ("tree_map_only",),
    "torch.testing._internal.distributed.fake_pg": ("FakeStore",),
}
# Of objects: where it lies, and on what.
ATTRIBUTES = {
    "_found_inf_per_device": torch.amp.GradScaler,
    "_get_fsdp_state": torch.distributed.fsdp.FSDPModule,
    "_call_impl": torch.nn.Module,
}


def test_private_modules_are_the_listed_ones():
    pattern = re.compile(r"^\s*from (torch(?:\.\w+)*\._[\w.]*) import (.+)$", re.MULTILINE)
    found = {}
    for path in SOURCE.rglob("*.py"):
        for module, names in pattern.findall(path.read_text(encoding="utf-8")):
            found.setdefault(module, set()).update(name.strip() for name in names.split(","))
    assert found == {module: set(names) for module, names in IMPORTED.items()}, "list it here, or do without it"


@pytest.mark.parametrize("module", IMPORTED)
def test_this_torch_has_them(module):
    home = importlib.import_module(module)
    assert [name for name in IMPORTED[module] if not hasattr(home, name)] == []


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_this_torch_has_the_attribute(name):
    assert hasattr(ATTRIBUTES[name], name)
    assert any(name in path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")), "nobody uses it any more"
