"""One conversation to token ids and a target mask: exactly what the assistant has to say, and the token that ends it.

Works with any chat template: the text up to a turn's generation prompt, and up to the turn's end, are rendered and
must be beginnings of the whole text. What is between them is the target. A template for which that does not hold is
refused with the turn in question, because a wrong mask trains a model on the wrong side of the conversation.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from duoka.data.read.example import BadRecord, Example, Message
from duoka.data.tokens.reasoning import as_key, reasoning_of
from duoka.data.tokens.tokenizer import ChatTokenizer, Tokens
from duoka.data.tokens.turn_borders import Span, begin_answer, begin_behind_header, end_by_next
from duoka.data.tokens.typed_control import break_up, without_marks

Targets = Literal["assistant", "last", "all"]


@dataclass(frozen=True)
class Sample:
    """Token ids of one conversation, and which of them are to be learned."""

    input_ids: np.ndarray  # (tokens,) int32
    is_target: np.ndarray  # (tokens,) bool

    @property
    def num_targets(self) -> int:
        """Targets that can be predicted: the first token has nothing before it."""
        return int(np.count_nonzero(self.is_target[1:]))


def encode(example: Example, tokenizer: ChatTokenizer, *, targets: Targets = "assistant") -> Sample:
    """Ids and target mask. Raises BadRecord when the template cannot express the conversation."""
    text, spans, cuts = mark_targets(example, tokenizer, targets=targets)
    (tokens,) = tokenizer.encode_many([text])
    return mark_tokens(text, spans, tokens, tokenizer, cuts)


def mark_tokens(
    text: str, spans: list[Span], tokens: Tokens, tokenizer: ChatTokenizer, cuts: tuple[int, ...] = ()
) -> Sample:
    """The tokens of a text as a sample that learns `spans`; at `cuts` a control token was typed that is none."""
    if cuts:
        tokens = _encode_typed(text, cuts, tokens, tokenizer)
    inside = _cuts_inside_tokens(tokens, spans)
    if inside:
        # A token that begins in the prompt and ends in the answer is one that generation could never produce.
        tokens = _encode_in_parts(text, sorted({*cuts, *inside}), tokens, tokenizer)
    is_target = np.zeros(len(tokens.ids), bool)
    for start, end in spans:
        is_target |= (tokens.starts >= start) & (tokens.ends <= end)
    return Sample(tokens.ids, is_target)


def mark_targets(
    example: Example, tokenizer: ChatTokenizer, *, targets: Targets = "assistant"
) -> tuple[str, list[Span], tuple[int, ...]]:
    """The conversation as text, the characters in it that are to be learned, and where it is to be cut."""
    messages, mark = _messages(example.messages, tokenizer, example.tools)
    tools = json.loads(example.tools) if example.tools else None
    text = _render(tokenizer, messages, tools, turn=len(messages))
    if tools and text == _render(tokenizer, messages, None, turn=len(messages)):
        raise BadRecord(
            f"the chat template ({tokenizer.template_name}) leaves the tools of the conversation out",
            "use a model whose template knows tools (Qwen2.5, Qwen3, Llama 3.1), or leave them out of the data",
        )
    if targets == "all":
        if not all(message.is_learned for message in example.messages):
            raise BadRecord("data.targets is all, and a message has weight 0", "write   targets: assistant")
        return without_marks(text, [(0, len(text))], mark)
    _check_all_is_there(text, messages, tokenizer)
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    turns = [place for place in (turns[-1:] if targets == "last" else turns) if example.messages[place].is_learned]
    spans = [_turn_span(tokenizer, messages, tools, place, text) for place in turns]
    return without_marks(*end_by_next(text, spans, tokenizer), mark)


def _messages(
    messages: tuple[Message, ...], tokenizer: ChatTokenizer, tools: str | None
) -> tuple[list[dict[str, Any]], str]:
    said = []
    for place, message in enumerate(messages, start=1):
        beside = as_key(message, place, tokenizer.reasoning_keys[bool(tools)]) if message.reasoning else {}
        said.append({**_message(message), **beside})
    return break_up(said, tokenizer.special_texts)


def encode_prompt(text: str, cuts: tuple[int, ...], tokenizer: ChatTokenizer) -> list[int]:
    """The ids of a prompt, for generation."""
    (tokens,) = tokenizer.encode_many([text])
    ids: list[int] = mark_tokens(text, [], tokens, tokenizer, cuts).input_ids.tolist()
    return ids


def render_prompt(
    messages: tuple[Message, ...], tools: str | None, tokenizer: ChatTokenizer
) -> tuple[str, tuple[int, ...]]:
    """The conversation as text, up to where the assistant begins to speak, and where it is to be cut."""
    said, mark = _messages(messages, tokenizer, tools)
    text = _render(tokenizer, said, json.loads(tools) if tools else None, turn=len(said), prompt=True)
    _check_all_is_there(text, said, tokenizer)
    text, _, cuts = without_marks(text, [], mark)
    return text, cuts


def knows_tools(tokenizer: ChatTokenizer, tools: list[dict[str, Any]]) -> bool:
    """Whether the template writes tools into a prompt."""
    from jinja2 import TemplateError

    asked = [{"role": "user", "content": "?"}]
    try:
        return tokenizer.render(asked, tools, prompt=True) != tokenizer.render(asked, None, prompt=True)
    except (TemplateError, TypeError, ValueError, KeyError):
        return False


def tool_turn(
    answers: Sequence[str], tools: list[dict[str, Any]], tokenizer: ChatTokenizer, names: Sequence[str] = ()
) -> list[int]:
    """The ids of what tools of these names answered, from behind the assistant's end of turn to where it speaks again.

    They are what the template writes behind any answer, so that of what the model said no token is encoded anew.
    Raises BadRecord where the template cannot tell one from the other.
    """
    called = names or [tools[0]["function"]["name"]] * len(answers)
    # Templates may want an id of each call (Mistral's, of nine letters); one that was drawn would change with each run.
    told = [Message("tool", text, name=called[at], call_id=f"call{at:05d}") for at, text in enumerate(answers)]
    # One call alone before the answers, however many: Llama 3.1's template takes no more in a turn.
    call = json.dumps([{"id": told[0].call_id, "name": called[0], "arguments": {}}])
    said, mark = _messages((Message("user", "?"), Message("assistant", "!", call), *told), tokenizer, None)
    before = _render(tokenizer, said[:2], tools, turn=2)
    whole = _render(tokenizer, said, tools, turn=len(said), prompt=True)
    at = _trim_end(before, 0, len(before), tokenizer)
    lost = any(turn["content"].strip() not in whole[at:] for turn in said[2:])
    if not whole.startswith(before[:at]) or lost:
        raise BadRecord(
            f"the chat template ({tokenizer.template_name}) does not write what a tool answers behind the call",
            "use a model whose template knows tools (Qwen2.5, Qwen3, Llama 3.1 and later)",
        )
    text, _, cuts = without_marks(whole, [], mark)
    (tokens,) = tokenizer.encode_many([text])
    if cuts:
        tokens = _encode_typed(text, cuts, tokens, tokenizer)
    ids: list[int] = tokens.ids[tokens.starts >= at].tolist()
    return ids


def _turn_span(tokenizer: ChatTokenizer, messages: list[dict[str, Any]], tools: Any, place: int, text: str) -> Span:
    """Where the assistant's turn number `place` stands in `text`, end-of-turn token included."""
    before = _render(tokenizer, messages[:place], tools, turn=place + 1, prompt=True)
    start = begin_answer(before, text)
    if start < 0:
        told = _render(tokenizer, messages[:place], tools, turn=place)
        lead, _, _ = _around_letter(tokenizer, messages, tools, place, text)
        start = begin_behind_header(told, before, text, lead)
    if start < 0:
        raise _unstable(tokenizer, messages, place, before, text)
    content = messages[place]["content"].strip()
    if content and not tokenizer.writes_prompt:
        # A template without a generation prompt: what it writes before the answer is its header, unless it is blank.
        found = _start_of_content(tokenizer, messages, tools, place, text, start)
        start = found if found >= 0 and text[start:found].strip() else start
    whole = text if place == len(messages) - 1 else _render(tokenizer, messages[: place + 1], tools, turn=place + 1)
    if text.startswith(whole):
        end = len(whole)
    elif messages[place].get("tool_calls"):
        end = _end_of_calls(tokenizer, messages, tools, place, text, whole, start)
        if end < 0:
            raise _unstable(tokenizer, messages, place, whole, text)
    else:
        # Templates that treat the last turn in another way (reasoning models): the turn ends where the next begins.
        found = _end_of_content(tokenizer, messages, tools, place, text, start) if content else -1
        if found < 0:
            raise _unstable(tokenizer, messages, place, whole, text)
        end = _end_of_turn(text, found, tokenizer)
    said = text[start:end]
    _check_answer(tokenizer, messages, place, said)
    return start, _trim_end(text, start, end, tokenizer)


def _check_answer(tokenizer: ChatTokenizer, messages: list[dict[str, Any]], place: int, said: str) -> None:
    """An answer, its calls, and at the end of a conversation its reasoning stand in what is learned of the turn."""
    content, reasoning = messages[place]["content"].strip(), reasoning_of(messages[place]).strip()
    is_last = place == len(messages) - 1  # of earlier turns templates leave the reasoning out, as in use
    calls = messages[place].get("tool_calls") or []
    names = [call["function"]["name"] for call in calls]
    missing = [name for name in names if said.count(name) < names.count(name)]
    is_lost = content and content.splitlines()[0].strip() not in said
    loses_thought = is_last and reasoning not in said
    if is_lost or loses_thought or missing or not said.strip():
        lost = f"the tool call {missing[0]!r}" if missing else "the reasoning" if loses_thought else "the answer"
        raise BadRecord(
            f"the chat template ({tokenizer.template_name}) leaves {lost} of message {place + 1} out",
            "use a model whose template knows it, or set model.template",
        )


def _end_of_calls(
    tokenizer: ChatTokenizer, messages: list[dict[str, Any]], tools: Any, place: int, text: str, whole: str, start: int
) -> int:
    """Where a turn that ends with calls ends in the whole text: behind the last call as it does in `whole`, its last
    turn. -1: that cannot be told."""
    letter = next(chr(code) for code in range(0xE000, 0xF900) if chr(code) not in text)
    *calls, last = messages[place]["tool_calls"]
    marked = {**last, "function": {**last["function"], "arguments": {letter: letter}}}
    turns = [*messages[:place], {**messages[place], "tool_calls": [*calls, marked]}]

    def behind(real: str, others: list[dict[str, Any]]) -> int:
        """The place in the last call's arguments from where on the real text is that with the marked call."""
        same = _render(tokenizer, others, tools, turn=place + 1).rpartition(letter)[2]
        pairs = zip(reversed(real), reversed(same), strict=False)
        return len(real) - sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    at, ending = behind(text, [*turns, *messages[place + 1 :]]), whole[behind(whole, turns) :]
    if at < start or not text.startswith(ending.rstrip(), at):
        return -1
    return at + len(ending.rstrip())


def _start_of_content(
    tokenizer: ChatTokenizer, messages: list[dict[str, Any]], tools: Any, place: int, text: str, start: int
) -> int:
    """Where the words of an answer begin in the whole text; -1: that cannot be told."""
    before, letter, _ = _around_letter(tokenizer, messages, tools, place, text)
    if letter and len(before) >= start and text.startswith(before + messages[place]["content"].strip()):
        return len(before)
    return text.find(messages[place]["content"].strip(), start)


def _around_letter(
    tokenizer: ChatTokenizer, messages: list[dict[str, Any]], tools: Any, place: int, text: str
) -> tuple[str, str, str]:
    """The whole text before and behind an answer, by a letter that stands for it and is nowhere else: its own words may
    be in the template's too ("A" in "Assistant:"), or in its reasoning."""
    letter = next(chr(code) for code in range(0xE000, 0xF900) if chr(code) not in text)
    others = [*messages[:place], {**messages[place], "content": letter}, *messages[place + 1 :]]
    try:
        return _render(tokenizer, others, tools, turn=len(messages)).partition(letter)
    except BadRecord:  # of a template that looks for something in the answer
        return "", "", ""


def _end_of_content(
    tokenizer: ChatTokenizer, messages: list[dict[str, Any]], tools: Any, place: int, text: str, start: int
) -> int:
    """Where the words of an answer end in the whole text; -1: that cannot be told."""
    content = messages[place]["content"]
    before, _, behind = _around_letter(tokenizer, messages, tools, place, text)
    for words in (content, content.strip(), content.lstrip(), content.rstrip()):
        if text == before + words + behind and len(before) >= start:
            return len(before) + len(words)
    # Of reasoning that holds the same words the answer cannot be told.
    found = -1 if reasoning_of(messages[place]) else text.find(content.strip(), start)
    return found if found < 0 else found + len(content.strip())


def _end_of_turn(text: str, after: int, tokenizer: ChatTokenizer) -> int:
    """The end of the first special token at or after a place; that place when none follows at once."""
    at = after + len(text[after:]) - len(text[after:].lstrip())
    for special in tokenizer.special_texts:
        if special and text.startswith(special, at):
            return at + len(special)
    return after


def _trim_end(text: str, start: int, end: int, tokenizer: ChatTokenizer) -> int:
    """Leave out the blanks behind the end-of-turn token: the template writes them, generation has stopped."""
    stripped_end = start + len(text[start:end].rstrip())
    said = text[start:stripped_end]
    return stripped_end if any(special and said.endswith(special) for special in tokenizer.special_texts) else end


def _check_all_is_there(text: str, messages: list[dict[str, Any]], tokenizer: ChatTokenizer) -> None:
    """Every question and system prompt must stand in the text, questions in order; templates drop what they know not.

    A system prompt may stand later than it was said: Mistral's templates write it into the last question.
    """
    at = 0
    for place, message in enumerate(messages, start=1):
        content = message["content"].strip()
        if message["role"] not in ("user", "system") or not content:
            continue
        found = text.find(content, at)
        if found < 0:
            raise BadRecord(
                f"the chat template ({tokenizer.template_name}) leaves message {place} ({message['role']}) out",
                "use a model whose template knows this role, or set model.template: chatml",
            )
        at = found + len(content) if message["role"] == "user" else at


def _render(
    tokenizer: ChatTokenizer, messages: list[dict[str, Any]], tools: Any, *, turn: int, prompt: bool = False
) -> str:
    from jinja2 import TemplateError

    try:
        return tokenizer.render(messages, tools, prompt=prompt)
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise BadRecord(
            f"the chat template ({tokenizer.template_name}) refuses the conversation up to message {turn}: {error}",
            "change the conversation to what the template accepts, or set model.template: chatml",
        ) from None


def _unstable(tokenizer: ChatTokenizer, messages: list[dict[str, Any]], place: int, part: str, text: str) -> BadRecord:
    same = next((at for at, (a, b) in enumerate(zip(part, text, strict=False)) if a != b), min(len(part), len(text)))
    shown = messages[place]["content"][:60]
    others = "" if place == len(messages) - 1 else "set data.targets: last, or "
    return BadRecord(
        f"the chat template ({tokenizer.template_name}) writes the beginning of the conversation in another way "
        f"once more follows, so the answer of message {place + 1} ({shown!r}) cannot be told from the prompt: "
        f"{part[same : same + 40]!r} becomes {text[same : same + 40]!r}",
        f"{others}set model.template to a plain one such as chatml",
    )


def _message(message: Message) -> dict[str, Any]:
    """As templates take it, in OpenAI's words; what data do not say is not there, and a template may ask for it."""
    said: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls is not None:
        said["tool_calls"] = [_tool_call(call) for call in json.loads(message.tool_calls)]
    beside = {"name": message.name, "tool_call_id": message.call_id}
    return said | {key: value for key, value in beside.items() if value}


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    number = {"id": call.pop("id")} if "id" in call else {}
    return {**number, "type": "function", "function": call}


def _cuts_inside_tokens(tokens: Tokens, spans: list[Span]) -> list[int]:
    """Borders of spans that fall inside a token."""
    borders = sorted({border for span in spans for border in span})
    return [border for border in borders if np.any((tokens.starts < border) & (tokens.ends > border))]


def _encode_typed(text: str, cuts: tuple[int, ...], whole: Tokens, tokenizer: ChatTokenizer) -> Tokens:
    """The tokens of a text in which control tokens were typed: as text, or refused where a tokenizer cannot."""
    tokens = _encode_in_parts(text, list(cuts), whole, tokenizer)
    unknown = tokenizer.special_tokens.get("unk_token", "") if tokenizer.unknown_id is not None else ""
    # A typed <unk> is learned as what stands for any word that the tokenizer lacks: it ends and frames nothing.
    if tokens is whole and not (unknown and all(text.startswith(unknown, cut - 1) for cut in cuts)):
        near = text[max(0, cuts[0] - 1) : cuts[0] + 30]
        raise BadRecord(
            f"a message holds a control token as text ({near!r}), and this tokenizer cannot tell it from a real one",
            "take it out of the message, or write it otherwise",
        )
    return tokens


def _encode_in_parts(text: str, cuts: list[int], whole: Tokens, tokenizer: ChatTokenizer) -> Tokens:
    """The tokens of the text cut at `cuts`; `whole` for tokenizers that write the beginning of any text in another
    way."""
    borders = [0, *cuts, len(text)]
    parts = tokenizer.encode_many([text[start:end] for start, end in itertools.pairwise(borders)])
    ids = np.concatenate([part.ids for part in parts])
    if tokenizer.decode(ids.tolist()) != tokenizer.decode(whole.ids.tolist()):
        return whole
    starts = np.concatenate([part.starts + start for part, start in zip(parts, borders, strict=False)])
    ends = np.concatenate([part.ends + start for part, start in zip(parts, borders, strict=False)])
    return Tokens(ids, starts, ends)
