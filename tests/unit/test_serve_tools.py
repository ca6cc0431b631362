"""Tools in requests: what of them is refused in words, and what of an answer beside them goes out as it is written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from talking import TEMPLATE, WEATHER

from duoka.data.tokens.tokenizer import ChatTokenizer, load_tokenizer
from duoka.serve.api.answers import Reply
from duoka.serve.api.fields import BadRequest
from duoka.serve.api.requests import Facts, read_chat
from duoka.serve.batching.scheduler import Done, Job, Scored

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
ASK = {"role": "user", "content": "How is the weather?"}
# As Command R's and others': what a tool takes is written item by item.
NEEDS_PARAMETERS = "{% for tool in tools or [] %}{{ tool['function'].parameters.properties }}{% endfor %}" + TEMPLATE
WALKS = "{% for tool in tools or [] %}{% for one in tool['function'].parameters %}{{ one }}{% endfor %}{% endfor %}"
WRITES_ITEMS = "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.name }}" + (
    "{% for name, value in call.function.arguments | items %}{{ name }}{% endfor %}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> ChatTokenizer:
    return with_template(load_tokenizer(tiny_model), TEMPLATE)


def with_template(tokenizer: ChatTokenizer, template: str) -> ChatTokenizer:
    return replace(tokenizer, template=template, tool_template=template)


def ask(tokenizer: ChatTokenizer, *more: dict[str, Any], **fields: Any) -> Any:
    facts = Facts(tokenizer, 264, 1024, frozenset(), {"m": None})
    return read_chat({"model": "m", "messages": [ASK, *more], **fields}, facts)


def refusal(tokenizer: ChatTokenizer, *more: dict[str, Any], **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as refused:
        ask(tokenizer, *more, **fields)
    return refused.value


@pytest.mark.parametrize("name", [None, 5, "", ["f"]])
def test_a_call_of_no_name_is_refused_and_no_fault_of_the_server(tokenizer: ChatTokenizer, name: object) -> None:
    call = {"id": "a", "type": "function", "function": {"name": name, "arguments": "{}"}}
    error = refusal(tokenizer, {"role": "assistant", "tool_calls": [call]})
    assert error.param == "messages[1].tool_calls" and "name" in error.message
    assert refusal(tokenizer, tools=[{"type": "function", "function": {"name": name}}]).param == "tools"


@pytest.mark.parametrize(
    ("template", "function"),
    [(NEEDS_PARAMETERS, {"name": "f"}), (WALKS + TEMPLATE, {"name": "f", "parameters": 5})],
)
def test_a_tool_that_a_template_cannot_write_is_not_blamed_on_the_template(
    tokenizer: ChatTokenizer, template: str, function: dict
) -> None:
    picky = with_template(tokenizer, template)
    assert ask(picky, tools=[WEATHER]).tools == ("weather",)
    error = refusal(picky, tools=[WEATHER, {"type": "function", "function": function}])
    assert error.param == "tools" and "knows no tools" not in error.message and "parameters" in error.message


def test_arguments_that_are_no_object_are_refused(tokenizer: ChatTokenizer) -> None:
    """Templates walk them by name, and break."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "[1]"}}
    error = refusal(with_template(tokenizer, WRITES_ITEMS), {"role": "assistant", "tool_calls": [call]})
    assert error.param == "messages[1].tool_calls" and "object" in error.message


class Says:
    """In the scheduler's place: answers with a text, a token of it at a time."""

    def __init__(self, tokenizer: ChatTokenizer, text: str) -> None:
        self.tokens = tokenizer.encode(text)[0]

    def submit(self, jobs: list[Job]) -> None:
        for job in jobs:
            for token in self.tokens:
                job.events.put(Scored(token, None))
            job.events.put(Done("stop"))


@pytest.mark.parametrize(
    ("text", "said", "num_calls"),
    [
        ("It is sunny in Oslo ☀️.", "It is sunny in Oslo ☀️.", 0),
        ("Let me look. " + CALL, "Let me look.", 1),
        (CALL, None, 1),
        (CALL + "\n" + CALL, None, 2),
        ("A tag: <tool_call> is one.", "A tag: <tool_call> is one.", 0),
        ("The weather is what weather{ is", "The weather is what weather{ is", 0),
        ("Look. " + CALL + " Done.", "Look.  Done.", 1),
        ('[1] is no {"name"', '[1] is no {"name"', 0),
        ("  ", "  ", 0),
    ],
)
def test_what_is_said_beside_tools_goes_out_as_it_is_written(
    tokenizer: ChatTokenizer, text: str, said: str | None, num_calls: int
) -> None:
    def reply(**fields: Any) -> Reply:
        asked = ask(tokenizer, tools=[WEATHER], **fields)
        return Reply(asked, Says(tokenizer, text), tokenizer, lambda: False)  # type: ignore[arg-type]

    whole = reply().whole()["choices"][0]
    assert whole["message"]["content"] == said and len(whole["message"].get("tool_calls", [])) == num_calls
    parts = [frame["choices"][0] for frame in reply(stream=True).stream()]
    contents = [part["delta"]["content"] for part in parts if part["delta"].get("content")]
    assert "".join(contents).strip() == (said or "").strip()
    calls = [call for part in parts for call in part["delta"].get("tool_calls", [])]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"city": "Oslo"}] * num_calls
    assert parts[-1]["finish_reason"] == whole["finish_reason"] == ("tool_calls" if num_calls else "stop")
    if text.startswith(("It is", "Let me")):
        assert len(contents) > 8, "all of it came at the end of the answer"
