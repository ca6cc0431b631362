"""What a model has no row for: tokens that only its tokenizer was given, and places behind its table of positions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from duoka.config.schema import DataConfig
from duoka.data.tokens.token_store import TokenPart
from duoka.data.tokens.tokenizer import ChatTokenizer
from duoka.errors import DataError
from duoka.plan.find_family import longest_text
from duoka.runs.folder import read_json

_AT_ONCE = 1 << 24  # tokens


def refuse_without_row(
    parts: Sequence[tuple[str, TokenPart]], tokenizer: ChatTokenizer, model_folder: Path, data: DataConfig
) -> None:
    """Raise DataError where a set has such a token; that a tokenizer knows some is no fault (Gemma 3's of 1B)."""
    facts = read_json(model_folder / "config.json") or {}
    _refuse_without_position(parts, facts, data)
    rows = _rows_that_miss_some(facts, tokenizer)
    if rows is None:
        return
    for name, part in parts:
        for start in range(0, len(part.arrays.ids), _AT_ONCE):
            _refuse_beyond(f"{name} has", np.asarray(part.arrays.ids[start : start + _AT_ONCE]), rows, tokenizer)


def refuse_texts_without_row(texts: Iterable[Sequence[int]], tokenizer: ChatTokenizer, model_folder: Path) -> None:
    """The same for encoded texts that are no set."""
    rows = _rows_that_miss_some(read_json(model_folder / "config.json") or {}, tokenizer)
    for ids in texts if rows is not None else ():
        _refuse_beyond("the texts have", np.asarray(ids), rows or 0, tokenizer)


def refuse_prompts_without_row(prompts: Sequence[Sequence[int]], tokenizer: ChatTokenizer, model_folder: Path) -> None:
    """The same for prompts, which are to leave room for an answer."""
    refuse_texts_without_row(prompts, tokenizer, model_folder)
    most, longest = longest_text(read_json(model_folder / "config.json") or {}), max(map(len, prompts), default=0)
    if most is not None and longest >= most:
        raise DataError(
            f"a prompt has {longest:,} tokens, and the model has a table of {most:,} positions: no room for an answer",
            fix=f"write   data.max_length: {most}   so that such prompts are left out, and counted",
        )


def _rows_that_miss_some(facts: Mapping[str, Any], tokenizer: ChatTokenizer) -> int | None:
    """How many tokens the model has rows for; None where those are all that the tokenizer knows."""
    rows = facts.get("vocab_size", (facts.get("text_config") or {}).get("vocab_size"))
    most = max(tokenizer.backend.get_vocab_size(with_added_tokens=True) - 1, *tokenizer.added, 0)
    return rows if isinstance(rows, int) and most >= rows else None


def _refuse_beyond(who_has: str, ids: np.ndarray, rows: int, tokenizer: ChatTokenizer) -> None:
    beyond = ids[ids >= rows]
    if not len(beyond):
        return
    token = int(beyond[0])
    raise DataError(
        f"{who_has} the token {tokenizer.backend.id_to_token(token)!r}, number {token:,}, and the model has "
        f"rows for {rows:,} tokens: its tokenizer was given some, and the model was not",
        fix="give it rows, once:   model.resize_token_embeddings(len(tokenizer)) of transformers; then save it",
    )


def _refuse_without_position(
    parts: Sequence[tuple[str, TokenPart]], facts: Mapping[str, Any], data: DataConfig
) -> None:
    most = longest_text(facts)
    if most is None or data.max_length <= most:
        return
    # Plain text of any length is cut into rows of max_length.
    longest = [(name, min(int(part.lengths.max(initial=0)), data.max_length)) for name, part in parts]
    for name, length in [*longest, *([("the stream", data.max_length)] if data.stream else [])]:
        if length > most:
            raise DataError(
                f"{name} has a sample of {length:,} tokens, and the model has a table of {most:,} positions: it reads "
                "no longer text",
                fix=f"cut them there:   data.max_length: {most}   (duoka score: --max-length {most})",
            )
