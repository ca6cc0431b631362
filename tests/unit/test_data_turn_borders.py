"""Where a turn of the assistant begins and ends, of templates that open a thought in a prompt or write no end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_data_template import example, learned, with_template

from duoka.data.read.example import BadRecord, Example, Message
from duoka.data.tokens.template import encode
from duoka.data.tokens.tokenizer import ChatTokenizer, load_tokenizer
from duoka.data.tokens.turn_borders import thought_notes

# As DeepSeek-R1's: a prompt opens the thought, and answers are written without one, or with the data's cut off.
OPENED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# As Nemotron's: an answer without a thought has an empty one, which its prompt opens otherwise.
CLOSED = OPENED.replace("\n{{ m.content", "\n{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content")
# As Qwen 3.5's: prompts hold an empty thought, the last answer too, earlier ones none.
EMPTY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>"
    "\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)
# As GLM's: a turn ends where the token of the next one stands.
UNENDED = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# As Qwen 3's and 3.5's: behind the last question each turn has its thought, empty or not, and before it none.
DROPS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and "
    "loop.index0 > ns.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = example(("user", "one"), ("assistant", "uno"), ("user", "two"), ("assistant", "<b>dos"))


@pytest.fixture(scope="module")
def tiny(tiny_tokenizer_folder: Path) -> ChatTokenizer:
    return load_tokenizer(tiny_tokenizer_folder)


@pytest.fixture(scope="module")
def glm(tiny: ChatTokenizer) -> ChatTokenizer:
    """With a token for each role, and another end token, as GLM's tokenizer has them."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(tiny.backend.to_str())
    backend.add_special_tokens(["<|user|>", "<|assistant|>", "<|tool|>"])
    return replace(with_template(tiny, UNENDED), backend=backend)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (OPENED, ["uno<|im_end|>", "<b>dos<|im_end|>"]),
        (CLOSED, ["</think>uno<|im_end|>", "</think><b>dos<|im_end|>"]),
        (EMPTY, ["uno<|im_end|>", "<b>dos<|im_end|>"]),
    ],
    ids=["opened", "closed", "empty"],
)
def test_answers_without_the_thought_that_a_prompt_opens_are_learned(
    tiny: ChatTokenizer, template: str, expected: list[str]
) -> None:
    assert learned(TALK, with_template(tiny, template)) == expected


def test_a_thought_that_answers_of_data_lack_is_said(tiny: ChatTokenizer) -> None:
    (note,) = thought_notes(with_template(tiny, OPENED))
    assert "begins each answer with <think>" in note
    assert not any(thought_notes(with_template(tiny, template)) for template in (CLOSED, EMPTY, tiny.template))


def test_a_thought_that_the_template_cuts_off_is_refused(tiny: ChatTokenizer) -> None:
    with pytest.raises(BadRecord, match="leaves the answer of message 2 out"):
        encode(example(("user", "one"), ("assistant", "<think>\nhm\n</think>\n\nuno")), with_template(tiny, OPENED))


def test_a_turn_without_an_end_is_ended_by_the_token_of_the_next(glm: ChatTokenizer) -> None:
    assert learned(TALK, glm) == ["uno<|user|>", "<b>dos<|user|>"]
    assert learned(TALK, glm, "last") == ["<b>dos<|user|>"]


def test_an_end_of_a_turn_that_is_no_special_token_stays_the_end(glm: ChatTokenizer) -> None:
    template = UNENDED.replace("{{ m.content }}", "{{ m.content }}<end>")
    assert learned(TALK, with_template(glm, template)) == ["uno<end>", "<b>dos<end>"]


def test_an_answer_with_reasoning_that_only_the_last_turn_has_is_ended(glm: ChatTokenizer) -> None:
    thought = "{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    template = UNENDED.replace("{{ m.content }}", thought + "{{ m.content }}")
    turns = (Message("user", "q"), Message("assistant", "a", reasoning="hm"))
    assert learned(Example(turns), with_template(glm, template)) == ["<think>hm</think>a<|user|>"]


def test_a_call_is_ended_by_the_token_of_what_the_tool_answers(glm: ChatTokenizer) -> None:
    calls = "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}{% endfor %}"
    template = UNENDED.replace("{% endfor %}", calls)
    call = Message("assistant", "", json.dumps([{"name": "search", "arguments": {}}]))
    talk = Example((Message("user", "q"), call, Message("tool", "r"), Message("assistant", "a")))
    assert learned(talk, with_template(glm, template)) == ["search<|tool|>", "a<|user|>"]


@pytest.mark.parametrize("opens", ["", "<think>\n", "<think>\n\n</think>\n\n"])
@pytest.mark.parametrize("words", ["", "let me"])
def test_turns_whose_thoughts_later_questions_drop_are_learned(tiny: ChatTokenizer, words: str, opens: str) -> None:
    """Within one question's calls a prompt has thoughts of turns before it, which the whole conversation has not."""
    calls = json.dumps([{"name": "search", "arguments": {}}])
    turns = (
        Message("user", "q"), Message("assistant", words, calls, reasoning="hm"), Message("tool", "r"),
        Message("assistant", "a", reasoning="so"), Message("user", "p"), Message("assistant", "b", reasoning="ah"),
    )  # fmt: skip
    template = DROPS.replace("assistant\n{% endif %}", "assistant\n" + opens + "{% endif %}")
    call = words + '<call>{"name": "search", "arguments": {}}</call><|im_end|>'
    # Of a prompt with an empty thought the mark alone is in common with a turn that has a real one.
    last = {"": "<think>\nah\n</think>\n\nb", "<think>\n": "ah\n</think>\n\nb"}.get(opens, "\nah\n</think>\n\nb")
    assert learned(Example(turns), with_template(tiny, template)) == [call, "a<|im_end|>", last + "<|im_end|>"]


def test_a_call_of_the_same_name_that_the_template_drops_is_refused(tiny: ChatTokenizer) -> None:
    """As of gpt-oss, which writes the first of a turn's calls alone."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}"
        "{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    calls = json.dumps([{"name": "search", "arguments": {"x": number}} for number in (1, 2)])
    turns = (Message("user", "q"), Message("assistant", "", calls), Message("tool", "r"), Message("assistant", "a"))
    with pytest.raises(BadRecord, match="leaves the tool call 'search' of message 2 out"):
        encode(Example(turns), with_template(tiny, template))


def test_learning_the_last_turn_alone_is_no_advice_where_that_one_cannot_be_told(tiny: ChatTokenizer) -> None:
    shifty = with_template(tiny, "{{ messages | length }}: " + DROPS)
    advice = "set data.targets: last, or "
    for talk, helps in ((TALK, True), (example(("user", "one"), ("assistant", "uno")), False)):
        with pytest.raises(BadRecord, match="in another way once more follows") as caught:
            encode(talk, shifty)
        assert (advice in caught.value.fix) is helps and "model.template" in caught.value.fix
