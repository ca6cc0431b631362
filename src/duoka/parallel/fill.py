"""From files to a model on the meta device: tensor by tensor to where it is trained, and never whole in host memory.

Called by the engines, once the model is laid out as they want it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor

from duoka.model.box import Box
from duoka.model.shards import Weights
from duoka.parallel.tensor_part import part_of, whole_shape
from duoka.torch_private import compute_local_shape_and_global_offset, like_sharded

Keep = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def fill_weights(
    lm: torch.nn.Module,
    source: Weights,
    device: torch.device,
    home: torch.device | None = None,
    keep: Keep | None = None,
) -> None:
    """Give a model on the meta device its weights: of a sharded one each rank reads its own rows, and no others.

    `home`: where shards are kept, when that is not where they are computed with; `keep` gives a shard's values their
    place there.
    """
    aliases: dict[int, list[str]] = {}
    for name, parameter in lm.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    state: dict[str, torch.Tensor] = {}
    for parameter in lm.parameters():
        names = aliases[id(parameter)]
        name = next(name for name in names if source.knows(name, whole_shape(parameter)))
        # One object under all its names: tied weights stay tied.
        where = home if home is not None and isinstance(parameter, DTensor) else device
        filled = torch.nn.Parameter(_read(name, parameter, source, where, keep), requires_grad=parameter.requires_grad)
        filled.__dict__.update(parameter.__dict__)  # what DeepSpeed noted on it
        state |= dict.fromkeys(names, filled)
    lm.load_state_dict(state, strict=False, assign=True)
    source.close()


def _read(name: str, parameter: torch.Tensor, source: Weights, device: torch.device, keep: Keep | None) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        part = part_of(parameter)
        values = source.read(name, whole_shape(parameter), None if part is None else part.box)
        return values.to(device, parameter.dtype).contiguous()
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    values = source.read(name, parameter.shape, Box(tuple(offset), tuple(shape)))
    # Not from_local: it would move what is offloaded to the mesh's device.
    # Contiguous: columns of what was drawn whole are a view, which FSDP cannot take.
    values = values.to(device, parameter.dtype).contiguous()
    return like_sharded(parameter, values if keep is None else keep(parameter, values))
