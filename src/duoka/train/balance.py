"""The balancing loss of a mixture's experts, over the whole global batch: the same number at any split.

coefficient x experts x sum over e of (share of choices that fell on e) x (mean probability that routers gave e), over
all layers and all tokens that are no padding: transformers' `load_balancing_loss_func`. There both factors are means of
one micro-batch, and their product depends on how a batch is split. Here they are means of the step. The shares have no
gradient; a pass of its own counts them first, over all micro-batches and ranks, so that each micro-batch can then add
its part of the rest.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from duoka.config.schema import RunConfig
from duoka.data.feed.loader import Batch, GlobalBatch
from duoka.data.feed.token_keys import PADDING_KEY
from duoka.errors import ConfigError
from duoka.model.build import LossModel, find_core
from duoka.parallel.engine import Engine
from duoka.parallel.objective import LooksAhead, Objective, Sums
from duoka.parallel.precision import compute_in

NAME = "experts"  # of the loss, beside "tokens" and the like


def build_objective(config: RunConfig, engine: Engine, stage: Objective) -> Callable[[GlobalBatch], Objective]:
    """What a step minimizes on its global batch: what the stage says, and the balancing loss where one is asked for."""
    asked, core = config.train.router_aux_loss, find_core(engine.bare)
    coefficient = _coefficient_of(core) if asked == "auto" else asked
    if not coefficient:
        return lambda batch: stage
    routers = find_routers(core)
    fix = "write:   router_aux_loss: 0"
    if not routers:
        raise ConfigError(
            f"train.router_aux_loss is {coefficient:g}, and in transformers this model has no such loss",
            where=f"its class is {type(core).__name__}",
            fix=fix,
        )
    if engine.mesh.pipeline.size > 1:
        raise ConfigError(
            f"train.router_aux_loss is {coefficient:g}: the balancing loss of a model in stages is not there yet",
            where="parallel.pipeline is more than 1, and no stage sees all routers",
            fix=f"{fix}   or share the model by   strategy: fsdp",
        )
    if config.train.compile or config.parallel.strategy == "dp":
        raise ConfigError(
            f"train.router_aux_loss is {coefficient:g}, and routers of compiled layers, or of copies, are not seen",
            where="train.compile is on, or parallel.strategy is dp",
            fix=f"{fix}   or delete the other",
        )
    if isinstance(engine.bare, LossModel):
        engine.bare.no_sharing = "the balancing loss counts the tokens of each sample"
    return Balance(engine, stage, routers, coefficient).objective_of


def _coefficient_of(core: Any) -> float:
    """What the model's config asks for; by default transformers' configs ask for none."""
    config = core.config.get_text_config()
    return (
        float(getattr(config, "router_aux_loss_coef", 0) or 0)
        if getattr(config, "output_router_logits", False)
        else 0.0
    )


def find_routers(core: Any) -> list[torch.nn.Module]:
    """The routers whose logits transformers' own balancing loss of this model reads; none: it has no such loss."""
    if not hasattr(sys.modules[type(core).__module__], "load_balancing_loss_func"):
        return []
    recorded = getattr(core.get_decoder(), "_can_record_outputs", None) or {}
    kind = getattr(recorded.get("router_logits"), "target_class", None)
    return [] if kind is None else [module for module in core.modules() if isinstance(module, kind)]


class Balance:
    """Watches routers: how often each expert is chosen, and how probable routers find it."""

    def __init__(self, engine: Engine, stage: Objective, routers: list[torch.nn.Module], coefficient: float) -> None:
        self.engine, self.stage, self.coefficient = engine, stage, coefficient
        self._is_real: torch.Tensor | None = None  # (tokens,) of the newest micro-batch, 1.0 where no padding stands
        self._is_watching = False
        self._probable: list[torch.Tensor] = []  # (experts,) of each layer
        self._chosen: list[torch.Tensor] = []
        self._num_chosen = 1
        for router in routers:
            router.register_forward_hook(self._see)

    def objective_of(self, batch: GlobalBatch) -> Objective:
        chosen = self._count(batch)
        rows = (chosen.sum() / self._num_chosen).clamp(min=1)  # tokens x layers; none in a step without answers
        weights = self.coefficient * len(chosen) * chosen / rows.square()
        stage = self.stage
        return _BalancedAhead(self, weights, stage) if isinstance(stage, LooksAhead) else _Balanced(self, weights)

    def _count(self, batch: GlobalBatch) -> torch.Tensor:
        """(experts,): how often each is chosen in all layers for all tokens of the step; all ranks call it."""
        engine, device = self.engine, self.engine.world.device
        total: torch.Tensor | None = None
        engine.world.heart.tell("forward")
        with torch.no_grad(), engine.evaluate() as model:
            for micro in batch.micro_batches:
                part = engine.part_of(micro)
                with self.watching(part, device), compute_in(engine.numerics.precision, device):
                    self.stage.sums(model, part, device)
                own = torch.stack(self._chosen).sum(dim=0)
                total = own if total is None else total + own
        assert total is not None
        return engine.mesh.loss.sum_tensor(total)

    @contextlib.contextmanager
    def watching(self, micro: Batch, device: torch.device) -> Iterator[None]:
        self._is_real = real_tokens(micro).to(device)
        self._probable, self._chosen = [], []
        self._is_watching = True
        try:
            yield
        finally:
            self._is_watching = False

    def probable(self) -> torch.Tensor:
        """(experts,): probabilities summed over the layers and tokens of the micro-batch, with gradients."""
        return torch.stack(self._probable).sum(dim=0)

    def _see(self, router: torch.nn.Module, args: Any, output: Any) -> None:
        logits, index = output[0], output[2]
        real = self._is_real
        if real is None or real.numel() != logits.shape[0] or not router.training:
            return  # no pass of a step: an evaluation, a rehearsal
        if torch.is_grad_enabled():
            # Computed in a layer's recomputation too, which has to keep what its forward pass kept.
            found = (logits.float().softmax(dim=-1) * real[:, None]).sum(dim=0)
            if self._is_watching:
                self._probable.append(found)
        elif self._is_watching:
            self._num_chosen = index.shape[1]
            own = torch.zeros(logits.shape[1], dtype=torch.float64, device=logits.device)
            self._chosen.append(own.scatter_add_(0, index.reshape(-1), real.double().repeat_interleave(index.shape[1])))


def real_tokens(micro: Batch) -> torch.Tensor:
    """(rows x tokens,) 1.0 where no padding stands: rows of a fixed length, end to end, have it between them."""
    if micro.token_keys is not None:
        return (micro.token_keys != PADDING_KEY).reshape(-1).float()
    rows, length = micro.input_ids.shape
    if micro.num_tokens == 0:  # a rank without samples, whose one token is there to be computed
        return torch.zeros(rows * length)
    if micro.attention_mask is not None:
        return micro.attention_mask.reshape(-1).float()
    return (torch.arange(rows * length) < micro.num_tokens).float()


class _Balanced:
    """The stage's objective, and the balancing loss with this step's shares."""

    def __init__(self, balance: Balance, weights: torch.Tensor) -> None:
        self._balance, self._weights = balance, weights.float()
        self.metrics = balance.stage.metrics

    def denominators(self, batch: GlobalBatch) -> Mapping[str, float]:
        return {**self._balance.stage.denominators(batch), NAME: 1.0}

    def sums(self, model: torch.nn.Module, micro: Batch, device: torch.device) -> Sums:
        with self._balance.watching(micro, device):
            sums = self._balance.stage.sums(model, micro, device)
        loss = (self._balance.probable() * self._weights).sum()
        return Sums({**sums.losses, NAME: loss}, sums.metrics)


class _BalancedAhead(_Balanced):
    """The same of a stage whose losses need numbers of the whole global batch: it looks ahead as it does alone."""

    def __init__(self, balance: Balance, weights: torch.Tensor, stage: LooksAhead) -> None:
        super().__init__(balance, weights)
        self._ahead, self.num_looked = stage, stage.num_looked

    def look(self, model: torch.nn.Module, micro: Batch, device: torch.device) -> torch.Tensor:
        return self._ahead.look(model, micro, device)

    def has_looked(self, totals: Sequence[float], batch: GlobalBatch) -> None:
        self._ahead.has_looked(totals, batch)
