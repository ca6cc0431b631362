"""What single tokens stand for, as bytes: a character may lie in several of them, and a word's blank belongs to it.

The server tells clients of each token beside its log-probability.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from duoka.data.tokens.tokenizer import ChatTokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def bytes_of(tokenizer: ChatTokenizer, token: int) -> bytes:
    """What a token adds to the text before it; nothing for an id that the tokenizer does not have."""
    piece: str | None = tokenizer.backend.id_to_token(token)
    if piece is None:
        return b""
    if tokenizer.added.get(token) is not None:
        return tokenizer.added[token].encode()
    if tokenizer.token_bytes is not None and all(letter in _letters() for letter in piece):
        return bytes(_letters()[letter] for letter in piece)
    if found := _BYTE.fullmatch(piece):
        return bytes([int(found.group(1), 16)])
    # Twice, since decoders take a blank from the first word of a text.
    twice, once = tokenizer.decode([token, token]), tokenizer.decode([token])
    return (twice[len(once) :] if twice.startswith(once) else once).encode()


@cache
def _letters() -> dict[str, int]:
    """The letter that byte-level tokenizers write each byte as. Those that can be seen stand for themselves."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(0x100 + place): byte for place, byte in enumerate(others)}
