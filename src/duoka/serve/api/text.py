"""From tokens to text as it is sent: whole characters, and nothing that may turn out to be a stop text."""

from __future__ import annotations

from dataclasses import dataclass, field

from duoka.data.tokens.tokenizer import ChatTokenizer
from duoka.serve.batching.scheduler import Scored
from duoka.serve.generate import CharacterStream


@dataclass
class Piece:
    """Text to be sent, and the tokens that it came from."""

    text: str = ""
    tokens: list[Scored] = field(default_factory=list)


class Answer:
    """The text of one answer while it is written."""

    def __init__(self, tokenizer: ChatTokenizer, stops: tuple[str, ...]) -> None:
        self._stream, self._stops = CharacterStream(tokenizer), stops
        self._held = ""
        self._tokens: list[Scored] = []
        self.text = ""  # all that was sent
        self.num_tokens = 0
        self.is_stopped = False  # a stop text came

    def add(self, scored: Scored) -> Piece:
        """What can be sent now; nothing after a stop text."""
        if self.is_stopped:
            return Piece()
        self.num_tokens += 1
        self._tokens.append(scored)
        self._held += self._stream.add(scored.token)
        ends = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if ends:
            self.is_stopped = True
            return self._send(min(ends))
        return self._send(len(self._held) - self._longest_beginning())

    def finish(self) -> Piece:
        """What was held back, at the end of an answer that no stop text ended."""
        return Piece() if self.is_stopped else self._send(len(self._held), is_last=True)

    def _send(self, length: int, *, is_last: bool = False) -> Piece:
        text, self._held = self._held[:length], "" if self.is_stopped else self._held[length:]
        if not text and not self.is_stopped and not is_last:
            return Piece()  # its tokens go with the text that they become a part of
        tokens, self._tokens = self._tokens, []
        self.text += text
        return Piece(text, tokens)

    def _longest_beginning(self) -> int:
        """How many letters at the end may be the beginning of a stop text."""
        most = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(most, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
