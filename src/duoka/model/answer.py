"""Answers to several prompts of one length at once, and what ends an answer.

No row is padded: whatever stands in a batch beside it, a prompt is computed from its own tokens alone, in every
architecture. `serve/generate.py` streams one answer; this is for tasks and rollouts, where hundreds are asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from duoka.data.read.example import BadRecord, Example, Message
from duoka.data.tokens.template import encode
from duoka.data.tokens.tokenizer import ChatTokenizer
from duoka.model.attention import NAME
from duoka.model.build import LossModel
from duoka.model.own_lengths import find_turn


@dataclass(frozen=True)
class Answered:
    """The tokens of an answer; `ended`: by a stop token, which is not among them but is `stop`.

    `logps`: of each token and the stop token, where whoever chose them said so.
    """

    ids: list[int]
    ended: bool
    stop: int | None = None
    logps: list[float] = field(default_factory=list)


class Choose(Protocol):
    """Chooses a token for each row: (tokens (rows,), their log-probabilities or None)."""

    def __call__(self, logits: torch.Tensor, position: int, /) -> tuple[torch.Tensor, torch.Tensor | None]: ...


def likeliest(logits: torch.Tensor, position: int) -> tuple[torch.Tensor, None]:
    return logits.float().argmax(-1), None


def alone(is_going: bool) -> bool:
    """Of a rank that computes its rows by itself."""
    return is_going


@torch.no_grad()
def answer_rows(
    model: LossModel,
    prompts: Sequence[Sequence[int]],
    stop_ids: frozenset[int],
    max_new_tokens: int,
    choose: Choose = likeliest,
    is_any_going: Callable[[bool], bool] = alone,
) -> list[Answered]:
    """A token for each prompt again and again, for prompts of one length; ends where all have ended.

    `is_any_going` is asked before every pass: where ranks gather weights for it together, all make as many as the one
    that has most to say. A rank without prompts of its own gives one, and no new tokens.
    """
    device = next(model.parameters()).device
    window = window_of(model.core)
    room = max_new_tokens if window is None else min(max_new_tokens, window - len(prompts[0]))
    begin = torch.tensor([list(prompt) for prompt in prompts], device=device)  # (rows, tokens)
    ids, cache = begin, None
    whole, turn = begin, find_turn(model.core.config)
    found = [Answered([], False) for _ in prompts]
    position = 0
    while is_any_going(going := position < room and not all(one.ended for one in found)):
        if not going:
            model.continue_from(begin[:1, :1], None)
            continue
        logits, cache = model.continue_from(ids, cache)
        chosen, logps = choose(logits, position)
        for row, (token, one) in enumerate(zip(chosen.tolist(), found, strict=True)):
            if one.ended:
                continue
            if logps is not None:
                one.logps.append(float(logps[row]))
            if token in stop_ids:
                found[row] = replace(one, ended=True, stop=token)
            else:
                one.ids.append(token)
        ids = chosen[:, None]
        position += 1
        if turn is not None:
            whole = torch.cat((whole, ids), dim=1)
            ids, cache = (whole, None) if whole.shape[1] == turn + 1 else (ids, cache)
    return found


def window_of(lm: torch.nn.Module) -> int | None:
    """The longest text that the model says it reads."""
    config: Any = lm.config
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return None if found is None else int(found)


@contextlib.contextmanager
def with_cache(lm: torch.nn.Module) -> Iterator[None]:
    """Training's attention knows no key-value cache: another one meanwhile."""
    core: Any = lm
    before = core.config._attn_implementation
    if before != NAME:
        yield
        return
    core.set_attn_implementation(core.get_correct_attn_implementation(None))  # torch's, or where it lacks what it needs
    try:
        yield
    finally:
        core.set_attn_implementation(before)


def stop_tokens(lm: torch.nn.Module, tokenizer: ChatTokenizer) -> frozenset[int]:
    """Tokens that end an answer: the tokenizer's, the generation config's, and what training ends a turn with."""
    named = getattr(getattr(lm, "generation_config", None), "eos_token_id", None)
    found = set(named) if isinstance(named, (list, tuple)) else {named}
    return frozenset(int(token) for token in found | {tokenizer.eos_id, end_of_turn(tokenizer)} if token is not None)


def end_of_turn(tokenizer: ChatTokenizer) -> int | None:
    """The token that the chat template ends an answer with, when it is one that text never contains."""
    return _find_end(tokenizer)[0]


def behind_answers(tokenizer: ChatTokenizer) -> dict[int, tuple[int, ...]]:
    """What the chat template writes behind the token that ends an answer: nobody generates it, and data have it."""
    end, behind = _find_end(tokenizer)
    return {} if end is None or not behind else {end: behind}


def closing_of(tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """What the chat template writes behind an answer's last word, its end of turn first; empty where text might."""
    end, behind = _find_end(tokenizer)
    return () if end is None else (end, *behind)


def _find_end(tokenizer: ChatTokenizer) -> tuple[int | None, tuple[int, ...]]:
    turns = (Message("user", "Hi"), Message("assistant", "Hello"))
    try:
        sample = encode(Example(turns), tokenizer)
    except BadRecord:  # a template that such a conversation cannot be trained with
        return None, ()
    at = int(sample.is_target.nonzero()[0][-1])
    last = int(sample.input_ids[at])
    is_special = tokenizer.decode([last]) in tokenizer.special_texts
    return (last, tuple(map(int, sample.input_ids[at + 1 :]))) if is_special else (None, ())
