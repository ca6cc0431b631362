"""Everything that duoka uses of torch and that torch does not promise to keep. Nothing else reaches behind its API.

tests/unit/test_torch_private.py tries each of these on the installed torch, so that another version says here what it
lacks, and pyproject.toml admits no version that was not tried.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.distributed_c10d import _abort_process_group
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.debug import _clear_sharding_prop_cache as forget_shardings
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

__all__ = [
    "PLAIN_CALL",
    "AllGather",
    "DefaultAllGather",
    "DefaultReduceScatter",
    "FakeTensor",
    "FakeTensorMode",
    "NormBase",
    "ReduceScatter",
    "StorageWeakRef",
    "TorchDispatchMode",
    "abort_groups",
    "call_of",
    "compute_local_shape_and_global_offset",
    "compute_with_shards",
    "fake_store",
    "foreach_mul_",
    "foreach_norm",
    "foreach_zero_",
    "forget_shardings",
    "form_buckets",
    "found_inf",
    "gradients_not_exchanged",
    "innermost",
    "like_sharded",
    "living_bytes",
    "onednn_product",
    "plain_call",
    "read_number",
    "running_node",
    "scaled_mm",
    "set_call",
    "side_thread",
    "storage_key",
    "tree_map_only",
    "unused_parameters",
    "wrapper_of_shape",
]

foreach_norm = torch._foreach_norm
foreach_mul_ = torch._foreach_mul_
foreach_zero_ = torch._foreach_zero_
read_number = torch.ops.aten._local_scalar_dense.default  # what int(tensor) asks, as a dispatch mode sees it
scaled_mm = torch._scaled_mm  # of 8-bit floats; the public one takes one more list of how scales lie, from 2.10 on


def running_node() -> str:
    """Of a backward pass, the function whose gradients are being computed, or added to those of others."""
    node = torch._C._current_autograd_node()
    return "" if node is None else str(node.name())


def _find_onednn_product() -> Callable[..., torch.Tensor] | None:
    try:
        linear = torch.ops.mkldnn._linear_pointwise.default
    except AttributeError:  # a torch without oneDNN
        return None
    asked = [argument.name for argument in linear._schema.arguments]
    if asked != ["X", "W", "B", "attr", "scalars", "algorithm"]:  # another version's
        return None
    return lambda x, weight, bias: linear(x, weight, bias, "none", [], "")


onednn_product = _find_onednn_product()  # of rows, (outputs, inputs) and a bias or None, in fp32


def side_thread(name: str, device: torch.device) -> ThreadPoolExecutor:
    """A thread for work beside steps. Where these compute on a CPU, its operators take no threads of their own.

    OpenMP counts threads that ever worked for it; once they are more than cores, none of them waits awake for the next
    region any more, and each operator of a step begins with waking the others (a tenth of a step with two threads).
    """
    own = torch.get_num_threads()  # which the caller keeps, whatever others are told from here on
    num_threads = 1 if device.type == "cpu" else own
    return ThreadPoolExecutor(1, name, initializer=torch.set_num_threads, initargs=(num_threads,))


def wrapper_of_shape(kind: type, shape: torch.Size, values: torch.Tensor) -> Any:
    """A tensor of a subclass that has no memory of its own: shaped as the whole that `values` are a part of."""
    return torch.Tensor._make_wrapper_subclass(kind, shape, dtype=values.dtype, device=values.device)


def like_sharded(parameter: DTensor, local: torch.Tensor) -> DTensor:
    """This rank's part of a tensor that is sharded as `parameter` is; from_local would move it to the mesh's device."""
    return DTensor(local, parameter._spec, requires_grad=False)  # type: ignore[call-arg]


def found_inf(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """By device, 1.0 where the scaler saw gradients of this rank that are not finite; written to, it believes it."""
    return list(scaler._found_inf_per_device(optimizer).values())


def form_buckets(replica: DistributedDataParallel) -> bool:
    """What the first forward pass after the first exchange begins with: DDP's buckets for good, of which gradients
    become views. Whether it was due."""
    return bool(replica.reducer._rebuild_buckets())


def unused_parameters(replica: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """Which ones DDP still waits for, after a backward pass that should have exchanged all of its gradients."""
    parameters = [parameter for parameter in replica.module.parameters() if parameter.requires_grad]
    try:
        replica.reducer._rebuild_buckets()
    except RuntimeError as error:
        listed = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        return [parameters[int(index)] for index in listed[1].split()] if listed else []
    return []


def _sharded_parameters(module: FSDPModule) -> Iterator[Any]:
    """FSDP's own objects for the parameters of one unit. torch 2.11 has one group of them or none."""
    state: Any = module._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    for group in groups:
        if group is not None:
            yield from group.fsdp_params


def gradients_not_exchanged(module: FSDPModule) -> Iterator[torch.Tensor]:
    """Where FSDP adds up half-precision gradients in fp32 until they are exchanged."""
    for one in _sharded_parameters(module):
        if one.unsharded_accumulated_grad is not None:
            yield one.unsharded_accumulated_grad


def let_go_of_sent_gradients(root: FSDPModule) -> None:
    """After a backward pass that is not a step's last, FSDP keeps the last unit's gradients as they were sent, which
    are as large as the embedding, until the next pass sends its first ones."""
    state: Any = root._get_fsdp_state()
    context = state._comm_ctx
    is_list = hasattr(context, "reduce_scatter_states")  # torch 2.11 has one or none
    sent = context.reduce_scatter_states if is_list else [context.reduce_scatter_state]
    for one in sent:
        if one is not None and one.event is not None:
            state._device_handle.current_stream().wait_event(one.event)
    if is_list:
        sent.clear()
    else:
        context.reduce_scatter_state = None


def compute_with_shards(module: FSDPModule) -> None:
    """Where FSDP has no other rank, a gathered weight that is not cast is the shard itself, which stays."""
    for one in _sharded_parameters(module):
        one.init_all_gather_outputs = partial(_use_shard, one, one.init_all_gather_outputs)


def _use_shard(one: Any, allocate: Callable[..., None], *asked: Any, **named: Any) -> None:
    shard = one._sharded_param_data
    is_whole_storage = shard.untyped_storage().nbytes() == shard.numel() * shard.itemsize
    if one.param_dtype is not None or not is_whole_storage or type(shard) is not torch.Tensor:
        allocate(*asked, **named)
        return
    # The very tensor that FSDP is about to copy there: to itself, which is nothing.
    one.all_gather_outputs = [shard]
    one.free_unsharded_param = _keep


def _keep() -> None:
    """Nothing was gathered, so there is nothing to free."""


def storage_key(storage: torch.UntypedStorage) -> int:
    """Which memory it is: equal for tensors that share it."""
    return int(storage._cdata)


def living_bytes(reference: StorageWeakRef) -> int | None:
    """The size of a storage that is still referenced."""
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return None if storage is None else int(storage.nbytes())


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """What holds the memory of a wrapper such as DTensor; to_local would be seen by dispatch modes."""
    inner: Any = tensor
    while hasattr(inner, "_local_tensor"):
        inner = inner._local_tensor
    return inner


def plain_call(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The call of a module, with its hooks, as its class defines it."""
    return type(model)._call_impl(model, *args, **kwargs)


PLAIN_CALL = torch.nn.Module._call_impl  # to be pickled by name, and found where duoka is not installed


def set_call(model: torch.nn.Module, call: Callable[..., Any]) -> None:
    """Have `call(...)` take the place of this one module's call."""
    model._call_impl = call  # type: ignore[method-assign]


def call_of(model: torch.nn.Module) -> Any:
    """What `set_call` set."""
    return model._call_impl


def abort_groups() -> None:
    """End all process groups at once, whatever they are in the middle of; one that cannot be is left as it is."""
    with contextlib.suppress(RuntimeError):
        _abort_process_group()


def fake_store() -> Any:
    """The store of a process group "fake", whose collectives return at once and carry nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def in_shape_of(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A matrix with x's leading dims. To autograd it is no view, which nobody could add to in place where a function of
    ours answers with it (Llama 4 adds its experts' answers to those of the shared one)."""
    answer: torch.Tensor = torch.ops.aten._unsafe_view.default(rows, [*x.shape[:-1], rows.shape[-1]])
    return answer
