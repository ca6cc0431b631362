"""The rows of a task, computed by the ranks of a world: answers by the likeliest tokens, options by log-probability.

`duoka eval --tasks` and training call it. Which rows are computed at once is decided by task_rows.py, the same for any
number of ranks; what this file adds is who computes which group, and that every rank ends with all results.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from duoka.comm.world import World
from duoka.model.build import LossModel
from duoka.model.layers import unrecorded
from duoka.model.own_lengths import find_stretch
from duoka.model.together import answers_by_rows, likeliest_answers
from duoka.parallel.precision import compute_in
from duoka.parallel.task_rows import Prompts, Row

Result = dict[str, Any]  # of a generated row: ids, ended; of a scored one: logp
UNLABELED = -100


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
    groups = prompts.groups(batch, mixed=prompts.generates and answers_by_rows(model))
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


@torch.no_grad()
def score_rows(model: LossModel, rows: Sequence[Row], device: torch.device) -> list[float]:
    """Log-probability of each row's wanted tokens. Padding is on the right, where causal attention never looks."""
    ids, labels, positions = _laid_out(model, rows, device)
    logps, _ = model(ids, labels, positions, answer="logps")  # (rows, tokens)
    totals: list[float] = logps.float().sum(-1).tolist()
    return totals


@torch.no_grad()
def are_likeliest(model: LossModel, rows: Sequence[Row], device: torch.device) -> list[bool]:
    """Whether each of a row's wanted tokens is the likeliest behind those before it."""
    ids, labels, positions = _laid_out(model, rows, device)
    core: Any = model.core
    kept = (labels != UNLABELED).any(0).nonzero().flatten()  # a prompt's logits would be most of the memory
    options: dict[str, Any] = {"use_cache": False, **unrecorded(core)}
    if "logits_to_keep" not in inspect.signature(core.forward).parameters:
        logits = core(input_ids=ids, position_ids=positions, **options).logits[:, kept]
    else:
        logits = core(input_ids=ids, position_ids=positions, logits_to_keep=kept, **options).logits
    labels = labels[:, kept]  # as the logits: (rows, kept tokens, vocab)
    is_right = (logits.argmax(-1) == labels) | (labels == UNLABELED)
    found: list[bool] = is_right.all(-1).tolist()
    return found


def _laid_out(
    model: LossModel, rows: Sequence[Row], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, labels and positions (rows, tokens)."""
    longest = max(len(row.ids) for row in rows) - 1
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full((len(rows), longest), UNLABELED)
    for place, row in enumerate(rows):
        length = len(row.ids) - 1
        ids[place, :length] = torch.tensor(row.ids[:-1])
        labels[place, row.start - 1 : length] = torch.tensor(row.wanted)
    positions = torch.arange(longest).expand(len(rows), -1)
    if find_stretch(model.core.config) is not None:  # padding is no part of a text, nor of its length
        lengths = torch.tensor([len(row.ids) - 1 for row in rows])
        positions = torch.where(positions < lengths[:, None], positions, 0)
    return ids.to(device), labels.to(device), positions.to(device)
