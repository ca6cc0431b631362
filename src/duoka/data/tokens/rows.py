"""Tokens for which a model has no row: a tokenizer that was given some, and a model that was not."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from duoka.data.tokens.token_store import TokenPart
from duoka.data.tokens.tokenizer import ChatTokenizer
from duoka.errors import DataError
from duoka.runs.folder import read_json

_AT_ONCE = 1 << 24  # tokens


def refuse_without_row(parts: Iterable[tuple[str, TokenPart]], tokenizer: ChatTokenizer, model_folder: Path) -> None:
    """Raise DataError where a set has such a token; that a tokenizer knows some is no fault (Gemma 3's of 1B)."""
    facts = read_json(model_folder / "config.json") or {}
    rows = facts.get("vocab_size", (facts.get("text_config") or {}).get("vocab_size"))
    most = max(tokenizer.backend.get_vocab_size(with_added_tokens=True) - 1, *tokenizer.added, 0)
    if not isinstance(rows, int) or most < rows:
        return
    for name, part in parts:
        ids = part.arrays.ids
        for start in range(0, len(ids), _AT_ONCE):
            beyond = np.asarray(ids[start : start + _AT_ONCE])
            beyond = beyond[beyond >= rows]
            if not len(beyond):
                continue
            token = int(beyond[0])
            raise DataError(
                f"{name} has the token {tokenizer.backend.id_to_token(token)!r}, number {token:,}, and the model has "
                f"rows for {rows:,} tokens: its tokenizer was given some, and the model was not",
                fix="give it rows, once:   model.resize_token_embeddings(len(tokenizer)) of transformers; then save it",
            )
