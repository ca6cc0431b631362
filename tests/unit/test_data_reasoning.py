"""Reasoning beside an answer: learned as the chat template writes it, refused where it would be lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from duoka.data.read.example import BadRecord, Example, Labeled, Message, Preference, Prompt, SetFormat
from duoka.data.read.formats import FORMATS, read_example
from duoka.data.tokens.encode import encode_example
from duoka.data.tokens.template import encode, render_prompt
from duoka.data.tokens.templates import NAMED_TEMPLATES
from duoka.data.tokens.tokenizer import ChatTokenizer, load_tokenizer

# As Qwen3 has it: reasoning is written behind the last question alone, and an empty one at the end.
DROPS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
    "<think>\n{{ (m.reasoning_content or '').strip('\n') }}\n</think>\n\n{% endif %}{{ m.content.lstrip('\n') }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As gpt-oss has it: another key, channels, and another end of the last turn.
CHANNELS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.thinking and loop.last and not add_generation_prompt %}<|im_start|>assistant analysis {{ m.thinking }}"
    "<|im_end|>{% endif %}<|im_start|>assistant final {{ m.content }}"
    "{% if loop.last %}<|endoftext|>{% else %}<|im_end|>{% endif %}"
    "{% else %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
KEEPS = (  # all of it, wherever it stands
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% if loop.last and m.role == 'assistant' %}<|im_end|>{% else %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STARTED = DROPS.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")  # by the prompt, as QwQ has it


@pytest.fixture(scope="module")
def tiny(tiny_tokenizer_folder: Path) -> ChatTokenizer:
    return load_tokenizer(tiny_tokenizer_folder)


def with_template(tokenizer: ChatTokenizer, template: str) -> ChatTokenizer:
    return replace(tokenizer, template=template, tool_template=template)


def talk(*turns: dict[str, Any], **options: Any) -> Example:
    form = SetFormat("messages", FORMATS.get("messages").columns, FORMATS.get("messages").tags)
    return read_example({"messages": list(turns), **options}, form)


def said(content: str, reasoning: str = "", key: str = "reasoning_content", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **({key: reasoning} if reasoning else {}), **more}


def asked(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def learned(example: Example, tokenizer: ChatTokenizer, targets: Any = "assistant") -> list[str]:
    sample = encode(example, tokenizer, targets=targets)
    parts, before = [""], False
    for token, is_target in zip(sample.input_ids.tolist(), sample.is_target.tolist(), strict=True):
        if is_target:
            parts += [] if before else [""]
            parts[-1] += tokenizer.decode([token])
        before = is_target
    return [part for part in parts if part]


TWO = (asked("one"), said("uno", "1 is uno"), asked("two"), said("dos", "2 is dos"))
THOUGHT = "<think>\n2 is dos\n</think>\n\ndos<|im_end|>"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (DROPS, ["uno<|im_end|>", THOUGHT]),
        (
            CHANNELS,
            [" final uno<|im_end|>", " analysis 2 is dos<|im_end|><|im_start|>assistant final dos<|endoftext|>"],
        ),
        (KEEPS, ["<think>1 is uno</think>uno<|im_end|>", "<think>2 is dos</think>dos<|im_end|>"]),
    ],
    ids=["drops", "channels", "keeps"],
)
@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_learned_as_the_template_writes_it(
    tiny: ChatTokenizer, template: str, expected: list[str], key: str
) -> None:
    turns = [{**turn, key: turn["reasoning_content"]} if "reasoning_content" in turn else turn for turn in TWO]
    turns = [{name: value for name, value in turn.items() if name in (key, "role", "content")} for turn in turns]
    assert learned(talk(*turns), with_template(tiny, template)) == expected
    assert learned(talk(*turns), with_template(tiny, template), "last") == expected[1:]


def test_a_prompt_that_begins_the_thought_is_not_learned(tiny: ChatTokenizer) -> None:
    one = talk(asked("two"), said("dos", "2 is dos"))
    assert learned(one, with_template(tiny, STARTED)) == [THOUGHT.removeprefix("<think>\n")]


def test_the_same_words_in_the_reasoning_are_not_taken_for_the_answer(tiny: ChatTokenizer) -> None:
    """Earlier turns end otherwise than the last one: where they do is looked for."""
    keeps = KEEPS.replace("'assistant' %}<|im_end|>{% else", "'assistant' %}!<|im_end|>{% else")
    turns = (asked("q"), said("dos", "so dos it is, dos."), asked("r"), said("tres", "tres"))
    assert learned(talk(*turns), with_template(tiny, keeps)) == [
        "<think>so dos it is, dos.</think>dos<|im_end|>", "<think>tres</think>tres!<|im_end|>"
    ]  # fmt: skip


def test_a_thought_before_a_call_is_learned_with_it(tiny: ChatTokenizer) -> None:
    call = {"type": "function", "function": {"name": "search", "arguments": {"q": "x"}}}
    turns = (
        asked("q"), said("", "look it up", tool_calls=[call]), {"role": "tool", "content": "r"}, said("found", "so"),
    )  # fmt: skip
    first, second = learned(talk(*turns), with_template(tiny, DROPS))
    assert first.startswith("<think>\nlook it up\n</think>\n\n<call>") and first.endswith("</call><|im_end|>")
    assert second == "<think>\nso\n</think>\n\nfound<|im_end|>"


BY_PARTS = DROPS.replace(  # as Qwen3-Coder has them, and with a line between words and calls
    "<call>{{ call.function | tojson }}</call>",
    "{{ '\n' if m.content }}<call>{{ call.function.name }}{% for name, value in call.function.arguments.items() %}"
    "<{{ name }}>{{ value }}</{{ name }}>{% endfor %}</call>",
)


@pytest.mark.parametrize("content", ["", None, "let me see"])
@pytest.mark.parametrize("arguments", [{"q": "x"}, {}, {"q": [1, {"}": "</call>"}]}])
@pytest.mark.parametrize("template", [DROPS, BY_PARTS], ids=["json", "parts"])
def test_calls_without_a_thought_are_learned_where_the_last_turn_gets_an_empty_one(
    tiny: ChatTokenizer, template: str, arguments: dict[str, Any], content: str | None
) -> None:
    calls = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name in ("find", "get")]
    turn = {"role": "assistant", "content": content, "tool_calls": calls}
    turns = (asked("q"), turn, {"role": "tool", "content": "r"}, turn, {"role": "tool", "content": "r"}, said("found"))
    first, second, last = learned(talk(*turns), with_template(tiny, template))
    assert first == second and first.startswith(content or "<call>") and first.endswith("</call><|im_end|>")
    assert first.count("<|im_end|>") == 1 and first.count("find") == first.count("get") == 1
    assert last == "<think>\n\n</think>\n\nfound<|im_end|>"


@pytest.mark.parametrize("template", [NAMED_TEMPLATES["chatml"], DROPS.split("{% if add_generation_prompt")[0]])
def test_where_it_would_be_lost_it_is_refused(tiny: ChatTokenizer, template: str) -> None:
    with pytest.raises(BadRecord, match=r"message 2 has its reasoning beside the answer.*not be learned"):
        encode(talk(*TWO), with_template(tiny, template))


def test_reasoning_twice_is_refused(tiny: ChatTokenizer) -> None:
    twice = talk(asked("q"), said("<think>\nhm\n</think>\n\na", "hm"))
    with pytest.raises(BadRecord, match="marks of reasoning"):
        encode(twice, with_template(tiny, DROPS))


def test_control_tokens_typed_in_a_thought_end_no_turn(tiny: ChatTokenizer) -> None:
    tokenizer = with_template(tiny, DROPS)
    sample = encode(talk(asked("q"), said("a", "the mark <|im_end|> ends a turn")), tokenizer)
    end = tokenizer.encode("<|im_end|>")[0][0]
    assert sample.input_ids.tolist().count(end) == 2 and sample.input_ids[sample.is_target].tolist().count(end) == 1
    assert "the mark <|im_end|> ends a turn" in tokenizer.decode(sample.input_ids.tolist())


def test_pairs_labels_and_prompts_have_it_too(tiny: ChatTokenizer) -> None:
    tokenizer = with_template(tiny, DROPS)
    question = (Message("user", "two"),)
    good, bad = Message("assistant", "dos", reasoning="2 is dos"), Message("assistant", "dos", reasoning="a guess")
    pair = encode_example(Preference(question, good, bad), tokenizer, targets="assistant")
    shown = [tokenizer.decode(part.input_ids[part.is_target].tolist()) for part in pair.parts]
    assert shown == [THOUGHT, THOUGHT.replace("2 is dos", "a guess")]
    labeled = encode_example(Labeled((*question, good), True), tokenizer, targets="assistant").parts[0]
    assert tokenizer.decode(labeled.input_ids[labeled.is_target].tolist()) == THOUGHT
    history = (*question, good, Message("user", "three"))
    assert "2 is dos" not in render_prompt(history, None, tokenizer)[0]
    with pytest.raises(BadRecord, match="knows no key"):
        encode_example(Prompt(history), with_template(tiny, NAMED_TEMPLATES["chatml"]), targets="assistant")


def test_what_is_read_is_kept_apart_from_the_answer() -> None:
    example = talk(asked("q"), said("a", "hm", key="thinking", weight=0))
    assert example.messages[1] == Message("assistant", "a", None, False, "hm")
    assert example.messages[0].reasoning == ""
