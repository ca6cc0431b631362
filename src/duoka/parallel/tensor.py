"""Tensor parallelism: the matrices of each layer are cut over ranks, which compute one model's activations together.

`cut_matrices` makes each parameter a DTensor on the mesh's tp axis, so that sharding, checkpoints, optimizers and the
final folder know what of it a rank has, and gives its module a forward that works on this rank's part and exchanges
what has to be (tensor_exchange.py). On the meta device it costs nothing, and weights are read by boxes later. Plain
vectors (norms) stay whole on all ranks, which compute them from the same activations.

Some are whole and see a part of the activations only: norms of single heads, the A of adapters before cut columns,
their B behind cut rows.
Their gradients are parts too; `sum_parts` adds them up once a step. Never per backward pass: what earlier micro-batches
left there would be added again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from duoka.comm.collectives import all_reduce
from duoka.comm.world import World
from duoka.errors import ConfigError
from duoka.model.adapted import is_fused
from duoka.model.build import LossModel, find_core
from duoka.model.dropout import CountedDropout
from duoka.model.head import here
from duoka.model.split_products import product
from duoka.model.vocabulary import VOCABULARY, SharedVocabulary
from duoka.optim.host import local_part
from duoka.parallel.mesh import Mesh
from duoka.parallel.tensor_exchange import bounds, joined, own_part, spread, total
from duoka.parallel.tensor_roles import COLUMNS, Part, find_parts, linear_of

_IS_PART = "gradient_is_part"  # of modules whose parameters have a part of their gradient on each rank


def cut_matrices(bare: torch.nn.Module, mesh: Mesh) -> None:
    """Cut a model over the tp axis, in place; refuses by name what has no known part in it."""
    world, core = mesh.tensor, find_core(bare)
    refuse_inner_dropout(bare, world.size)
    parts = find_parts(core, world.size, shares_experts=mesh.experts.size > 1)
    cutter = _Cutter(mesh)
    regions: dict[str, _Region] = {}
    head = core.get_output_embeddings()  # type: ignore[operator]
    for name, part in parts.items():
        module: Any = core.get_submodule(name)
        if part == "experts":  # parallel/expert.py cuts them, by expert
            continue
        if part == "partial":
            setattr(module, _IS_PART, True)
        elif part == "words":
            _cut_embedding(module, world, cutter)
        else:
            _cut_linear(module, part, world, cutter, name)
            if part in COLUMNS and module is not head:
                regions.setdefault(name.rpartition(".")[0], _Region(world)).add(module)
        if module is head:
            share_words(module, world)
    for name, region in regions.items():
        if all(f"{name}.{child}".startswith(tuple(parts)) for child, _ in core.get_submodule(name).named_parameters()):
            region.attach(core.get_submodule(name))


def refuse_inner_dropout(bare: torch.nn.Module, size: int) -> None:
    if isinstance(bare, LossModel) and bare.drops is not None and bare.drops.own:
        raise ConfigError(
            f"parallel.tensor is {size}, and the model's config.json asks for dropout inside its layers",
            where="heads and units are counted from a layer's first one, which ranks that share a layer do not see",
            fix="set the dropout in config.json to 0, or delete tensor:",
        )


# --- parameters ---


class _Cutter:
    """Cuts each parameter once: one that two modules share stays one."""

    def __init__(self, mesh: Mesh) -> None:
        self.axis = mesh.device_mesh["tp"]
        self._made: dict[int, tuple[torch.nn.Parameter, torch.nn.Parameter]] = {}

    def cut(self, module: torch.nn.Module, name: str, dim: int) -> None:
        whole = module._parameters[name]
        if whole is None or isinstance(whole, DTensor):
            return
        if id(whole) not in self._made:
            part = distribute_tensor(whole.detach(), self.axis, [Shard(dim)], src_data_rank=None)
            # A copy: a view would keep the whole matrix in memory.
            own = torch.nn.Parameter(part.clone(), requires_grad=whole.requires_grad)
            self._made[id(whole)] = whole, own  # the key is the whole one's as long as it lives
        module._parameters[name] = self._made[id(whole)][1]


# --- modules ---


class Columns(torch.nn.Linear):
    """This rank's outputs."""

    world: World
    adapts_parts = True  # an adapter is computed with the product (model/adapted.py)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return product(self, x, here(self.weight), here(self.bias))

    def given(self, out: torch.Tensor) -> torch.Tensor:
        return out


class JoinedColumns(Columns):
    """All outputs, of which each rank has computed its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.given(super().forward(x))

    def given(self, out: torch.Tensor) -> torch.Tensor:
        return joined(out, self.world, self.out_features)


class Rows(torch.nn.Linear):
    """The sum of what ranks make of their inputs; the bias is added once, to the sum."""

    world: World
    takes_parts = adapts_parts = True  # of the input: a gate in front is computed with the product (model/gated.py)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.given(product(self, x, self.own_weight(), None))

    def own_weight(self) -> torch.Tensor:
        weight: torch.Tensor = here(self.weight)
        return weight

    def given(self, out: torch.Tensor) -> torch.Tensor:
        out = total(out, self.world)
        return out if self.bias is None else out + self.bias.to(out.dtype)


class OwnRows(Rows):
    """The same of whole inputs."""

    takes_parts = adapts_parts = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(own_part(x, self.world))


class Words(torch.nn.Embedding):
    """Rows of this rank's words, and of the others' from them."""

    world: World

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = here(self.weight)
        first, size = bounds(self.num_embeddings, self.world)
        place = input - first
        elsewhere = (place < 0) | (place >= size)
        pad = None if self.padding_idx is None else self.padding_idx - first
        rows = F.embedding(
            place.masked_fill(elsewhere, 0), weight, pad if pad is not None and 0 <= pad < size else None
        )
        return total(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.world)


_KINDS: dict[Part, type[torch.nn.Linear]] = {
    "columns": Columns, "joined": JoinedColumns, "rows": Rows, "own_rows": OwnRows,
}  # fmt: skip


def _cut_linear(module: Any, part: Part, world: World, cutter: _Cutter, name: str) -> None:
    """A linear layer, and what adapters put beside it."""
    kind, dim = _KINDS[part], 0 if part in COLUMNS else 1

    def cut(linear: Any) -> None:
        linear.__class__, linear.world = kind, world
        cutter.cut(linear, "weight", dim)
        if dim == 0:
            cutter.cut(linear, "bias", 0)

    cut(linear_of(module))
    if linear_of(module) is module:
        return
    for adapter in module.lora_A:
        # Before cut columns A reads what all ranks have, and gets from each rank's B a part of its gradient.
        cut(module.lora_B[adapter] if dim == 0 else module.lora_A[adapter])
        setattr(module.lora_A[adapter], _IS_PART, dim == 0)
        drop = module.lora_dropout[adapter]
        if part == "rows" and isinstance(drop, CountedDropout):
            drop.begin_at(bounds(linear_of(module).in_features, world)[0])  # type: ignore[arg-type]


def _cut_embedding(module: Any, world: World, cutter: _Cutter) -> None:
    kind = type(module)
    # A model's own embedding, which scales what it looks up: it calls ours in place of torch's.
    bases = (Words,) if kind is torch.nn.Embedding else (kind, Words)
    module.__class__, module.world = type(f"Shared{kind.__name__}", bases, {}), world
    cutter.cut(module, "weight", 0)


def share_words(module: Any, world: World) -> None:
    """The fused loss reads a head without calling it; where it is called, its input and its adapter's lead in."""
    layer: Any = linear_of(module)
    num_words = layer.out_features
    first, size = bounds(num_words, world)

    def all_ranks(values: torch.Tensor, op: Any = torch.distributed.ReduceOp.SUM) -> torch.Tensor:
        with world.heart.exchange("all_reduce of the loss's sums (over tensor)"):
            return all_reduce(values, world.group, op)

    shared = SharedVocabulary(
        first, size, num_words, -(-num_words // world.size),
        add=all_ranks, most=functools.partial(all_ranks, op=torch.distributed.ReduceOp.MAX),
        spread_rows=functools.partial(spread, world=world),
    )  # fmt: skip
    setattr(layer, VOCABULARY, shared)
    readers = [layer]
    if layer is not module:
        readers += list(module.lora_B.values())
        for adapter in module.lora_A.values():
            setattr(adapter, _IS_PART, False)
    for reader in readers:
        reader.register_forward_pre_hook(lambda _, args: (spread(args[0], world), *args[1:]))


class _Region:
    """A block with products by columns: where they read the block's own input, that is led in once for all of them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._readers = 0
        self._led_in: torch.Tensor | None = None

    def add(self, reader: torch.nn.Module) -> None:
        self._readers += 1
        reader.register_forward_pre_hook(self._lead_in)

    def attach(self, block: torch.nn.Module) -> None:
        """To a block in which nothing else has weights, and so nothing else reads the input."""
        if self._readers < 2:
            return
        block.register_forward_pre_hook(self._enter, with_kwargs=True)
        block.register_forward_hook(self._leave, always_call=True)

    def _enter(self, block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and isinstance(args[0], torch.Tensor):
            self._led_in = spread(args[0], self._world)
            return (self._led_in, *args[1:]), kwargs
        if isinstance(kwargs.get("hidden_states"), torch.Tensor):
            self._led_in = spread(kwargs["hidden_states"], self._world)
            return args, {**kwargs, "hidden_states": self._led_in}
        return None

    def _leave(self, *_: Any) -> None:
        self._led_in = None

    def _lead_in(self, module: torch.nn.Module, args: tuple[Any, ...]) -> Any:
        """Before each of the products: what it reads is led in already, or is something else, and led in here."""
        return None if args[0] is self._led_in else (spread(args[0], self._world), *args[1:])


# --- gradients ---


def parts_of_gradients(model: torch.nn.Module) -> Iterator[str]:
    """Names of parameters whose gradients are parts, to be added over the tp axis."""
    for prefix, module in model.named_modules():
        if getattr(module, _IS_PART, False):
            yield from (f"{prefix}.{name}" for name, _ in module.named_parameters(recurse=False))
        if is_fused(module) and isinstance(linear_of(module), Rows):  # whose B reads this rank's part of x A
            yield from (f"{prefix}.lora_B.{name}" for name, _ in module.lora_B.named_parameters())


def sum_parts(parameters: Iterable[torch.nn.Parameter], world: World) -> None:
    """Make whole what each rank has a part of, in one exchange; once a step, after its last backward pass."""
    gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    if not gradients:
        return
    with world.heart.exchange("all_reduce of parts of gradients (over tensor)"):
        summed = all_reduce(torch.cat([gradient.reshape(-1) for gradient in gradients]), world.group)
    for gradient, whole in zip(gradients, summed.split([one.numel() for one in gradients]), strict=True):
        gradient.copy_(whole.view_as(gradient))
