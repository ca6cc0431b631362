"""Greedy answers to several prompts of one length at once, and what ends an answer.

No row is padded: whatever stands in a batch beside it, a prompt is computed from its own tokens alone, in every
architecture. `serve/generate.py` streams one answer; this is for tasks, where hundreds are asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from duoka.data.read.example import BadRecord, Example, Message
from duoka.data.tokens.template import encode
from duoka.data.tokens.tokenizer import ChatTokenizer
from duoka.model.attention import NAME
from duoka.model.build import LossModel


@dataclass(frozen=True)
class Answered:
    """The tokens of an answer; `ended`: by a stop token, which is not among them."""

    ids: list[int]
    ended: bool


@torch.no_grad()
def answer_greedily(
    model: LossModel, prompts: Sequence[Sequence[int]], stop_ids: frozenset[int], max_new_tokens: int
) -> list[Answered]:
    """The likeliest token again and again, for prompts of one length; ends where all have ended."""
    device = next(model.parameters()).device
    window = window_of(model.core)
    room = max_new_tokens if window is None else min(max_new_tokens, window - len(prompts[0]))
    ids = torch.tensor([list(prompt) for prompt in prompts], device=device)  # (rows, tokens)
    found: list[list[int]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    cache: Any = None
    for _ in range(max(0, room)):
        logits, cache = model.continue_from(ids, cache)
        chosen = logits.float().argmax(-1)  # (rows,)
        for row, token in enumerate(chosen.tolist()):
            ended[row] = ended[row] or token in stop_ids
            if not ended[row]:
                found[row].append(token)
        if all(ended):
            break
        ids = chosen[:, None]
    return [Answered(own, end) for own, end in zip(found, ended, strict=True)]


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
    core.set_attn_implementation("sdpa")
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
    turns = (Message("user", "Hi"), Message("assistant", "Hello"))
    try:
        sample = encode(Example(turns), tokenizer)
    except BadRecord:  # a template that such a conversation cannot be trained with
        return None
    last = int(sample.input_ids[sample.is_target][-1])
    return last if tokenizer.decode([last]) in tokenizer.special_texts else None
