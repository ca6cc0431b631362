"""parallel.engine deepspeed with a tensor axis: DeepSpeed's AutoTP puts its layers where ranks share a matrix.

Which modules are cut, and how, is read off the plan that transformers ships, as for duoka's own axis, and told AutoTP
layer by layer: by itself it goes by names where it finds no plan. Embedding and head stay whole on every rank: AutoTP
would gather logits, or compute a loss of its own, where duoka's loss reads the head without calling it.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from duoka.errors import ConfigError
from duoka.model.build import find_core
from duoka.parallel.deepspeed_package import begin_deepspeed
from duoka.parallel.mesh import Mesh
from duoka.parallel.tensor import refuse_inner_dropout
from duoka.parallel.tensor_part import TensorPart, note_part, part_of
from duoka.parallel.tensor_roles import Part, find_parts

_AUTOTP = "autotp"  # on a model that was cut: what cut it
NATIVELY = "write:   engine: native   (whose tensor axis does), or delete tensor:"


def cut_by_autotp(bare: torch.nn.Module, mesh: Mesh) -> None:
    """Cut a model over the tp axis, in place; on the meta device it costs nothing. All ranks call it."""
    size, core = mesh.tensor.size, find_core(bare)
    refuse_inner_dropout(bare, size)
    parts = find_parts(core, size)
    head, words = core.get_output_embeddings(), core.get_input_embeddings()  # type: ignore[operator]
    for name in [name for name in parts if core.get_submodule(name) in (head, words)]:
        del parts[name]
    if strange := next((f"{name} ({part})" for name, part in parts.items() if part in ("own_rows", "experts")), None):
        raise ConfigError(f"parallel.tensor is {size}, and DeepSpeed's AutoTP does not cut {strange}", fix=NATIVELY)
    begin_deepspeed(mesh.everyone.device, size)
    whole = {
        f"{name}.{key}": parameter.shape
        for name in parts
        for key, parameter in core.get_submodule(name).named_parameters(recurse=False)
    }
    autotp = _autotp(core, parts, size)
    with _same_sizes(core):
        autotp._replace_module(core)
    setattr(bare, _AUTOTP, autotp)
    bare.ds_autotp_parsed = True  # type: ignore[assignment]  # DeepSpeed's own mark: it cuts nothing again
    for name, shape in whole.items():
        dim = {"columns": 0, "joined": 0, "rows": 1}.get(parts[name.rpartition(".")[0]])
        if dim is None or len(shape) <= dim:  # each rank has all of it
            continue
        parameter: Any = core.get_parameter(name)
        if parameter.shape[dim] * size != shape[dim]:
            what = f"AutoTP left {name} {tuple(parameter.shape)} of {tuple(shape)}, which are no equal parts"
            raise ConfigError(f"parallel.tensor is {size}, and DeepSpeed's {what}", fix=NATIVELY)
        first = mesh.tensor.rank * parameter.shape[dim]
        note_part(parameter, TensorPart(shape, dim, first, mesh.tensor.group))


@contextlib.contextmanager
def _same_sizes(core: torch.nn.Module) -> Iterator[None]:
    """AutoTP divides whatever of a module is called num_heads or embed_dim. transformers' models count heads by the
    tensors that they get, and CodeGen finds its queries by the whole width."""
    before = {module: {key: one for key, one in vars(module).items() if type(one) is int} for module in core.modules()}
    yield
    for module in core.modules():
        vars(module).update(before.get(module, {}))


def _autotp(core: torch.nn.Module, parts: dict[str, Part], size: int) -> Any:
    from deepspeed.module_inject.auto_tp import AutoTP
    from deepspeed.module_inject.autotp_config import AutoTPConfig, PartitionType, TPLayerSpec
    from deepspeed.module_inject.layers import set_autotp_mode

    set_autotp_mode(training=True)

    def spec(kinds: tuple[Part, ...], how: Any, **more: bool) -> list[Any]:
        patterns = _patterns(name for name, part in parts.items() if part in kinds)
        return [TPLayerSpec(patterns=patterns, partition_type=how, **more)] if patterns else []

    specs = [
        *spec(("columns",), PartitionType.COLUMN), *spec(("joined",), PartitionType.COLUMN, gather_output=True),
        *spec(("rows",), PartitionType.ROW), *spec(("partial",), PartitionType.SKIP, grad_allreduce=True),
    ]  # fmt: skip
    autotp = AutoTP(
        module=core, all_reduce_linears=(), prefix="", state_dict=None, orig_layer_impl=None,
        linear_layer_setting=(torch.nn.Linear, torch.nn.Embedding), model_config=core.config, training_mode=True,
        partition_config=AutoTPConfig(tp_size=size, layer_specs=specs),
    )  # fmt: skip
    autotp.set_tensor_parallel_config(size, None)  # the group is the one that it was begun with
    autotp.update_linear_policies()
    return autotp


def _patterns(names: Iterable[str]) -> list[str]:
    """One for all layers: each of hundreds would be tried for each of hundreds."""
    patterns = dict.fromkeys(re.sub(r"\.\d+\b", ".#", name) for name in names)
    return [f"^{re.escape(one).replace(re.escape('.#'), '[.][0-9]+')}[.]weight$" for one in patterns]


def add_partial_gradients(bare: torch.nn.Module) -> None:
    """Norms of single heads see a part of them on each rank: AutoTP adds up their gradients. Once weights are there."""
    autotp: Any = getattr(bare, _AUTOTP, None)
    if autotp is not None:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints that it did
            autotp.register_replicated_grad_hooks(find_core(bare))


def elements_elsewhere(bare: torch.nn.Module) -> tuple[int, int]:
    """(all, trained) elements of parameters that other ranks have."""
    found = [0, 0]
    for parameter in bare.parameters():
        if (part := part_of(parameter)) is not None:
            more = part.shape.numel() - parameter.numel()
            found[0] += more
            found[1] += more if parameter.requires_grad else 0
    return found[0], found[1]
