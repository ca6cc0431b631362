"""Where a turn of the assistant begins and ends in text whose chat template does not write both by itself.

template.py asks here; what a template does is seen by what it writes, never by a model's name.
"""

from __future__ import annotations

import re

from duoka.data.tokens.tokenizer import ChatTokenizer

Span = tuple[int, int]  # characters [start, end)
_OPENED = re.compile(r"(<think(?:ing)?>)\s*(?:</think(?:ing)?>\s*)?\Z")

_THOUGHT = re.compile(r"<think(?:ing)?>.*?(?:</think(?:ing)?>\s*|\Z)", re.DOTALL)


def begin_answer(prompt: str, text: str) -> int:
    """Where the answer to a prompt begins in the whole text; -1: that does not begin with the prompt.

    A prompt may open a thought (DeepSeek-R1), or hold an empty one (Qwen 3.5), where the answer is written without it:
    what both have in common, the mark of a thought or what stands before it, is the prompt then.
    """
    if text.startswith(prompt):
        return len(prompt)
    opened = _OPENED.search(prompt)
    borders = (opened.end(1), opened.start()) if opened else ()
    return next((border for border in borders if text.startswith(prompt[:border])), -1)


def begin_behind_header(told: str, prompt: str, text: str, lead: str) -> int:
    """Where an answer begins in a text that has no thoughts where its prompt has some; -1: that cannot be told.

    Templates drop thoughts of turns before the last question (Qwen 3). `told` is the prompt without the beginning of
    the answer's turn, which is its header, and `lead` all of the text before the answer's words.
    """
    if not text.startswith(lead) or not prompt.startswith(told):
        return -1
    if not _THOUGHT.sub("", text).startswith(_THOUGHT.sub("", prompt)):
        return -1
    header = prompt[len(told) :]
    opened = _OPENED.search(header)
    for head in (header, *((header[: opened.end(1)], header[: opened.start()]) if opened else ())):
        at = lead.rfind(head) + len(head)
        # Between the header and the words there is a thought at most: another turn's header would be further off.
        if head.strip() and at >= len(head) and not _THOUGHT.sub("", lead[at:]).strip():
            return at
    return -1


def end_by_next(text: str, spans: list[Span], tokenizer: ChatTokenizer) -> tuple[str, list[Span]]:
    """Answers of a template that writes no end of a turn (GLM's), ended by the token that begins the next turn.

    Generation stops at it; behind the last turn stands that of a question.
    """
    if not tokenizer.begins_question:
        return text, spans
    ends: list[Span] = []
    for start, end in spans:
        said, token = text[start:end], ""
        if not any(special and said.endswith(special) for special in tokenizer.special_texts):
            token = tokenizer.begins_question if end == len(text) else tokenizer.special_at(text, end)
            text += token if end == len(text) else ""
        ends.append((start, end + len(token)))
    return text, ends


def thought_notes(tokenizer: ChatTokenizer) -> list[str]:
    """What is to be said of a template whose prompt opens a thought that answers are written without."""
    from jinja2 import TemplateError

    asked = [{"role": "user", "content": "?"}]
    try:
        prompt = tokenizer.render(asked, prompt=True)
        told = tokenizer.render([*asked, {"role": "assistant", "content": "!"}])
    except (TemplateError, TypeError, ValueError, KeyError):
        return []
    opened = _OPENED.search(prompt)
    if opened is None or "</" in opened[0] or not told[begin_answer(prompt, told) :].startswith("!"):
        return []
    mark = opened[1]
    return [f"in use the chat template begins each answer with {mark}, and answers of data are learned without it"]
