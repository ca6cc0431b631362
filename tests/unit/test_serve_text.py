"""From tokens to what is sent: stop texts, calls of tools, draws that are counted."""

import json
from dataclasses import replace

import pytest
import torch

from duoka.data.tokens.templates import NAMED_TEMPLATES
from duoka.data.tokens.tokenizer import load_tokenizer
from duoka.model.sampling import Sampling, choose_token, uniform
from duoka.serve.api.requests import Facts, read_chat, read_completion
from duoka.serve.api.text import Answer
from duoka.serve.batching.scheduler import Scored
from duoka.tasks.tool_calls import split_calls


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return load_tokenizer(tiny_model)


@pytest.mark.parametrize(
    ("text", "stops", "sent"),
    [
        ("hello END of it", ("END",), "hello "),
        ("hello ENOUGH", ("END",), "hello ENOUGH"),
        ("多卡。停", ("停",), "多卡。"),
        ("aab", ("ab", "b"), "a"),
        ("abcabd", ("abd",), "abc"),
        ("nothing", (), "nothing"),
    ],
)
def test_nothing_of_a_stop_text_is_sent(tokenizer, text, stops, sent):
    answer = Answer(tokenizer, stops)
    tokens = tokenizer.encode(text)[0]
    pieces = [answer.add(Scored(token, -1.0)) for token in tokens]
    pieces.append(answer.finish())
    assert "".join(piece.text for piece in pieces) == sent == answer.text
    assert answer.is_stopped == (sent != text)
    told = [scored.token for piece in pieces for scored in piece.tokens]
    assert told == tokens[: len(told)] and answer.num_tokens == len(told), "each token goes out with its text"
    assert all(piece.text or not piece.tokens for piece in pieces[:-1]) or answer.is_stopped


@pytest.mark.parametrize(
    ("text", "said", "names"),
    [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', None, ["add"]),
        (
            'Wait. <tool_call>{"name": "a", "arguments": {}}</tool_call>'
            '<tool_call>{"name": "b", "arguments": "{}"}</tool_call>',
            "Wait.",
            ["a", "b"],
        ),
        ('{"name": "add", "parameters": {"a": 1}}', None, ["add"]),
        ("no call", "no call", []),
        # Mistral's mark is a token of its own: text is with it or without.
        ('[TOOL_CALLS] [{"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {}}]', None, ["a", "b"]),
        (' [{"name": "a", "arguments": {"x": 1}}]', None, ["a"]),
        ('Wait.[TOOL_CALLS][{"name": "a", "arguments": {}}]', "Wait.", ["a"]),
        ('[TOOL_CALLS] [{"name": "a"', '[TOOL_CALLS] [{"name": "a"', []),
        ('[{"name": "a", "arguments": {}}, {"name": 3}]', '[{"name": "a", "arguments": {}}, {"name": 3}]', []),
        ("[]", "[]", []),
        ("[1, 2]", "[1, 2]", []),
        ('<tool_call>{"name": "add", "argum', '<tool_call>{"name": "add", "argum', []),
        ("<tool_call>{not json}</tool_call>", "<tool_call>{not json}</tool_call>", []),
    ],
)
def test_calls_of_tools_are_told_from_text(text, said, names):
    found, calls = split_calls(text)
    assert found == said and [call["function"]["name"] for call in calls] == names
    assert all(isinstance(call["function"]["arguments"], str) and call["id"] for call in calls)


WEATHER, TIME = ("get_weather", {"city": "Rom {1}"}), ("get", {})
NAMED = [
    # As Mistral's templates since 2025 write calls, with their marks and as text without special tokens has them.
    ('[TOOL_CALLS]get_weather[ARGS]{"city": "Rom {1}"}', None, [WEATHER]),
    ('[TOOL_CALLS]get_weather[CALL_ID]abc123XYZ[ARGS]{"city": "Rom {1}"}', None, [WEATHER]),
    ('Wait.[TOOL_CALLS]get_weather[ARGS]{"city": "Rom {1}"}[TOOL_CALLS]get[ARGS]{}', "Wait.", [WEATHER, TIME]),
    ('[TOOL_CALLS]other_tool[ARGS]{}', None, [("other_tool", {})]),
    ('get_weather{"city": "Rom {1}"}', None, [WEATHER]),
    ('get_weatherabc123XYZ{"city": "Rom {1}"}', None, [WEATHER]),
    ('I look.get_weather{"city": "Rom {1}"}get{}', "I look.", [WEATHER, TIME]),
    # No calls: cut, no object, no tool of that name, or more text behind it.
    ('[TOOL_CALLS]get_weather[ARGS]{"city": "Ro', '[TOOL_CALLS]get_weather[ARGS]{"city": "Ro', []),
    ("get_weather[1]", "get_weather[1]", []),
    ('other_tool{"city": 1}', 'other_tool{"city": 1}', []),
    ("In C, get{} is no call.", "In C, get{} is no call.", []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said", "wanted"), NAMED)
def test_calls_by_name_are_told_from_text(text, said, wanted):
    found, calls = split_calls(text, ("get", "get_weather", ""))
    assert found == said
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls] == wanted


def test_counted_draws_follow_the_probabilities():
    chances = torch.tensor([0.1, 0.2, 0.3, 0.4])
    counts = [0] * 4
    for position in range(4000):
        counts[choose_token(chances.log(), Sampling(1.0, seed=9), position)] += 1
    for count, chance in zip(counts, chances.tolist(), strict=True):
        assert count / 4000 == pytest.approx(chance, abs=4 * (chance * (1 - chance) / 4000) ** 0.5)
    assert uniform(1, 0, 5) == uniform(1, 0, 5) != uniform(1, 1, 5)


def test_a_share_of_nothing_is_the_likeliest_token_alone(tokenizer):
    facts = Facts(tokenizer, 1000, 1000, frozenset(), {"m": None})
    sampling = read_completion({"model": "m", "prompt": "a", "top_p": 0}, facts).sampling
    logits = torch.tensor([0.1, 0.3, 0.2])
    assert {choose_token(logits, replace(sampling, seed=seed), 0) for seed in range(40)} == {1}


def test_small_shares_are_left_out():
    logits = torch.log(torch.tensor([0.05, 0.5, 0.15, 0.3]))
    drawn = {name: {choose_token(logits, sampling, at) for at in range(300)} for name, sampling in (
        ("k", Sampling(1.0, top_k=2)), ("min", Sampling(1.0, min_p=0.35)), ("all", Sampling(1.0)),
    )}  # fmt: skip
    assert drawn == {"k": {1, 3}, "min": {1, 3}, "all": {0, 1, 2, 3}}


def test_top_p_is_a_share_of_what_top_k_kept_as_in_transformers():
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    logits = torch.log(torch.tensor([[0.1, 0.3, 0.2, 0.15, 0.14, 0.11]]))
    for top_k, top_p in ((2, 0.5), (3, 0.6), (4, 0.9), (2, 1.0), (6, 0.55)):
        theirs = TopPLogitsWarper(top_p)(None, TopKLogitsWarper(top_k)(None, logits))[0]
        drawn = {choose_token(logits[0], Sampling(1.0, top_p, top_k=top_k), at) for at in range(400)}
        assert drawn == set(theirs.isfinite().nonzero().flatten().tolist()), (top_k, top_p)


def test_a_large_vocabulary_is_cut_as_a_small_one_is():
    numbers = torch.Generator().manual_seed(0)
    logits = torch.randn(9000, generator=numbers) * 0.1  # nearly even: thousands are needed for a share of 0.9
    chances = logits.double().softmax(0).sort(descending=True)
    kept = set(chances.indices[: int((chances.values.cumsum(0) < 0.9).sum()) + 1].tolist())
    drawn = {choose_token(logits, Sampling(1.0, 0.9), at) for at in range(300)}
    assert drawn <= kept and len(drawn) > 200


KEEPS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_what_was_thought_earlier_is_handed_to_a_template_that_knows_it(tokenizer, key):
    def prompt_of(template):
        told = replace(tokenizer, template=template, tool_template=template)
        facts = Facts(told, 1000, 1000, frozenset(), {"m": None})
        answer = {"role": "assistant", "content": "two", key: "1 + 1", "refusal": None}
        turns = [{"role": "user", "content": "q"}, answer, {"role": "user", "content": "r"}]
        (prompt,) = read_chat({"model": "m", "messages": turns}, facts).prompts
        return tokenizer.decode(list(prompt))

    assert "<think>1 + 1</think>two<|im_end|>" in prompt_of(KEEPS)
    plain = prompt_of(NAMED_TEMPLATES["chatml"])
    assert "two<|im_end|>" in plain and "1 + 1" not in plain
