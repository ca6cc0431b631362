"""DeepSpeed as one more engine: its ZeRO stages 0 to 3 carry a strategy out, all else stays duoka's.

Data plan, loss, norm, clipping, learning rate, events and checkpoints are those of the other engines. DeepSpeed
averages gradients over ranks: that is undone here, by the loss that it is given. Stage 3 fills and cuts one parameter
after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from duoka.comm.world import World
from duoka.config.deepspeed_json import STAGES, engine_json
from duoka.data.feed.loader import GlobalBatch
from duoka.model.build import named_part
from duoka.model.shards import Weights
from duoka.optim.spread import Groups, add_over
from duoka.parallel.deepspeed_disk import SwapFolder, Zero3OnDisk, build_aio, needed_bytes, set_buffers
from duoka.parallel.deepspeed_package import begin_deepspeed, data_group
from duoka.parallel.deepspeed_packed import beside_autocast, check_nodes, check_weights, pack_as_half, pack_weights
from duoka.parallel.deepspeed_room import reserve_room
from duoka.parallel.deepspeed_saved import KeptViews
from duoka.parallel.deepspeed_tensor import add_partial_gradients, elements_elsewhere
from duoka.parallel.deepspeed_zero import Zero3, Zero12, ZeroState, in_whole
from duoka.parallel.engine import Engine, EngineSpec
from duoka.parallel.objective import Objective
from duoka.parallel.out_of_memory import Shortage
from duoka.parallel.single import bring
from duoka.parallel.tensor_part import part_of, whole_shape
from duoka.process.heap import give_back


class DeepSpeed(Engine):
    """The model stays as it is until `build_optimizer`: DeepSpeed begins with the optimizer that it is given there."""

    exchanges_in_passes = True
    offloads_itself = True

    def __init__(self, spec: EngineSpec) -> None:
        self.stage = STAGES[spec.layout.strategy]
        if self.stage < 3:
            bring(spec)
        super().__init__(spec)
        if spec.parallel.compression.weight_bits:
            kept = spec.parallel.deepspeed.stage3_param_persistence_threshold
            check_weights(self.bare, self.mesh.loss.size, kept)
        more = elements_elsewhere(self.bare)
        here = super().count_parameters()  # before stage 3 cuts them
        self._counts = here[0] + more[0], here[1] + more[1]
        self._made_of = spec
        self._has_stepped = False
        self.running: Any = None  # DeepSpeed's own engine
        self.zero: ZeroState | None = None  # None: at stage 0 every rank has all, and it is a plain optimizer's

    def build_optimizer(
        self, make: Callable[[Mapping[str, torch.nn.Parameter]], torch.optim.Optimizer]
    ) -> torch.optim.Optimizer:
        spec, named = self._made_of, self.named_trainable()
        optimizer = make(named)
        layout, tensor = spec.layout, self.mesh.tensor.size
        package = begin_deepspeed(self.world.device, tensor)
        packing = spec.parallel.compression
        if packing.gradient_bits:
            check_nodes(self.world.size)
        on_disk = layout.disk != "none"
        folder = SwapFolder(spec.folder, self).path if on_disk else None
        near = self.mesh.node_size if spec.parallel.reshard == "node" else 0
        sizes = self.mesh.loss.size, folder, near
        settings = engine_json(spec.parallel, layout.strategy, layout.precision, *sizes)
        if folder is not None:
            build_aio(package, self.world.print)
            set_buffers(settings, self.bare, sizes[0])
            needed = needed_bytes(self.bare, sizes[0], weights_too=layout.disk == "params")
            reserve_room(folder, needed, self.world)
        if self.stage == 3:
            group = data_group() if tensor > 1 else None
            fill_and_cut(package, self.bare, spec.source, self.mesh.loss, settings, group)
            give_back()  # whole parameters passed by
            if packing.weight_bits:
                pack_weights(self.bare, spec.parallel.deepspeed.stage3_param_persistence_threshold)
        if tensor > 1:
            add_partial_gradients(self.bare)
        place = SimpleNamespace(device_rank=self.world.device.index or 0)
        given = {"args": place, "model": self.bare, "optimizer": optimizer, "config": settings}
        with beside_autocast():
            self.running, zero, *_ = package.initialize(**given)
        give_back()
        if packing.gradient_bits:
            pack_as_half(self.running.local_all_to_all_group, self.world.device)
        if tensor > 1:  # it would send the first batch's to all that share it, to see that it is the same
            self.running.first_dataloader_check.remove()
        self.model = self.running
        if self.stage:
            kind = Zero3OnDisk if on_disk else Zero3 if self.stage == 3 else Zero12
            self.zero = kind(zero, named, self.mesh.tensor.rank)
        if packing.weight_bits:
            zero.invalidate_secondary_tensor()  # a node's copies of weights that were not packed
        return optimizer

    # --- what is trained ---

    def count_parameters(self) -> tuple[int, int]:
        return self._counts

    def trained_tensors(self) -> dict[str, torch.Tensor]:
        if self.zero is not None:
            return self.zero.trained()
        return {
            name: in_whole(tensor, self.named_trainable()[name]) for name, tensor in super().trained_tensors().items()
        }

    def optimizer_tensors(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        if self.zero is not None:
            return self.zero.state()
        own, named = super().optimizer_tensors(optimizer), self.named_trainable()
        return {name: in_whole(tensor, named[name.partition(".")[2]]) for name, tensor in own.items()}

    def spread_of(self, parameter: torch.Tensor) -> Groups:
        part = part_of(parameter)
        return () if part is None else (part.group,)

    def filled(self) -> None:
        if self.zero is not None:
            self.zero.refresh()

    def lasting_weights(self) -> list[torch.Tensor]:
        return [getattr(parameter, "ds_tensor", parameter) for parameter in self.bare.parameters()]

    def masters(self) -> list[torch.Tensor]:
        return [] if self.zero is None else self.zero.lines()

    def gradients(self) -> list[torch.Tensor]:
        return super().gradients() if self.zero is None else self.zero.gradients()

    @property
    def disk_bytes(self) -> int:
        return 0 if self.zero is None else self.zero.disk_bytes()

    # --- one optimizer step ---

    @contextlib.contextmanager
    def exchange(self, last: bool) -> Iterator[None]:
        self.running.set_gradient_accumulation_boundary(last)
        with KeptViews() if self.stage == 3 else contextlib.nullcontext():
            yield

    def backward(self, loss: torch.Tensor) -> None:
        # The one place where DeepSpeed's mean over ranks is undone.
        self.running.backward(loss * self.mesh.loss.size, scale_wrt_gas=False)

    def clip(self, optimizer: torch.optim.Optimizer, max_norm: float, *, is_scaled: bool = True) -> torch.Tensor:
        if self.zero is None:
            return super().clip(optimizer, max_norm, is_scaled=is_scaled)
        # Of what ranks of the tensor axis all have, the first one's counts.
        groups = (self.world.group,) if self.world.size > 1 else ()
        norm = add_over(self.zero.norm_square(), groups, self.world.device.type).sqrt()
        self.zero.shorten(norm, max_norm)
        return norm

    def step(self, optimizer: torch.optim.Optimizer, *, overflowed: bool = False) -> None:
        self.running.step()
        if not self._has_stepped:
            # What the first step made, to stay, lies where its buckets were: the next ones would lie beside that room.
            give_back()
            self._has_stepped = True

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Done: DeepSpeed's step ends with it, and what it accumulates into on the host has to stay."""
        if self.zero is None:
            super().zero_grad(optimizer)

    def discard_exchange(self, optimizer: torch.optim.Optimizer, *, is_short: bool, overflowed: bool) -> None:
        self.forget_gradients()

    def forget_gradients(self) -> None:
        if self.zero is None:
            self.running.zero_grad()
        else:
            self.zero.discard()

    # --- passes that are no step ---

    def settle(self) -> None:
        """Give back weights that a pass without a backward (an evaluation) left gathered."""
        if self.stage == 3 and self.running is not None:
            self.running.empty_partition_cache()

    def rejoin(self, shortage: Shortage, batch: GlobalBatch, objective: Objective) -> bool:
        """Impossible: DeepSpeed knows of no pass that stops in the middle."""
        return False


def fill_and_cut(
    package: Any, bare: torch.nn.Module, source: Weights | None, ranks: World, settings: Mapping[str, Any], group: Any
) -> None:
    """Give a model its weights and each rank its parts of them, parameter by parameter; the first of `ranks` reads.

    `group`: DeepSpeed's of these ranks, None where they are all.
    """
    names: dict[int, list[str]] = {}
    lm, device = named_part(bare), ranks.device
    for name, parameter in lm.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    first: Any = None
    for parameter in lm.parameters():
        if parameter.is_meta and source is not None:
            part, shape = part_of(parameter), parameter.shape
            name = next(name for name in names[id(parameter)] if source.knows(name, whole_shape(parameter)))
            # Others are sent the first one's.
            box = None if part is None else part.box
            values = source.read(name, whole_shape(parameter), box) if ranks.rank == 0 else torch.empty(shape)
            values = values.to(device, parameter.dtype).contiguous()
            filled = torch.nn.Parameter(values, requires_grad=parameter.requires_grad)
            filled.__dict__.update(parameter.__dict__)  # what DeepSpeed noted on it
            torch.utils.swap_tensors(parameter, filled)
        if first is None:
            alone = torch.nn.ParameterList([parameter])
            package.zero.Init(
                module=alone, config_dict_or_path=dict(settings), mem_efficient_linear=False,
                data_parallel_group=group,
            )  # fmt: skip
            first = parameter
        else:
            first.convert_to_zero_parameters(param_list=[parameter])
    if source is not None:
        source.close()
    for module in bare.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
