"""A conversation with a model: the prompt from its messages, the terminal's loop, and a pipe's.

Takes a loaded model; load_run.py finds it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jinja2 import TemplateError

from duoka.data.tokens.template import encode_prompt
from duoka.data.tokens.tokenizer import ChatTokenizer
from duoka.data.tokens.typed_control import break_up, without_marks
from duoka.errors import ConfigError
from duoka.model.answer import window_of
from duoka.model.sampling import Sampling
from duoka.serve.generate import stream_answer
from duoka.serve.tools import MOST_CALLS, as_asked, end_of_speech
from duoka.tasks.tool_calls import split_calls
from duoka.tasks.tools import Tool, call_tool

Write = Callable[[str], None]
_COMMAND = re.compile(r"/[a-zA-Z]*")  # /usr/bin is a path, and asked about


class NoRoom(ConfigError):
    """A conversation as long as the model's window, or longer."""


class NotText(ConfigError):
    """Bytes that are no text."""


def as_text(said: str) -> str:
    """What was typed or piped; where the locale knows ASCII alone, the UTF-8 that its bytes are."""
    try:
        return said.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        raise NotText("what was asked is no UTF-8 text", fix="convert it:   iconv -f LATIN1 -t UTF-8") from None


@dataclass
class Chat:
    """A model, its tokenizer, and the messages so far."""

    lm: torch.nn.Module
    tokenizer: ChatTokenizer
    sampling: Sampling
    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: Mapping[str, Tool] = field(default_factory=dict)
    num_cut: int = 0  # answers that ended before the model ended them
    why_cut: str = ""  # of the last of them

    def ask(self, text: str) -> Iterator[str]:
        """Stream the answer; it joins the history when it is complete or was broken off.

        Calls of tools are made, and the model goes on with what they answered; each is shown as a line of its own.
        """
        before = len(self.messages)
        self.messages.append({"role": "user", "content": as_text(text)})
        for number in range(MOST_CALLS + 1):
            pieces: list[str] = []
            calls: list[dict[str, Any]] = []
            try:
                prompt = self._prompt()
            except ConfigError:
                del self.messages[before:]  # what could not be asked would stand before every later question
                raise
            try:
                yield from self._stream(prompt, pieces)
            finally:
                said, calls = split_calls("".join(pieces), self.tools) if self.tools else ("".join(pieces), [])
                self.messages.append({"role": "assistant", "content": said or ""})
            if not calls:
                return
            if number == MOST_CALLS:
                break
            self.messages[-1]["tool_calls"] = [
                {"id": call["id"], "type": "function", "function": as_asked(call)} for call in calls
            ]
            yield from self._call(calls)
        yield f"(after {MOST_CALLS} rounds of calls no more are made)"

    def _call(self, calls: list[dict[str, Any]]) -> Iterator[str]:
        """Make the calls that the last message asks for. Broken off, none was asked for: templates refuse a history
        with a call that nothing answered."""
        at = len(self.messages)
        try:
            for call in calls:
                answer = call_tool(self.tools, call)
                beside = {"name": call["function"]["name"], "tool_call_id": call["id"]}
                self.messages.append({"role": "tool", "content": answer, **beside})
                yield f"[{call['function']['name']} {call['function']['arguments']} -> {answer}]\n"
        except BaseException:  # a Ctrl-C too, or a caller who asks no further; raised again
            del self.messages[at:], self.messages[at - 1]["tool_calls"]
            raise

    def _stream(self, prompt: list[int], pieces: list[str]) -> Iterator[str]:
        """What is said, without the text of calls; all of it lies in `pieces`."""
        shown = 0
        for piece in stream_answer(self.lm, self.tokenizer, prompt, self.sampling, lambda: self._note_cut(prompt)):
            pieces.append(piece)
            text = "".join(pieces) if self.tools else ""
            if not self.tools:
                yield piece
            elif (end := end_of_speech(text, self.tools)) > shown:
                yield text[shown:end]
                shown = end
        text = "".join(pieces)
        if self.tools and shown < len(text) and not split_calls(text, self.tools)[1]:
            yield text[shown:]

    def _note_cut(self, prompt: list[int]) -> None:
        most, window = self.sampling.max_new_tokens, window_of(self.lm)
        self.num_cut += 1
        self.why_cut = f"after {most:,} tokens: --max-new-tokens takes more"
        if window is not None and len(prompt) + most > window:
            self.why_cut = f"where the model's window of {window:,} tokens ends"

    def clear(self) -> None:
        self.messages.clear()

    def _prompt(self) -> list[int]:
        """The prompt's token ids, refused where the model has no room to answer: its answer would be nothing at all."""
        ids, window = self._encode(), window_of(self.lm)
        if not ids:
            raise ConfigError(f"the chat template ({self.tokenizer.template_name}) writes nothing for it")
        if window is not None and len(ids) >= window:
            raise NoRoom(
                f"the conversation has {len(ids):,} tokens, and the model's window is {window:,}",
                fix="ask for less at once",
            )
        return ids

    def _encode(self) -> list[int]:
        opening = [{"role": "system", "content": self.system}] if self.system else []
        messages, mark = break_up(opening + self.messages, self.tokenizer.special_texts)
        try:
            tools = [tool.schema for tool in self.tools.values()] or None
            text, _, cuts = without_marks(self.tokenizer.render(messages, tools, prompt=True), [], mark)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise ConfigError(
                f"the chat template ({self.tokenizer.template_name}) refuses the conversation: {error}",
                fix="leave --system out" if self.system else "try another model.template",
            ) from None
        return encode_prompt(text, cuts, self.tokenizer)


def answer_once(chat: Chat, prompt: str, write: Write, *, as_json: bool = False) -> str:
    """Answer one prompt with no history; streams, or writes one JSON line at the end."""
    chat.clear()
    answer = []
    for piece in chat.ask(prompt):
        answer.append(piece)
        if not as_json:
            write(piece)
    text = "".join(answer)
    write(json.dumps({"prompt": prompt, "answer": text}, ensure_ascii=False) + "\n" if as_json else "\n")
    return text


def answer_lines(chat: Chat, lines: Iterable[str], write: Write, *, as_json: bool = False) -> None:
    """Answer every line of a pipe, each for itself; blank lines are passed over."""
    for number, line in enumerate(lines, start=1):
        try:
            asked = as_text(line.removeprefix("\ufeff").strip())  # which editors on Windows begin a file with
            if asked:
                answer_once(chat, asked, write, as_json=as_json)
        except (NoRoom, NotText) as error:
            what = f"line {number} is not answered, nor what follows: {error.what}"
            raise ConfigError(what, fix=error.fix or None) from None


def talk(chat: Chat, read: Callable[[str], str], write: Write) -> None:
    """The terminal's loop: /new begins anew, /quit or Ctrl-D ends, Ctrl-C breaks an answer off."""
    write("Ask something. /new begins anew, /quit ends, Ctrl-C breaks an answer off.\n")
    while True:
        write("\n")
        try:
            text = read("you: ").strip()
        except (EOFError, KeyboardInterrupt):
            write("\n")
            return
        if text in ("/quit", "/exit"):
            return
        if text == "/new":
            chat.clear()
            write("(a new conversation)\n")
        elif _COMMAND.fullmatch(text):
            write("commands: /new, /quit\n")
        elif text:
            _show_answer(chat, text, write)


def _show_answer(chat: Chat, text: str, write: Write) -> None:
    write("model: ")
    answer, num_cut = chat.ask(text), chat.num_cut
    try:
        for piece in answer:
            write(piece)
        if chat.num_cut > num_cut:
            write(f" (cut {chat.why_cut})")
    except KeyboardInterrupt:
        write(" (broken off)")
    except NoRoom as error:  # the terminal goes on: /new is typed there
        write(f"({error.what}: /new begins anew; or {error.fix})")
    except NotText as error:
        write(f"({error.what})")
    finally:
        answer.close()  # type: ignore[attr-defined]
    write("\n")


def write_stdout(text: str) -> None:
    """Flushed at once, so that tokens appear as they are generated."""
    sys.stdout.write(text)
    sys.stdout.flush()
