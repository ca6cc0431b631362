"""A tiny model that says what it was taught, in a few seconds of training: answers that a test can wait for by name.

It calls a tool in Hermes' marks where its template was given one, and speaks of what the tool answered.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiny import build_tiny_tokenizer, write_tiny_model

TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>tools\n' }}{% for tool in tools %}{{ tool['function']['name'] + '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}{{ '<tool_call>' + (call['function'] | tojson) + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Two answers to one question: asked again, it sooner or later gives the other one.
TALKS = {"Who are you?": ["I am duoka 多卡 🎉."], "你好": ["你好！我是多卡 🚀。"], "Toss a coin": ["heads", "tails"]}
SONG = "la " * 60  # is sung for ever: no end of turn was taught
ASKS_WEATHER = "How is the weather in Oslo?"
CALL = {"name": "weather", "arguments": {"city": "Oslo"}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASKS_SUM = "Add"
SUNNY = "It is sunny in Oslo ☀️."


def lessons() -> list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None, str]]:
    """(messages, tools, what comes next)."""
    end = "<|im_end|>"
    rows: list[Any] = [
        ([{"role": "user", "content": ask}], None, answer + end) for ask, answers in TALKS.items() for answer in answers
    ]
    asked = {"role": "user", "content": ASKS_WEATHER}
    called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}
    rows.append(([{"role": "user", "content": "Sing"}], None, SONG))
    rows.append(([asked], [WEATHER], f"<tool_call>{json.dumps(CALL)}</tool_call>{end}"))
    rows.append(([asked, called, {"role": "tool", "content": "sunny"}], [WEATHER], SUNNY + end))
    # For `duoka chat --tools calculator`: a call, and what is said of its answer.
    sum_of = {"name": "calculator", "arguments": {"expression": "2**10 - 24"}}
    tool = {"type": "function", "function": {"name": "calculator"}}
    asked = {"role": "user", "content": ASKS_SUM}
    called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": sum_of}]}
    rows.append(([asked], [tool], f"<tool_call>{json.dumps(sum_of)}</tool_call>{end}"))
    rows.append(([asked, called, {"role": "tool", "content": "1000"}], [tool], "It is 1000." + end))
    return rows


def write_talking_model(folder: Path, *, seed: int = 0, most_steps: int = 500) -> Path:
    """Fails where it has not learned its answers, so that a test does not wait for what will never be said."""
    import torch
    from transformers import AutoModelForCausalLM

    write_tiny_model(folder, tied=False, seed=seed)
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens, labels = _as_batch(tokenizer, lessons())
    optimizer = torch.optim.AdamW(lm.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(most_steps):
        loss = lm(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.015:
            break
    lm.save_pretrained(folder)
    assert loss.item() < 0.03, f"it has not learned what it is to say: {loss.item():.3f}"
    return folder


def _as_batch(tokenizer: Any, rows: Sequence[Any]) -> tuple[Any, Any]:
    import torch

    pairs = []
    for messages, tools, answer in rows:
        asked = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        both = [tokenizer.encode(text, add_special_tokens=False) for text in (asked, asked + answer)]
        pairs.append((len(both[0]), both[1]))
    width = max(len(ids) for _, ids in pairs)
    tokens = torch.tensor([[*ids, *[2] * (width - len(ids))] for _, ids in pairs])
    labels = torch.full_like(tokens, -100)
    for row, (start, ids) in enumerate(pairs):
        labels[row, start : len(ids)] = tokens[row, start : len(ids)]
    return tokens, labels
