"""What comes of a request, as OpenAI's API writes it: one object, or a stream of pieces."""

from __future__ import annotations

import contextlib
import itertools
import queue
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from duoka.data.tokens.token_texts import bytes_of
from duoka.data.tokens.tokenizer import ChatTokenizer
from duoka.serve.api.fields import BadRequest
from duoka.serve.api.requests import Asked
from duoka.serve.api.text import Answer, Piece
from duoka.serve.batching.scheduler import Done, Event, Failed, IsClosing, IsFull, Scheduler, Scored, TooLarge, TooMany
from duoka.serve.tools import end_of_speech
from duoka.tasks.tool_calls import split_calls

_LOOK_S = 0.25  # how often it is looked whether whoever asked is still there


class Gone(Exception):
    """Whoever asked has left."""


@dataclass
class _Choice:
    answer: Answer
    piece: Piece = field(default_factory=Piece)  # all of it
    prompt_scores: list[Scored] = field(default_factory=list)
    num_letters: int = 0  # of the text that the tokens told so far make: where the next one begins
    num_said: int = 0  # letters that were streamed of an answer beside tools
    finish: str | None = None
    has_begun: bool = False


@dataclass(frozen=True)
class _Mailbox:
    shared: queue.SimpleQueue[tuple[int, Event]]
    choice: int

    def put(self, event: Event) -> None:
        self.shared.put((self.choice, event))


class Reply:
    """One request on its way. Raises BadRequest before anything is sent, Gone when the client has left."""

    def __init__(
        self, asked: Asked, scheduler: Scheduler, tokenizer: ChatTokenizer, is_gone: Callable[[], bool]
    ) -> None:
        self._asked, self._tokenizer, self._is_gone = asked, tokenizer, is_gone
        self._shared: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        self._jobs = asked.jobs(lambda choice: _Mailbox(self._shared, choice))
        self._choices = [_Choice(Answer(tokenizer, asked.stops)) for _ in self._jobs]
        kind = "chatcmpl" if asked.is_chat else "cmpl"
        self._look_at = time.monotonic() + _LOOK_S
        self._id, self._created = f"{kind}-{secrets.token_hex(12)}", int(time.time())
        try:
            scheduler.submit(self._jobs)
        except IsFull as error:
            raise BadRequest(f"too many requests: {error}", status=429, code="queue_full") from None
        except IsClosing as error:
            raise BadRequest(str(error), status=503) from None
        except TooMany as error:
            raise BadRequest(str(error), "n" if asked.num > 1 else "prompt") from None
        except TooLarge as error:
            param = "messages" if asked.is_chat else "prompt"
            raise BadRequest(str(error), param, code="context_length_exceeded") from None

    def whole(self) -> dict[str, Any]:
        for _ in self._pieces():
            pass
        kind = "chat.completion" if self._asked.is_chat else "text_completion"
        return self._frame(kind, [self._whole_choice(number) for number in range(len(self._choices))], self._usage())

    def stream(self) -> Iterator[dict[str, Any]]:
        kind = "chat.completion.chunk" if self._asked.is_chat else "text_completion"
        for number, piece, finish in self._pieces():
            yield self._frame(kind, [self._part(number, piece, finish)])
        if self._asked.has_usage:
            yield self._frame(kind, [], self._usage())

    def cancel(self) -> None:
        for job in self._jobs:
            job.cancel()

    # --- what comes from the scheduler ---

    def _pieces(self) -> Iterator[tuple[int, Piece, str | None]]:
        """(choice, what is new, why it ended), until all choices ended."""
        try:
            while any(choice.finish is None for choice in self._choices):
                number, event = self._next()
                choice = self._choices[number]
                if choice.finish is not None:
                    continue  # of an answer that a stop text ended
                piece = self._take(number, choice, event)
                choice.piece.text += piece.text
                choice.piece.tokens += piece.tokens
                if piece.text or piece.tokens or choice.finish:
                    yield number, piece, choice.finish
        finally:
            self.cancel()

    def _next(self) -> tuple[int, Event]:
        while True:
            # By the clock: where tokens come faster than that, nobody ever waits.
            if (now := time.monotonic()) >= self._look_at:
                self._look_at = now + _LOOK_S
                if self._is_gone():
                    raise Gone
            with contextlib.suppress(queue.Empty):
                return self._shared.get(timeout=_LOOK_S)

    def _take(self, number: int, choice: _Choice, event: Event) -> Piece:
        if isinstance(event, Failed):
            if event.is_unloaded:
                raise BadRequest(event.error, "model", status=404, code="model_not_found")
            raise BadRequest(f"the server failed: {event.error}", status=500)
        if isinstance(event, Done):
            if event.reason == "cancelled":
                raise BadRequest("the server is being stopped", status=503)
            choice.finish = event.reason
            return choice.answer.finish()
        if isinstance(event, list):
            choice.prompt_scores = event
            return Piece()
        piece = choice.answer.add(event)
        if choice.answer.is_stopped:
            choice.finish = "stop"
            self._jobs[number].cancel()
        return piece

    # --- as JSON ---

    def _frame(self, kind: str, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> dict[str, Any]:
        frame = {"id": self._id, "object": kind, "created": self._created, "model": self._asked.model}
        shows = usage is not None or (self._asked.is_stream and self._asked.has_usage)
        return {**frame, "system_fingerprint": None, "choices": choices, **({"usage": usage} if shows else {})}

    def _usage(self) -> dict[str, int]:
        asked = sum(len(prompt) for prompt in self._asked.prompts)
        answered = sum(choice.answer.num_tokens for choice in self._choices)
        return {"prompt_tokens": asked, "completion_tokens": answered, "total_tokens": asked + answered}

    def _whole_choice(self, number: int) -> dict[str, Any]:
        choice, asked = self._choices[number], self._asked
        if not asked.is_chat:
            return self._completion_part(number, choice.piece, choice.finish, with_prompt=True)
        said: str | None = choice.piece.text
        calls: list[dict[str, Any]] = []
        if asked.tools:
            said, calls = split_calls(choice.piece.text, self._asked.tools)
        message = {"role": "assistant", "content": said, "refusal": None, **({"tool_calls": calls} if calls else {})}
        finish = "tool_calls" if calls and choice.finish == "stop" else choice.finish
        return {"index": number, "message": message, "logprobs": self._logprobs(choice.piece), "finish_reason": finish}

    def _part(self, number: int, piece: Piece, finish: str | None) -> dict[str, Any]:
        choice = self._choices[number]
        is_first, choice.has_begun = not choice.has_begun, True
        if not self._asked.is_chat:
            return self._completion_part(number, piece, finish, with_prompt=is_first)
        delta: dict[str, Any] = {"role": "assistant", "content": ""} if is_first else {}
        if self._asked.tools and finish is not None:
            said, calls = self._rest_beside_tools(choice)
            delta |= {"tool_calls": [{"index": at, **call} for at, call in enumerate(calls)]} if calls else {}
            finish = "tool_calls" if calls and finish == "stop" else finish
        else:
            said = self._speech(choice) if self._asked.tools else piece.text
        delta |= {"content": said} if said else {}
        return {"index": number, "delta": delta, "logprobs": self._logprobs(piece), "finish_reason": finish}

    def _speech(self, choice: _Choice) -> str:
        """What is new of it up to where a call may begin."""
        text, begin = choice.piece.text, choice.num_said
        # Only what is held is looked at: all of a long answer, for each token and tool, would take milliseconds.
        spoken = "." if begin else ""  # behind speech no call is bare JSON
        held = spoken + text[begin:]
        choice.num_said += max(0, end_of_speech(held, self._asked.tools) - len(spoken))
        return text[begin : choice.num_said]

    def _rest_beside_tools(self, choice: _Choice) -> tuple[str, list[dict[str, Any]]]:
        """What was not streamed of a finished answer, and its calls, which are told once all of it is there."""
        text = choice.piece.text
        said, calls = split_calls(text, self._asked.tools)
        if not calls:
            return text[choice.num_said :], []
        said, sent = said or "", text[: choice.num_said].lstrip()  # beside calls it is without blanks at its ends
        return said.removeprefix(sent if said.startswith(sent) else sent.rstrip()), calls

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if self._asked.num_top is None:
            return None

        def one(token: int, logprob: float | None) -> dict[str, Any]:
            raw = bytes_of(self._tokenizer, token)
            return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}

        content = [
            {**one(scored.token, scored.logprob), "top_logprobs": [one(*top) for top in scored.top]}
            for scored in piece.tokens
        ]
        return {"content": content, "refusal": None}

    def _completion_part(self, number: int, piece: Piece, finish: str | None, *, with_prompt: bool) -> dict[str, Any]:
        choice, asked = self._choices[number], self._asked
        before = asked.texts[number // asked.num] if asked.echoes and with_prompt else ""
        asked_for = choice.prompt_scores if with_prompt else []
        logprobs = None if asked.num_top is None else self._old_logprobs(choice, asked_for, piece.tokens)
        return {"index": number, "text": before + piece.text, "logprobs": logprobs, "finish_reason": finish}

    def _old_logprobs(self, choice: _Choice, of_prompt: Sequence[Scored], said: Sequence[Scored]) -> dict[str, Any]:
        scores = [*of_prompt, *said]
        texts = [self._name_of(scored.token) for scored in scores]
        # The text of an answer is without special tokens; a prompt's has them.
        shown = [True] * len(of_prompt) + [not self._is_special(one.token) for one in said]
        lengths = (
            _letters_in(bytes_of(self._tokenizer, one.token)) if is_shown else 0
            for one, is_shown in zip(scores, shown, strict=True)
        )
        *places, choice.num_letters = itertools.accumulate(lengths, initial=choice.num_letters)
        tops = [
            None if scored.logprob is None
            else {**{self._name_of(token): value for token, value in scored.top}, text: scored.logprob}
            for scored, text in zip(scores, texts, strict=True)
        ]  # fmt: skip
        logprobs = [scored.logprob for scored in scores]
        return {
            "tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops if self._asked.num_top else None,
            "text_offset": places,
        }  # fmt: skip

    def _is_special(self, token: int) -> bool:
        return self._tokenizer.added.get(token) in self._tokenizer.special_texts

    def _name_of(self, token: int) -> str:
        """Its text; of a part of a character its bytes, as OpenAI names these: two such are not one."""
        raw = bytes_of(self._tokenizer, token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _letters_in(raw: bytes) -> int:
    """Characters that begin in it."""
    return sum(byte & 0xC0 != 0x80 for byte in raw)
