"""The rows of a task, computed by the ranks of a world: answers by the likeliest tokens, options by log-probability.

`duoka eval --tasks` and training call it. Which rows are computed at once is decided by task_rows.py, the same for any
number of ranks; what this file adds is who computes which group, and that every rank ends with all results.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from duoka.comm.world import World
from duoka.config.schema import ModelConfig
from duoka.model.attention import with_documents
from duoka.model.build import Answer, LossModel
from duoka.model.documents import Documents
from duoka.model.kernels import settle_sharing
from duoka.model.own_lengths import find_stretch
from duoka.model.row_choice import find_passes
from duoka.model.together import answers_by_rows, likeliest_answers
from duoka.parallel.precision import compute_in
from duoka.parallel.task_rows import Prompts, Row
from duoka.plan.layout import Layout, Precision

Result = dict[str, Any]  # of a generated row: ids, ended; of a scored one: logp
UNLABELED = -100
_NAMES = ("input_ids", "labels", "position_ids")


def compute_rows(
    prompts: Prompts,
    model: LossModel,
    world: World,
    *,
    stop_ids: frozenset[int],
    precision: str,
    batch: int,
    together: bool = False,
    known: dict[int, Result] | None = None,
    keep: Callable[[dict[int, Result]], None] = lambda found: None,
) -> list[Result]:
    """Results of all rows, on every rank. `known` ones are not computed again; `keep` hears of each round's on rank 0.

    `together`: weights are sharded, so that all ranks compute every group.
    """
    results = dict(known or {})
    mixed = prompts.generates and answers_by_rows(model)
    groups = prompts.groups(batch, mixed=mixed, shared=not model.no_sharing)
    todo = [group for group in groups if not all(place in results for place in group)]
    at_once = 1 if together else world.size
    was_training = model.training
    model.eval()
    try:
        for at in range(0, len(todo), at_once):
            place = at if together else at + world.rank
            world.heart.tell("evaluate")
            own = _compute(prompts, todo[place], model, stop_ids, precision) if place < len(todo) else {}
            parts = [own] if together else world.gather(own)
            found = {row: result for part in parts for row, result in part.items()}
            results |= found
            if world.is_main:
                keep(found)
    finally:
        model.train(was_training)
    return [results[place] for place in range(len(prompts.rows))]


def _compute(
    prompts: Prompts, group: Sequence[int], model: LossModel, stop_ids: frozenset[int], precision: str
) -> dict[int, Result]:
    rows = [prompts.rows[place] for place in group]
    device = next(model.parameters()).device
    with compute_in(precision, device):
        if not prompts.generates:
            found: list[Result] = [{"logp": logp} for logp in score_rows(model, rows, device)]
        else:
            # A greedy measure compares all tokens that are wanted: a stop token is one of them.
            stops = stop_ids if prompts.task.kind == "generate" else frozenset[int]()
            answers = likeliest_answers(model, [(row.prompt, prompts.num_new(row)) for row in rows], stops, len(rows))
            found = [{"ids": one.ids, "ended": one.ended} for one in answers]
    return dict(zip(group, found, strict=True))


def build_judge(
    lm: torch.nn.Module, asked: ModelConfig, folder: Path, device: torch.device, precision: str, no_sharing: str = ""
) -> LossModel:
    """The model that rows are asked of; `folder` has its architecture. What options begin with alike is computed once
    where that is exact, and nobody says `no_sharing`."""
    padded, packed = (find_passes(asked, folder, packing=packing) for packing in (False, True))
    model = LossModel(lm, own_logits=padded.own_logits)
    other_head = "its head is read otherwise" if packed.own_logits != padded.own_logits else ""
    model.no_sharing = no_sharing or packed.no_sharing or other_head
    settle_sharing(model, Layout(packing=True, precision=cast(Precision, precision)), device)
    return model.to(device)


def score_rows(model: LossModel, rows: Sequence[Row], device: torch.device) -> list[float]:
    """Log-probability of each row's wanted tokens."""
    return [float(logps.sum()) for logps, _ in _ask(model, rows, device, "logps")]


def judge_rows(model: LossModel, rows: Sequence[Row], device: torch.device) -> list[tuple[float, bool]]:
    """The same, and whether each of a row's wanted tokens is the likeliest behind those before it."""
    return [(float(logps.sum()), bool(more.all())) for logps, more in _ask(model, rows, device, "likeliest")]


@torch.no_grad()
def _ask(
    model: LossModel, rows: Sequence[Row], device: torch.device, answer: Answer
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each row, what the model says of its wanted tokens; packed, where what they begin with is computed once."""
    if not all(row.wanted for row in rows):
        known = iter(_ask(model, [row for row in rows if row.wanted], device, answer))
        return [next(known) if row.wanted else (torch.zeros(0), torch.ones(0)) for row in rows]
    if not rows:
        return []
    is_packed = not model.no_sharing
    batch = (_packed if is_packed else _padded)(model, rows, device)
    with with_documents(model.core) if is_packed else contextlib.nullcontext():
        found = [one.float().cpu() for one in model(**batch, answer=answer) if one is not None]
    starts = itertools.accumulate((len(row.read) for row in rows), initial=0)
    parts = []
    for place, (row, start) in enumerate(zip(rows, starts, strict=False)):
        number, before = (0, start) if is_packed else (place, 0)
        own = slice(before + row.start - 1, before + len(row.read))
        parts.append((found[0][number, own], found[-1][number, own]))
    return parts


def _padded(model: LossModel, rows: Sequence[Row], device: torch.device) -> dict[str, Any]:
    """A row beside the other. Padding is on the right, where causal attention never looks."""
    longest = max(len(row.read) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full((len(rows), longest), UNLABELED)
    for place, row in enumerate(rows):
        ids[place, : len(row.read)] = torch.tensor(row.read)
        labels[place, row.start - 1 : len(row.read)] = torch.tensor(row.wanted)
    positions = torch.arange(longest).expand(len(rows), -1)
    if find_stretch(model.core.config) is not None:  # padding is no part of a text, nor of its length
        lengths = torch.tensor([len(row.read) for row in rows])
        positions = torch.where(positions < lengths[:, None], positions, 0)
    return {name: one.to(device) for name, one in zip(_NAMES, (ids, labels, positions), strict=True)}


def _packed(_: LossModel, rows: Sequence[Row], device: torch.device) -> dict[str, Any]:
    """A row behind the other."""
    lengths = torch.tensor([len(row.read) for row in rows])
    ids = torch.tensor([token for row in rows for token in row.read])[None]
    labels = torch.cat([torch.tensor([UNLABELED] * (row.start - 1) + list(row.wanted)) for row in rows])[None]
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])[None]
    edges = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    found = {name: one.to(device) for name, one in zip(_NAMES, (ids, labels, positions), strict=True)}
    return {**found, "boundaries": Documents.of(edges, device, ids)}
