"""OpenAI's own Python client, unchanged, against the server: what its types and helpers make of our answers.

Other projects' clients: tests/web/test_clients.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from serving import KEY, address_of, kept_busy, serving
from talking import ASKS_WEATHER, SONG, SUNNY, WEATHER, write_talking_model

from duoka.serve.api.server import Server

openai = pytest.importorskip("openai", reason="make setup installs it")
DUOKA = "I am duoka 多卡 🎉."
ASK = [{"role": "user", "content": "Who are you?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(write_talking_model(tmp_path_factory.mktemp("model") / "talking")) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address_of(server)}/v1", api_key=KEY, max_retries=0, timeout=60) as made:
        yield made


def test_chats_whole_and_in_pieces(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="talking", messages=ASK, temperature=0)
    (choice,) = whole.choices
    assert (choice.message.content, choice.finish_reason, choice.message.tool_calls) == (DUOKA, "stop", None)
    pieces = list(
        client.chat.completions.create(
            model="talking", messages=ASK, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(one.choices[0].delta.content or "" for one in pieces[:-1]) == DUOKA
    assert pieces[-1].choices == [] and pieces[-1].usage == whole.usage
    assert pieces[-2].choices[0].finish_reason == "stop" and pieces[0].choices[0].delta.role == "assistant"


def test_its_stream_helper_puts_pieces_together(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="talking", messages=ASK, temperature=0) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_completion().choices[0].message.content == DUOKA
    assert {"chunk", "content.delta", "content.done"} <= set(kinds)


def test_completions_with_a_stop_and_log_probabilities(client: openai.OpenAI) -> None:
    prompt = "<|im_start|>user\nSing<|im_end|>\n<|im_start|>assistant\n"
    answer = client.completions.create(model="talking", prompt=prompt, max_tokens=30, temperature=0, logprobs=2)
    (choice,) = answer.choices
    assert choice.text == SONG[:30] and choice.finish_reason == "length" and answer.usage.completion_tokens == 30
    assert choice.logprobs is not None and len(choice.logprobs.token_logprobs) == 30
    assert "".join(choice.logprobs.tokens) == SONG[:30] and max(choice.logprobs.token_logprobs) <= 0
    pieces = client.completions.create(
        model="talking", prompt=prompt, max_tokens=30, temperature=0, stop=["a la la"], stream=True
    )
    assert "".join(one.choices[0].text for one in pieces) == "l"


def test_log_probabilities_of_a_chat_are_typed(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="talking", messages=ASK, temperature=0, logprobs=True, top_logprobs=3, n=2
    )
    for choice in answer.choices:
        content = choice.logprobs.content
        assert bytes(b for one in content for b in one.bytes).startswith(b"I am duoka")
        assert all(len(one.top_logprobs) == 3 and one.top_logprobs[0].logprob == one.logprob for one in content)


def test_a_tool_is_called_and_its_answer_spoken_of(client: openai.OpenAI) -> None:
    asked = [{"role": "user", "content": ASKS_WEATHER}]
    first = client.chat.completions.create(model="talking", messages=asked, tools=[WEATHER], temperature=0)
    (choice,) = first.choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
    told = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    second = client.chat.completions.create(
        model="talking", messages=[*asked, choice.message, told], tools=[WEATHER], temperature=0
    )
    assert second.choices[0].message.content == SUNNY
    with client.chat.completions.stream(model="talking", messages=asked, tools=[WEATHER], temperature=0) as stream:
        final = stream.get_final_completion()
    (again,) = final.choices[0].message.tool_calls
    assert final.choices[0].finish_reason == "tool_calls" and again.function.name == "weather"
    assert json.loads(again.function.arguments) == {"city": "Oslo"}


def test_a_call_without_arguments_may_have_none(client: openai.OpenAI) -> None:
    def prompt_tokens(arguments: str) -> int:
        call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        said = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": "sunny"}]
        asked = [{"role": "user", "content": ASKS_WEATHER}, *said]
        answer = client.chat.completions.create(model="talking", messages=asked, tools=[WEATHER], max_tokens=1)
        return answer.usage.prompt_tokens

    assert prompt_tokens("") == prompt_tokens("{}")


def test_vectors_are_the_same_as_base64_and_as_numbers(client: openai.OpenAI) -> None:
    usual = client.embeddings.create(model="talking", input=["多卡", "b"])
    plain = client.embeddings.create(model="talking", input=["多卡", "b"], encoding_format="float")
    assert [one.index for one in usual.data] == [0, 1] and len(usual.data[0].embedding) == 64
    for one, other in zip(usual.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, rel=1e-6)


def test_refusals_are_the_errors_that_its_users_catch(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="talking", messages=ASK, response_format={"type": "json_object"})
    assert bad.value.param == "response_format"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=ASK)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with kept_busy(server), pytest.raises(openai.RateLimitError):
        client.completions.create(model="talking", prompt="a", n=8)
    with pytest.raises(openai.BadRequestError, match="at most 8 may wait"):
        client.completions.create(model="talking", prompt="a", n=9)
    assert [one.id for one in client.models.list()] == ["talking"]
