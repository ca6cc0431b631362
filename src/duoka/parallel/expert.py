"""The expert axis: data ranks that each have some of every layer's experts, and send each other the tokens for them.

It is carved out of the ranks of a stage: data ranks, those of a sequence, and tensor ranks, which have the same tokens
and send a part of them each. Neighbors share the experts, all else lies as its strategy has it. `share_experts` makes
a layer's experts DTensors cut by expert, so that checkpoints, optimizers and the final folder know what of them a rank
has, and gives their forward an exchange (model/experts.py asks it). A rank's experts see the tokens of all ranks that
share them, so their gradients are whole but for the other copies of the same experts: `sum_copies` adds these up once
a step. Nobody else may exchange them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from duoka.comm.collectives import all_reduce, all_to_all
from duoka.comm.world import World
from duoka.errors import ConfigError
from duoka.model.experts import EXCHANGE, find_experts, sizes_of, weight_names
from duoka.model.lora import adapted_experts
from duoka.optim.host import local_part
from duoka.parallel.mesh import EXPERT_AXIS, Mesh
from duoka.parallel.tensor_exchange import joined, own_part


class TokenExchange:
    """Rows to the ranks that have their experts, and back (model/experts.py: ExpertExchange)."""

    def __init__(self, world: World, num_experts: int, tensor: World) -> None:
        """`world`: the ranks that share the experts, in the order of these; `tensor`: those with the same tokens."""
        self._world, self._tensor = world, tensor
        self._own = num_experts // world.size

    def enter(self, *tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self._tensor.size == 1:
            return tokens
        # Their gradients are joined on the way back: routers, which are whole on each rank, have whole ones.
        return tuple(own_part(one, self._tensor, dim=0) for one in tokens)

    def leave(self, out: torch.Tensor, num_tokens: int) -> torch.Tensor:
        return out if self._tensor.size == 1 else joined(out, self._tensor, num_tokens, dim=0)

    def compute(
        self, rows: torch.Tensor, counts: torch.Tensor, own: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        size = self._world.size
        with self._world.heart.exchange("all_to_all of counts (over experts)"):
            arrived = all_to_all(torch.empty_like(counts), counts, self._world.group).view(size, self._own)
        sent, came = (sizes_of(one.view(size, self._own).sum(dim=1), len(rows)) for one in (counts, arrived))
        # Ranks without a single row come to each exchange too: the others wait for them, in the backward pass as well.
        here = travel(rows, self, sent, came)
        # They came rank after rank, each expert after expert; an expert's rows lie in the order of ranks.
        place = torch.arange(self._own, device=rows.device).repeat(size)
        order = place.repeat_interleave(arrived.view(-1), output_size=sum(came)).argsort(stable=True)
        out = own(here[order], arrived.sum(dim=0))
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return travel(out[back], self, came, sent)

    def swap(self, rows: torch.Tensor, sent: list[int], came: list[int]) -> torch.Tensor:
        """(rows, dim) in parts of `sent` rows for each rank -> parts of `came` rows from each."""
        dim = rows.shape[1]
        arrived = rows.new_empty(sum(came), dim)
        sizes = [[count * dim for count in counts] for counts in (came, sent)]
        with self._world.heart.exchange("all_to_all of tokens (over experts)"):
            all_to_all(arrived.view(-1), rows.reshape(-1), self._world.group, *sizes)
        return arrived


class _Travel(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, rows: torch.Tensor, exchange: TokenExchange, sent: list[int], came: list[int]
    ) -> torch.Tensor:
        ctx.exchange, ctx.sent, ctx.came = exchange, sent, came
        return exchange.swap(rows, sent, came)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return ctx.exchange.swap(grad.contiguous(), ctx.came, ctx.sent), None, None, None


def travel(rows: torch.Tensor, exchange: TokenExchange, sent: list[int], came: list[int]) -> torch.Tensor:
    arrived: torch.Tensor = _Travel.apply(rows, exchange, sent, came)
    return arrived


def share_experts(core: torch.nn.Module, mesh: Mesh) -> None:
    """Cut the experts of every layer over the expert axis, in place; refuses a model whose experts cannot be."""
    world, found, grid = mesh.experts, list(find_experts(core)), mesh.expert_mesh
    if not found and mesh.sizes["pp"] == 1:  # a stage may be without one
        raise ConfigError(
            f"parallel.expert is {world.size}, and this model has no experts that can be shared out",
            where=f"its class is {type(core).__name__}, of transformers {version('transformers')}",
            fix="write:   expert: 1   or, where it is a mixture, install a newer transformers",
        )
    if adapted := adapted_experts(core):
        raise ConfigError(
            f"parallel.expert is {world.size}, and lora.targets takes in experts, whose adapters stay whole",
            where=f"{adapted[0]} (and {len(adapted) - 1} more)",
            fix="write:   targets: [q_proj, k_proj, v_proj, o_proj]   or   expert: 1",
        )
    for name, module in found:
        if module.num_experts % world.size:
            raise ConfigError(
                f"parallel.expert is {world.size}, and {name} has {module.num_experts} experts: no multiple of it",
                fix="write another number of expert:, or 1",
            )
        for own in weight_names(module):
            whole = module._parameters[own]
            part = distribute_tensor(whole.detach(), grid, [Replicate(), Shard(0)], src_data_rank=None)
            # A copy: a view would keep all experts in memory.
            module._parameters[own] = torch.nn.Parameter(part.clone(), requires_grad=whole.requires_grad)
        setattr(module, EXCHANGE, TokenExchange(world, module.num_experts, mesh.tensor))


def is_shared_expert(tensor: torch.Tensor) -> bool:
    """Whether a rank has only some experts of it, and no strategy exchanges it."""
    return isinstance(tensor, DTensor) and EXPERT_AXIS in (tensor.device_mesh.mesh_dim_names or ())


def sum_copies(parameters: Iterable[torch.nn.Parameter], world: World) -> None:
    """Add the gradients of experts over the ranks that have the same ones; once a step, after its last backward."""
    if world.size == 1:
        return
    with world.heart.exchange("all_reduce of gradients (over copies of experts)"):
        for parameter in parameters:
            if parameter.grad is not None:
                all_reduce(local_part(parameter.grad), world.group)
