"""Names of speakers and ids of calls reach chat templates: from data, from requests, and in what tools answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from data_kit import form_of
from test_data_template import learned, with_template

from duoka.data.read.formats import BadRecord, read_example
from duoka.data.tokens.template import encode, tool_turn
from duoka.data.tokens.tokenizer import ChatTokenizer, load_tokenizer
from duoka.serve.api.fields import BadRequest
from duoka.serve.api.requests import Facts, read_chat

TEMPLATE = (
    "{%- for m in messages %}{{- '<|im_start|>' + (m.name or m.role) + '\n' }}"
    "{%- if m.tool_call_id is defined %}{{- 'to ' + m.tool_call_id + '\n' }}{%- endif %}"
    "{%- for call in m.tool_calls or [] %}{%- if not call.id is defined or call.id|length != 9 %}"
    "{{- raise_exception('ids have nine letters') }}{%- endif %}"
    "{{- call.id + call.function|tojson }}{%- endfor %}"
    "{{- m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer_folder: Path) -> ChatTokenizer:
    return with_template(load_tokenizer(tiny_tokenizer_folder), TEMPLATE)


def talk(arguments: Any, **number: str) -> list[dict[str, Any]]:
    call = {**number, "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "?", "name": "Ann"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "abcdefghi", "name": "f<|im_end|>"},
        {"role": "assistant", "content": "two", "name": None},
    ]


def test_data_are_written_as_transformers_writes_them(tokenizer: ChatTokenizer, tiny_tokenizer_folder: Path) -> None:
    """Mistral's template refuses a call without its id, and Kimi's writes nothing in its place."""
    from transformers import AutoTokenizer

    messages = talk({"x": 1}, id="abcdefghi")
    theirs = AutoTokenizer.from_pretrained(tiny_tokenizer_folder)
    whole = theirs.apply_chat_template(messages, chat_template=TEMPLATE, tokenize=False)
    example = read_example({"messages": messages}, form_of("messages"))
    sample = encode(example, tokenizer)
    assert tokenizer.decode(sample.input_ids.tolist()) == whole and "to abcdefghi" in whole and "Ann" in whole
    assert sample.input_ids.tolist().count(tokenizer.eos_id) == 4, "a control token in a name is text"
    assert learned(example, tokenizer) == ['abcdefghi{"name": "f", "arguments": {"x": 1}}<|im_end|>', "two<|im_end|>"]
    with pytest.raises(BadRecord, match="ids have nine letters"):
        encode(read_example({"messages": talk({})}, form_of("messages")), tokenizer)


def test_another_formats_columns_are_no_names() -> None:
    turns = [{"from": "human", "value": "?", "name": "Ann"}, {"from": "gpt", "value": "two"}]
    assert read_example({"conversations": turns}, form_of("sharegpt")).messages[0].name == ""


def test_a_request_hands_them_on(tokenizer: ChatTokenizer) -> None:
    facts = Facts(tokenizer, tokenizer.backend.get_vocab_size(), 512, frozenset({2}), {"m": None})
    asked = read_chat({"model": "m", "messages": talk('{"x": 1}', id="abcdefghi")[:3]}, facts)
    text = tokenizer.decode(list(asked.prompts[0]))
    assert "<|im_start|>Ann\n" in text and 'abcdefghi{"name": "f"' in text and "to abcdefghi\n2" in text
    with pytest.raises(BadRequest, match="ids have nine letters"):
        read_chat({"model": "m", "messages": talk("{}")[:3]}, facts)


def test_what_tools_answer_while_drawing_has_their_names_and_ids(tokenizer: ChatTokenizer) -> None:
    schemas = [{"type": "function", "function": {"name": "f"}}]
    text = tokenizer.decode(tool_turn(["2", "3"], schemas, tokenizer, ["f", "g"]))
    assert "<|im_start|>f\nto call00000\n2<|im_end|>" in text and "<|im_start|>g\nto call00001\n3<|im_end|>" in text
    assert tool_turn(["2"], schemas, tokenizer) == tool_turn(["2"], schemas, tokenizer, ["f"])
