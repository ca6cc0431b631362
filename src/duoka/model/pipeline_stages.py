"""A model cut into the stages of a pipeline: what this rank has stays where it was, all else becomes `Absent`.

So names stay those of the whole model, in checkpoints and in files. A stage runs the model's own decoder over its own
layers: from token ids in the first, from received hidden states in the others. Families that do more with these than
layers and a last norm are found by exactness.py, on a tiny copy. Cut by parallel/apply.py, run by LossModel.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from duoka.errors import ConfigError
from duoka.model.layers import Absent, beside_text, find_layers
from duoka.model.lora import count_parameters
from duoka.plan.pipeline import Costs, Schedule, cut_layers, rank_of, stages_of


@dataclass(frozen=True)
class Anatomy:
    """Where a transformer's parts hang."""

    decoder: torch.nn.Module
    stack: str  # the decoder's name for its list of layers
    layers: tuple[torch.nn.Module, ...]
    tails: tuple[str, ...]  # the decoder's names for what comes after the layers
    embedding: torch.nn.Module
    head: torch.nn.Module
    is_tied: bool
    beside: tuple[torch.nn.Module, ...]  # towers for images: what no text reaches, the first stage keeps

    @classmethod
    def of(cls, core: Any) -> Anatomy:
        """Refuses what has weights at places that belong to no stage."""
        name = type(core).__name__
        embedding, head, decoder = core.get_input_embeddings(), core.get_output_embeddings(), core.get_decoder()
        layers = find_layers(core)
        stack = next((key for key, child in decoder.named_children() if _is_list_of(child, layers)), None)
        if head is None or stack is None:
            raise _no_pipeline(name, "its layers are no list of its decoder" if stack is None else "it has no head")
        ids = {id(p) for p in embedding.parameters()}
        tails = tuple(
            key
            for key, child in decoder.named_children()
            if key != stack and any(True for _ in child.parameters()) and not ids & {id(p) for p in child.parameters()}
        )
        placed = ids | {id(p) for p in head.parameters()}
        beside = tuple(beside_text(core).values())
        placed |= {
            id(p) for part in (*(getattr(decoder, key) for key in (stack, *tails)), *beside) for p in part.parameters()
        }
        for key, parameter in core.named_parameters():
            if id(parameter) not in placed:
                raise _no_pipeline(name, f"{key} is in no layer, and neither in embedding nor head")
        tied = bool(ids & {id(p) for p in head.parameters()})
        return cls(decoder, stack, tuple(layers), tails, embedding, head, tied, beside)


class PipelineStages:
    """What one rank of a pipeline has of a model; `shown` makes one of its stages the whole model, for a pass."""

    def __init__(
        self,
        core: torch.nn.Module,
        anatomy: Anatomy,
        firsts: tuple[int, ...],
        rank: int,
        num_ranks: int,
        schedule: Schedule,
    ) -> None:
        self.num_stages, self.rank, self.num_ranks, self.schedule = len(firsts) - 1, rank, num_ranks, schedule
        self.num_parameters = count_parameters(core)  # (all, trained) of the whole model
        self.own = stages_of(rank, schedule, num_ranks, self.num_stages // num_ranks)
        self.firsts = firsts
        self.decoder, self._stack, self._tails = anatomy.decoder, anatomy.stack, anatomy.tails
        self.is_tied = anatomy.is_tied
        self.trains = _trained_stages(anatomy, firsts)
        weight = anatomy.embedding.weight
        assert isinstance(weight, torch.Tensor)
        self.dtype = weight.dtype  # of the residual stream, which begins as the embedding's rows
        self.width = int(core.config.get_text_config().hidden_size)  # type: ignore[union-attr, operator]
        self._lists = {stage: self._list_of(stage, anatomy.layers) for stage in self.own}
        self._absent = {key: Absent(getattr(anatomy.decoder, key)) for key in self._tails}

    @property
    def has_first(self) -> bool:
        return 0 in self.own

    @property
    def has_last(self) -> bool:
        return self.num_stages - 1 in self.own

    def is_last(self, stage: int) -> bool:
        return stage == self.num_stages - 1

    def rank_of(self, stage: int) -> int:
        return rank_of(stage, self.schedule, self.num_ranks)

    def has_backward(self, stage: int) -> bool:
        """Whether anything is trained in this stage or before it."""
        return any(self.trains[: stage + 1])

    def _list_of(self, stage: int, layers: tuple[torch.nn.Module, ...]) -> torch.nn.ModuleList:
        own = range(self.firsts[stage], self.firsts[stage + 1])
        return torch.nn.ModuleList(layer if at in own else Absent(layer) for at, layer in enumerate(layers))

    @contextlib.contextmanager
    def shown(self, stage: int) -> Iterator[None]:
        """Inside, the decoder is this stage alone."""
        modules = self.decoder._modules
        before = {key: modules[key] for key in (self._stack, *self._tails)}
        modules[self._stack] = self._lists[stage]
        if not self.is_last(stage):
            modules.update(self._absent)
        try:
            yield
        finally:
            modules.update(before)


def cut_model(
    core: torch.nn.Module, rank: int, num_ranks: int, virtual: int, schedule: Schedule = "1f1b"
) -> PipelineStages:
    """Leave a rank's stages in the model, in place; weights of the others are let go, or were never there."""
    anatomy = Anatomy.of(core)
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in anatomy.layers]
    costs = Costs(
        layer=sum(sizes) / len(sizes),
        head=sum(p.numel() for p in anatomy.head.parameters()),
        embedding=sum(p.numel() for p in anatomy.embedding.parameters()),
    )
    firsts = cut_layers(len(sizes), num_ranks * virtual, costs)
    stages = PipelineStages(core, anatomy, firsts, rank, num_ranks, schedule)
    kept = {at for stage in stages.own for at in range(firsts[stage], firsts[stage + 1])}
    anatomy.decoder._modules[anatomy.stack] = torch.nn.ModuleList(
        layer if at in kept else Absent(layer) for at, layer in enumerate(anatomy.layers)
    )
    # Tied, both ends hold the one weight under both its names.
    ends = stages.has_first or stages.has_last
    if not (stages.has_first or (anatomy.is_tied and ends)):
        _replace(core, anatomy.embedding)
    if not stages.has_first:
        for module in anatomy.beside:
            _replace(core, module)
    if not (stages.has_last or (anatomy.is_tied and ends)):
        _replace(core, anatomy.head)
    if not stages.has_last:
        for key in anatomy.tails:
            _replace(core, getattr(anatomy.decoder, key))
    return stages


def _trained_stages(anatomy: Anatomy, firsts: tuple[int, ...]) -> tuple[bool, ...]:
    def trains(module: torch.nn.Module) -> bool:
        return any(p.requires_grad for p in module.parameters())

    found = []
    for first, after in itertools.pairwise(firsts):
        modules = list(anatomy.layers[first:after])
        modules += [anatomy.embedding] if first == 0 else []
        if after == firsts[-1]:
            modules += [anatomy.head, *(getattr(anatomy.decoder, key) for key in anatomy.tails)]
        found.append(any(map(trains, modules)))
    return tuple(found)


def _is_list_of(child: torch.nn.Module, layers: list[torch.nn.Module]) -> bool:
    return isinstance(child, torch.nn.ModuleList) and len(child) == len(layers) and child[0] is layers[0]


def _replace(root: torch.nn.Module, module: torch.nn.Module) -> None:
    for parent in root.modules():
        for key, child in parent.named_children():
            if child is module:
                parent._modules[key] = Absent(module)


def _no_pipeline(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"parallel.pipeline cannot cut {name} into stages: {why}",
        where="a stage is the embedding, layers of one list, the norms after them, or the head",
        fix="write   pipeline: 1   and share the model by   strategy: fsdp",
    )
