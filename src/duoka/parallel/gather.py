"""From shards to full tensors, for writing a model that other programs read."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from duoka.comm.world import World
from duoka.parallel.flat_shard import gather_cut, is_cut_flat
from duoka.parallel.tensor_part import join_parts, part_of


def gather_state(lm: torch.nn.Module, *, keep: bool, pipeline: World | None = None) -> dict[str, torch.Tensor]:
    """The model's tensors in host memory by name; of adapters, only what was trained.

    All ranks call it; those with `keep` get the tensors. One is gathered at a time: no rank ever holds them all but
    the one that asked to. `pipeline`: the ranks whose layers make the model, each of which has other names.
    """
    # Each rank of a pipeline has its layers whole first, when another rank of it asked to.
    is_split = pipeline is not None and pipeline.size > 1 and any(pipeline.gather(keep))
    holds = keep or is_split
    adapters_only = hasattr(lm, "peft_config")
    state: dict[str, torch.Tensor] = {}
    made: dict[int, torch.Tensor] = {}
    for name, tensor in lm.state_dict(keep_vars=True).items():
        if adapters_only and not tensor.requires_grad:
            continue
        if id(tensor) not in made:
            whole = gather_cut(tensor) if is_cut_flat(tensor) else tensor.detach()
            if (part := part_of(tensor)) is not None:
                whole = join_parts(whole, part)
            if isinstance(whole, DTensor):
                # Offloaded shards lie in host memory, which the mesh's ranks cannot exchange.
                whole = whole.to(whole.device_mesh.device_type).full_tensor()
            made[id(tensor)] = whole.cpu() if holds else torch.empty(0)
        # Shared tensors stay shared, so that transformers finds tied heads and writes them once.
        state[name] = made[id(tensor)]
    if pipeline is not None and is_split:
        return _add_other_layers(state, pipeline, keep=keep)
    return state if keep else {}


def _add_other_layers(own: dict[str, torch.Tensor], pipeline: World, *, keep: bool) -> dict[str, torch.Tensor]:
    """Tensor by tensor, each from the first rank that has its name; all ranks of a pipeline call it."""
    everyone = pipeline.gather([(name, tuple(tensor.shape), tensor.dtype) for name, tensor in own.items()])
    found: dict[str, torch.Tensor] = {}
    for rank, listed in enumerate(everyone):
        for name, shape, dtype in listed:
            if name in found:
                continue
            here = rank == pipeline.rank
            sent = own[name].to(pipeline.device) if here else torch.empty(shape, dtype=dtype, device=pipeline.device)
            dist.broadcast(sent, group_src=rank, group=pipeline.group)
            found[name] = (own[name] if here else sent.cpu()) if keep else torch.empty(0)
    return found if keep else {}
