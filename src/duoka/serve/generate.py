"""From a prompt to text: greedy or sampled tokens with a key-value cache, streamed as whole characters.

One loop of our own instead of transformers' generate with a thread: it streams, it can be stopped between tokens,
and a test compares it with transformers' own, token by token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from duoka.data.tokens.encode import REPLACEMENT
from duoka.data.tokens.tokenizer import ChatTokenizer
from duoka.model.answer import stop_tokens
from duoka.model.cached import look_further
from duoka.model.own_lengths import find_turn
from duoka.model.sampling import Sampling, choose_token


def _nobody_asks() -> None: ...


def generate(
    lm: torch.nn.Module,
    prompt: Sequence[int],
    stop_ids: frozenset[int],
    sampling: Sampling,
    on_cut: Callable[[], None] = _nobody_asks,
) -> Iterator[int]:
    """New tokens one by one; ends before a stop token, or, which `on_cut` hears, at `max_new_tokens` or where the
    model's window ends."""
    device = next(lm.parameters()).device
    window = getattr(lm.config, "max_position_embeddings", None)
    room = sampling.max_new_tokens if window is None else min(sampling.max_new_tokens, window - len(prompt))
    text, turn = list(prompt), find_turn(lm.config)
    ids = torch.tensor([text], device=device)  # (1, tokens)
    cache: Any = None
    counts: Counter[int] = Counter()
    for position in range(max(0, room)):
        # Entered for each token: a generator suspended inside no_grad would disable gradients for its caller too.
        with torch.no_grad():
            logits, cache = look_further(lm, ids, cache)
            chosen = choose_token(logits[0].float(), sampling, position, counts=counts)
        if chosen in stop_ids:
            return
        yield chosen
        counts[chosen] += 1
        text.append(chosen)
        ids = torch.tensor([[chosen]], device=device)
        if turn is not None and len(text) == turn + 1:
            ids, cache = torch.tensor([text], device=device), None
    on_cut()


class CharacterStream:
    """Turns tokens into text as it comes, holding back the bytes of a character until it is whole."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = ""  # of these tokens
        self._num_shown = 0  # tokens that it came from
        self._before = ""  # what was shown of tokens that are no longer looked at

    def add(self, token: int) -> str:
        """The text that `token` completes; often empty in the middle of a character."""
        self._tokens.append(token)
        whole = self._decode().rstrip(REPLACEMENT)
        if not whole.startswith(self._shown):
            if self._shown.startswith(whole):
                return ""  # this token changes the decoding of earlier ones: the rest comes with the next tokens
            # Bytes that never become a character take whole ones before them along, where each is a token (byte
            # fallback). What was shown stays, and the rest is decoded by itself.
            self._before += self._shown
            self._tokens, self._shown = self._tokens[self._num_shown :], ""
            whole = self._decode().rstrip(REPLACEMENT)
        new, self._shown = whole[len(self._shown) :], whole
        self._num_shown = len(self._tokens) if new else self._num_shown
        return new

    def _decode(self) -> str:
        # From the first token on: decoders may treat a word's leading blank by what stands before it.
        text: str = self._tokenizer.backend.decode(self._tokens, skip_special_tokens=True)
        return text

    @property
    def text(self) -> str:
        """The whole text. Bytes that are no complete character are left out at its end."""
        return self._before + self._shown


def stream_answer(
    lm: torch.nn.Module,
    tokenizer: ChatTokenizer,
    prompt: Sequence[int],
    sampling: Sampling,
    on_cut: Callable[[], None] = _nobody_asks,
) -> Iterator[str]:
    """Pieces of the answer to an encoded prompt, each of whole characters."""
    stream = CharacterStream(tokenizer)
    for token in generate(lm, prompt, stop_tokens(lm, tokenizer), sampling, on_cut):
        piece = stream.add(token)
        if piece:
            yield piece
