"""Examples of every kind to token ids: one record's entry in the store, and counts of lost characters.

Conversations go through template.py; tokenize.py calls `encode_examples` and `fit_length`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from duoka.data.read.example import AnyExample, BadRecord, Example, Labeled, Message, Preference, Prompt, Text
from duoka.data.tokens.template import Sample, Targets, mark_targets, mark_tokens, render_prompt
from duoka.data.tokens.token_store import hash_of
from duoka.data.tokens.tokenizer import ChatTokenizer, Tokens
from duoka.data.tokens.turn_borders import Span

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character (yet)


@dataclass(frozen=True)
class Encoded:
    """One record as tokens. `parts` are two for a preference pair (chosen, rejected), else one.

    `mark` and `margin` go into the store beside the sample: a pair's length of the chosen part, a label as 0 or 1; by
    how much a pair's better answer is to score higher.
    """

    parts: tuple[Sample, ...]
    mark: int = 0
    margin: float = 0.0
    num_unknown: int = 0  # tokens that stand for characters which the tokenizer does not have
    is_damaged: bool = False  # the text holds U+FFFD: characters were lost before duoka read it
    record: int | None = None  # of a part of a conversation that was split: the same number in all of its parts

    @property
    def longest(self) -> int:
        return max(len(part.input_ids) for part in self.parts)

    @property
    def is_even(self) -> bool:
        """A pair that was cut to the same answer twice: there is nothing to prefer."""
        return len(self.parts) == 2 and np.array_equal(self.parts[0].input_ids, self.parts[1].input_ids)

    def joined(self) -> Sample:
        if len(self.parts) == 1:
            return self.parts[0]
        ids = np.concatenate([part.input_ids for part in self.parts])
        return Sample(ids, np.concatenate([part.is_target for part in self.parts]))


def encode_example(example: AnyExample, tokenizer: ChatTokenizer, *, targets: Targets) -> Encoded:
    """Token ids and targets. Raises BadRecord when the chat template cannot express it."""
    (found,) = encode_examples([example], tokenizer, targets=targets)
    if isinstance(found, BadRecord):
        raise found
    return found


def encode_examples(
    examples: Sequence[AnyExample], tokenizer: ChatTokenizer, *, targets: Targets
) -> list[Encoded | BadRecord]:
    """Many at once, since tokenizers are faster so; a BadRecord stands where the chat template cannot express one."""
    marked: list[list[_Marked] | BadRecord] = []
    for example in examples:
        try:
            marked.append(_mark(example, tokenizer, targets))
        except BadRecord as error:
            marked.append(error)
    texts = [one.text for parts in marked if not isinstance(parts, BadRecord) for one in parts]
    tokens = iter(tokenizer.encode_many(texts))
    out: list[Encoded | BadRecord] = []
    for example, parts in zip(examples, marked, strict=True):
        if isinstance(parts, BadRecord):
            out.append(parts)
        else:
            own = [next(tokens) for _ in parts]
            try:
                samples = tuple(_sample(part, mine, tokenizer) for part, mine in zip(parts, own, strict=True))
                out.append(_finish(example, samples, tokenizer))
            except BadRecord as error:
                out.append(error)
    return out


@dataclass(frozen=True)
class _Marked:
    """A text, and the characters of it that are to be learned; None: it is a document, all of it with its frame."""

    text: str
    spans: list[Span] | None
    cuts: tuple[int, ...] = ()  # inside control tokens that were typed, and are none


def _mark(example: AnyExample, tokenizer: ChatTokenizer, targets: Targets) -> list[_Marked]:
    if isinstance(example, Text):
        return [_Marked(example.text, None)]
    if isinstance(example, Prompt):
        text, cuts = render_prompt(example.messages, example.tools, tokenizer)
        return [_Marked(text, [], cuts)]
    if isinstance(example, Example):
        return [_Marked(*mark_targets(example, tokenizer, targets=targets))]
    answers = (example.chosen, example.rejected) if isinstance(example, Preference) else ()
    talks = [_talk((*example.messages, answer), example) for answer in answers] or [_talk(example.messages, example)]
    return [_Marked(*mark_targets(talk, tokenizer, targets="last")) for talk in talks]


def _sample(marked: _Marked, tokens: Tokens, tokenizer: ChatTokenizer) -> Sample:
    if marked.spans is None:
        ids = np.asarray(frame_text(tokens.ids.tolist(), tokenizer), np.int32)
        return Sample(ids, np.ones(len(ids), bool))
    return mark_tokens(marked.text, marked.spans, tokens, tokenizer, marked.cuts)


def _finish(example: AnyExample, parts: tuple[Sample, ...], tokenizer: ChatTokenizer) -> Encoded:
    mark, margin = 0, 0.0
    if isinstance(example, Preference):
        mark, margin = len(parts[0].input_ids), example.margin
    elif isinstance(example, Labeled):
        mark = int(example.is_good)
    texts = _texts_of(example)
    num_unknown = _count_unknown(parts, texts, tokenizer)
    return Encoded(parts, mark, margin, num_unknown, any(REPLACEMENT in text for text in texts))


def frame_text(ids: list[int], tokenizer: ChatTokenizer) -> list[int]:
    """A document between the tokens that begin and end one, where the tokenizer has them and the text has not.

    One token may be both (GPT-2, SmolLM2): documents do not see each other, so the next one's would teach no end.
    """
    if tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids = [tokenizer.bos_id, *ids]
    if tokenizer.eos_id is not None and ids[-1:] != [tokenizer.eos_id]:
        ids = [*ids, tokenizer.eos_id]
    return ids


def _talk(messages: tuple[Message, ...], example: Preference | Labeled) -> Example:
    return Example(messages, example.tools, example.source, example.line)


def _texts_of(example: AnyExample) -> list[str]:
    if isinstance(example, Text):
        return [example.text]
    answers = (example.chosen, example.rejected) if isinstance(example, Preference) else ()
    return [text for message in (*example.messages, *answers) for text in (message.content, message.reasoning) if text]


def _count_unknown(parts: tuple[Sample, ...], texts: list[str], tokenizer: ChatTokenizer) -> int:
    """Unknown tokens that the text does not spell out itself."""
    unknown = tokenizer.unknown_id
    if unknown is None:
        return 0
    count = sum(int(np.count_nonzero(part.input_ids == unknown)) for part in parts)
    return max(0, count - sum(text.count(tokenizer.special_tokens["unk_token"]) for text in texts)) if count else 0


# --------------------------------------------------------------------------------------------- length


def fit_length(encoded: Encoded, max_length: int, on_long: str, example: AnyExample) -> list[Encoded]:
    """A record that is too long, cut as configured; empty when it has to be dropped."""
    if on_long == "split" and isinstance(example, Example):
        whole = hash_of(encoded.parts[0])
        cut = (part for part in split_sample(encoded.parts[0], max_length) if part.num_targets)
        return [Encoded((part,), record=whole) for part in cut]
    if on_long in ("truncate", "split") and isinstance(example, (Example, Preference, Labeled)):
        parts = tuple(Sample(part.input_ids[:max_length], part.is_target[:max_length]) for part in encoded.parts)
        mark = len(parts[0].input_ids) if isinstance(example, Preference) else encoded.mark
        return [Encoded(parts, mark, encoded.margin)]
    return []  # a prompt without its end asks nothing


def split_sample(sample: Sample, max_length: int) -> list[Sample]:
    """Parts of at most `max_length` tokens. Each begins with the last token of the one before, as its first context:
    so every target is predicted once, and none is lost at a border."""
    parts = []
    for start in range(0, max(1, len(sample.input_ids) - 1), max_length - 1):
        ids, mask = sample.input_ids[start : start + max_length], sample.is_target[start : start + max_length].copy()
        if start:
            mask[0] = False
        parts.append(Sample(ids, mask))
    return parts
