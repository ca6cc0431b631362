"""State shared by ranks: ZeRO-1, ZeRO-2, ZeRO-3 = FSDP and HSDP, all on FSDP2 (`fully_shard`), a unit per layer.

They differ in what is exchanged when. zero1: weights gathered once and gradients reduced once per optimizer step.
zero2: gradients reduced after every micro-batch, so that only shards of them are kept. fsdp: weights gathered for
each pass as well. hsdp: fsdp inside groups of ranks, gradients added over the groups at the last micro-batch.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard

from duoka.comm.world import World
from duoka.config.schema import ParallelConfig
from duoka.data.feed.loader import GlobalBatch
from duoka.errors import ConfigError
from duoka.model.build import GATHERED_HEAD, LossModel, find_core, named_part, use_head
from duoka.model.layers import beside_text, find_blocks, find_layers, is_transformer
from duoka.model.value_head import ValueModel
from duoka.optim.clip import shortening
from duoka.optim.disk import DiskAdamW
from duoka.optim.muon import Sharing
from duoka.optim.spread import Groups
from duoka.parallel.engine import Engine, EngineSpec
from duoka.parallel.expert import is_shared_expert
from duoka.parallel.fill import fill_weights
from duoka.parallel.fsdp_comm import LayerBuffers, Packing, count_traffic
from duoka.parallel.matrices import OwnedMatrices
from duoka.parallel.mesh import Mesh
from duoka.parallel.objective import Objective
from duoka.parallel.one_rank import compute_alone
from duoka.parallel.out_of_memory import Shortage
from duoka.parallel.precision import HALF
from duoka.parallel.shards_on_disk import ShardsOnDisk
from duoka.plan.layout import Layout
from duoka.plan.sizes import cuts_inside
from duoka.torch_private import let_go_of_sent_gradients


class Sharded(Engine):
    """Says before each micro-batch what its passes exchange."""

    exchanges_in_passes = True

    def __init__(self, spec: EngineSpec) -> None:
        layout, bare = spec.layout, spec.bare
        if layout.strategy in ("fsdp", "hsdp") and any(hasattr(one, "CB") for one in bare.parameters()):
            raise ConfigError(  # strategy: auto may come here
                f"parallel.strategy is {layout.strategy}, and the base is packed in 8 bits (bitsandbytes), whose "
                "scales it cannot cut",
                fix="write:   strategy: zero2   or   strategy: ddp",
            )
        # Muon's matrices have an owner each where weights are whole on every rank.
        apart = spec.matrices if layout.strategy in ("zero1", "zero2") else ()
        _check_whole_numbers(bare, layout)
        self.sharded = apply_sharded(bare, layout, spec.parallel, spec.mesh, apart)
        is_host = spec.mesh.everyone.device.type == "cpu"
        self.alone = compute_alone(_units(self.sharded)) if is_host and layout.has_one_shard else None
        self.strategy = layout.strategy
        part = named_part(bare)
        self.on_disk = ShardsOnDisk(part, spec.folder) if layout.disk == "params" else None
        if spec.source is not None:
            home = torch.device("cpu") if layout.offload == "params" else None
            keep = self.on_disk.keep if self.on_disk else None
            fill_weights(part, spec.source, spec.mesh.everyone.device, home, keep)
        elif self.on_disk:
            self.on_disk.move(part)
        if self.on_disk:
            self.on_disk.take_gradients(part, _units(self.sharded))
        super().__init__(spec)
        self.owned = _share_owned(spec, apart) if apart else None

    @contextlib.contextmanager
    def exchange(self, last: bool) -> Iterator[None]:
        if self.owned is not None:
            self.owned.begin(last)
        if self.alone is not None:
            self.alone.begin()
        self.sharded.set_is_last_backward(last)
        if self.strategy == "zero1":
            self.sharded.set_requires_gradient_sync(last)
        if self.strategy in ("zero1", "zero2"):
            self.sharded.set_reshard_after_backward(last)
        if self.strategy == "hsdp":
            self.sharded.set_requires_all_reduce(last)
        if self.on_disk is not None:
            self.on_disk.begin_pass()
        yield
        if not last:
            let_go_of_sent_gradients(self.sharded)
        if self.on_disk is not None:
            self.on_disk.finish_pass()
        if self.owned is not None:
            self.owned.finish(last)

    def clip(self, optimizer: torch.optim.Optimizer, max_norm: float, *, is_scaled: bool = True) -> torch.Tensor:
        if self.on_disk is None or not isinstance(optimizer, DiskAdamW):
            return super().clip(optimizer, max_norm, is_scaled=is_scaled)
        norm = super().clip(optimizer, 0.0, is_scaled=is_scaled)
        factor = shortening(norm, max_norm).cpu() if max_norm > 0 else None
        # Shortened as they are used: in the file, each page would be read and written once more.
        optimizer.factor = None if factor is None or factor == 1 else factor
        return norm

    def step(self, optimizer: torch.optim.Optimizer, *, overflowed: bool = False) -> None:
        if self.on_disk is not None and isinstance(optimizer, DiskAdamW):
            optimizer.before_part = self.on_disk.will_update
            optimizer.after_slice = self.let_go  # or all weights and gradients would be mapped at once
        super().step(optimizer, overflowed=overflowed)

    @property
    def disk_bytes(self) -> int:
        return super().disk_bytes + (0 if self.on_disk is None else self.on_disk.size_bytes)

    @property
    def let_go(self) -> Callable[[], None] | None:
        return None if self.on_disk is None else self.on_disk.let_go

    def masters(self) -> list[torch.Tensor]:
        return list(self.named_trainable().values()) if self.strategy in ("zero1", "zero2") else []

    def settle(self) -> None:
        """Give back weights that a pass without a backward (an evaluation) left gathered."""
        for module in _units(self.sharded):
            module.reshard()

    def rejoin(self, shortage: Shortage, batch: GlobalBatch, objective: Objective) -> bool:
        """Impossible: it stopped between two all-gathers of layers, and the other ranks wait in the next one."""
        return False

    def spread_of(self, parameter: torch.Tensor) -> Groups:
        if self.owned is not None and self.owned.owns(parameter):
            return (self.owned.group,)
        return super().spread_of(parameter)

    def share_matrices(self, matrices: list[torch.nn.Parameter]) -> Sharing:
        return super().share_matrices(matrices) if self.owned is None else self.owned


def _cutting(layout: Layout, over: DeviceMesh) -> Callable[[torch.nn.Parameter], Shard | None] | None:
    """None where shards lie on a disk: as they are gathered."""
    return None if layout.disk == "params" else functools.partial(_cut, num_ranks=over.size(over.ndim - 1))


def _cut(parameter: torch.nn.Parameter, num_ranks: int) -> Shard | None:
    """Along which dim ranks share it; None: the first, which is filled up with zeros to a multiple of the ranks.

    Of experts, which are one tensor, that may be several times as much as there is to gather.
    """
    if parameter.ndim < 3 or isinstance(parameter, DTensor):
        return None
    return Shard(1) if cuts_inside(parameter.shape[0], parameter.shape[1], num_ranks) else None


def _share_owned(spec: EngineSpec, apart: Collection[str]) -> OwnedMatrices:
    named = dict(named_part(spec.bare).named_parameters())
    return OwnedMatrices(
        [named[name] for name in named if name in apart],
        spec.mesh.loss.size,
        spec.mesh.loss.rank,
        # A group of their own: their gradients travel between those of FSDP's units, in whatever order.
        spec.mesh.separate_loss_group(),
        every_pass=spec.layout.strategy == "zero2",
        wire=HALF.get(spec.parallel.compression.gradients, torch.float32),
    )


def _check_whole_numbers(bare: torch.nn.Module, layout: Layout) -> None:
    """FSDP of torch 2.11 makes a parameter of each shard that could learn, which no packed one can be."""
    if layout.strategy in ("zero1", "zero2"):  # weights stay whole
        return
    packed = next((name for name, one in bare.named_parameters() if not one.is_floating_point()), None)
    if packed and torch.__version__ < "2.13":  # compared as a version; 2.12 was not tried
        raise ConfigError(
            f"the base is packed ({packed}), and FSDP of torch {torch.__version__} does not share out packed weights",
            fix="install torch 2.13 or newer, or write   parallel: {strategy: ddp}",
        )


def apply_sharded(
    bare: torch.nn.Module, layout: Layout, parallel: ParallelConfig, mesh: Mesh, apart: Collection[str] = ()
) -> FSDPModule:
    """Shard in place: each layer, the embedding and an untied head are units; the rest is the root's.

    Left out: parameters named in `apart`, whose owners exchange gradients, and experts that ranks share out.
    """
    core = find_core(bare)
    keeps_weights = layout.strategy in ("zero1", "zero2")
    # Where weights stay whole, a frozen base is never exchanged at all.
    ignored = {p for p in bare.parameters() if not p.requires_grad} if keeps_weights else set()
    ignored |= {p for name, p in named_part(bare).named_parameters() if name in apart or is_shared_expert(p)}
    _bring(ignored, mesh.everyone.device)
    half, reduced = HALF.get(layout.precision), HALF.get(parallel.compression.gradients, torch.float32)
    # Layers compute in half precision from half-precision copies; the residual stream that the embedding begins, norms,
    # and what the root holds, stay as wide as in one process, whose autocast casts only inside matrix products: a step
    # moves a norm's weight, which is about 1, by less than half precision can tell.
    # Inputs are not cast: rotary tables lose what the residual stream keeps.
    narrow = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=reduced, cast_forward_inputs=False)
    wide = MixedPrecisionPolicy(reduce_dtype=reduced, cast_forward_inputs=False)
    world = mesh.everyone
    offload, over = _offload_policy(layout, world), mesh.sharding

    def shard(
        module: torch.nn.Module,
        policy: MixedPrecisionPolicy,
        reshard: bool | int | None,
        ignored: Collection[torch.nn.Parameter] = ignored,
    ) -> None:
        fully_shard(
            module,
            mesh=over,
            reshard_after_forward=reshard,
            mp_policy=policy,
            offload_policy=offload,
            ignored_params=set(ignored),
            shard_placement_fn=_cutting(layout, over),
        )

    reshard, packing = _reshard_after_forward(parallel, layout, mesh), _packing(parallel, layout, mesh)
    # Layers that are not transformers' may mix types in ways that only autocast sorts out.
    layers, policy = (find_layers(core), narrow) if is_transformer(core) else (find_blocks(core), wide)
    rising = _wide_modules(layers) if half and policy is narrow else []
    with_root = {one for module in rising for one in module.parameters(recurse=False)}
    for layer in layers:
        shard(layer, policy, reshard, ignored | with_root)
    for module, policy in _ends(core, narrow, wide) + [(one, wide) for one in (*_beside_narrow(bare), *_towers(core))]:
        shard(module, policy, reshard)
    if isinstance(bare, LossModel):
        _gather_head_for_loss(bare)
    # The root is needed again at once when the backward pass begins: None keeps it gathered until its end.
    with _children(bare, rising):
        in_layers = {one for layer in layers for one in layer.parameters()} - with_root
        shard(bare, wide, None if reshard else False, ignored | in_layers)
    if isinstance(bare, LossModel):
        for name in ("next_token", "continue_from", "look_at_slots"):
            register_fsdp_forward_method(bare, name)
    _set_exchange(bare, layers, layout, world, packing)
    assert isinstance(bare, FSDPModule)
    return bare


def _set_exchange(
    bare: torch.nn.Module, layers: list[torch.nn.Module], layout: Layout, world: World, packing: Packing
) -> None:
    buffers, known = LayerBuffers(), {id(layer) for layer in layers}
    for unit in _units(bare):
        # The one place where the mean over ranks is undone: the loss is divided by the global count already.
        # Summed by force, because gloo has no scaled sum and NCCL's would only multiply by one.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        # The root and the ends are each of a size of their own: no other unit could reuse their buffers.
        count_traffic(unit, layout, world.heart, buffers if id(unit) in known else None, packing)
    for first, second in itertools.pairwise(layers):
        first.set_modules_to_forward_prefetch([second])  # type: ignore[operator]


def _wide_modules(layers: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Those that hold vectors alone: norms, scales, sinks of attention. Autocast leaves them wide."""
    held = [(module, list(module.parameters(recurse=False))) for layer in layers for module in layer.modules()]
    return [module for module, own in held if own and all(one.dim() == 1 for one in own)]


@contextlib.contextmanager
def _children(root: torch.nn.Module, modules: list[torch.nn.Module]) -> Iterator[None]:
    """While the context lasts, FSDP finds these modules right under the root, not only in units of their own."""
    root.add_module("rising", torch.nn.ModuleList(modules))
    try:
        yield
    finally:
        del root.rising


def _offload_policy(layout: Layout, world: World) -> OffloadPolicy:
    if layout.offload != "params":
        return OffloadPolicy()
    # Pages of a file cannot be pinned.
    return CPUOffloadPolicy(pin_memory=world.device.type == "cuda" and layout.disk != "params")


def _reshard_after_forward(parallel: ParallelConfig, layout: Layout, mesh: Mesh) -> bool | int:
    """False: weights stay whole; a number: so many neighbors share a copy of them until the backward pass."""
    # Of a node's ranks those of one tensor-parallel row share weights: the number counts along the shards.
    near = mesh.node_size // layout.tp if parallel.reshard == "node" else 0
    if 1 < near < layout.state_ranks and layout.state_ranks % near == 0:
        return near
    return bool(parallel.reshard) and layout.strategy not in ("zero1", "zero2")


def _packing(parallel: ParallelConfig, layout: Layout, mesh: Mesh) -> Packing:
    asked = parallel.compression
    nodes = mesh.nodes() if asked.gradient_bits else None
    return Packing(asked.weight_bits, asked.gradient_bits, layout.state_ranks, nodes)


def _bring(ignored: Collection[torch.nn.Parameter], device: torch.device) -> None:
    """To the device, as FSDP brings all that it shards; nobody else would bring what it leaves alone."""
    for parameter in ignored:
        if not parameter.is_meta:
            parameter.data = parameter.data.to(device)


def _units(model: torch.nn.Module | FSDPModule) -> list[FSDPModule]:
    assert isinstance(model, torch.nn.Module)
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _ends(
    core: torch.nn.Module, narrow: MixedPrecisionPolicy, wide: MixedPrecisionPolicy
) -> list[tuple[torch.nn.Module, MixedPrecisionPolicy]]:
    """Embedding and head as units of their own, unless they share a weight: shared ones belong to the root."""
    if not is_transformer(core):
        return []
    embedding = core.get_input_embeddings()  # type: ignore[operator]
    head = core.get_output_embeddings()  # type: ignore[operator]
    shared = {id(p) for p in embedding.parameters()} & ({id(p) for p in head.parameters()} if head else set())
    if shared:
        return []
    ends = [(embedding, wide), (head, narrow)]
    # Of a pipeline, another rank has the one or the other.
    return [(end, policy) for end, policy in ends if end is not None and any(True for _ in end.parameters())]


def _beside_narrow(bare: torch.nn.Module) -> list[torch.nn.Module]:
    """The head of values where it stays fp32 beside weights that are trained in bf16: a unit trains one type."""
    if not isinstance(bare, ValueModel):
        return []
    types = {parameter.dtype for parameter in bare.parameters() if parameter.requires_grad}
    return list(bare.v_head.values()) if len(types) > 1 else []


def _towers(core: torch.nn.Module) -> list[torch.nn.Module]:
    """For images and sound, their blocks first: gathered where these are computed, and not with the root."""
    return [one for tower in beside_text(core).values() for one in (*find_blocks(tower), tower)]


def _gather_head_for_loss(bare: LossModel) -> None:
    """The fused loss reads the head's weight without calling the head: gather it around that call, as for a forward."""
    head = bare.core.get_output_embeddings()  # type: ignore[operator]
    if bare.has_plain_head and isinstance(head, FSDPModule):
        setattr(head, GATHERED_HEAD, types.MethodType(use_head, head))
        register_fsdp_forward_method(head, GATHERED_HEAD)  # type: ignore[arg-type]
