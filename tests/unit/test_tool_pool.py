"""Tools of a run: functions are told by their annotations and docstrings, killed at a deadline, and never raise."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from talking import TEMPLATE
from tiny import build_tiny_tokenizer

from duoka.data.read.example import BadRecord
from duoka.data.tokens.template import tool_turn
from duoka.data.tokens.tokenizer import load_tokenizer
from duoka.errors import ConfigError
from duoka.tasks.tool_pool import ToolPool

FILE = '''
import time

def search(query: str, most: int = 3, exact: bool = False) -> list:
    """Finds pages.

    The whole index is read.

    Args:
        query: what is searched
        most (int): how many are given
    """
    return [query] * most

def broken(what):
    raise KeyError("no such thing")

def slow() -> str:
    time.sleep(60)

def long() -> str:
    return "x" * 9000

def odd(*parts):
    return "?"

def dies():
    import os
    os._exit(3)
'''


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ToolPool]:
    (tmp_path / "mine.py").write_text(FILE, encoding="utf-8")
    names = ["calculator", *(f"mine.py:{name}" for name in ("search", "broken", "slow", "long", "dies"))]
    made = ToolPool(names, tmp_path, deadline_s=1.0, num_workers=2)
    yield made
    made.close()


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": json.dumps(arguments)}}


def test_a_function_is_told_by_its_annotations_and_docstring(pool: ToolPool) -> None:
    calculator, search, broken, *_ = (one["function"] for one in pool.schemas)
    assert calculator["name"] == "calculator"
    assert search["description"] == "Finds pages. The whole index is read."
    assert search["parameters"]["required"] == ["query"]
    assert search["parameters"]["properties"] == {
        "query": {"type": "string", "description": "what is searched"},
        "most": {"type": "integer", "description": "how many are given"},
        "exact": {"type": "boolean"},
    }
    assert broken["parameters"]["properties"] == {"what": {}}


def test_calls_are_answered_in_order_and_what_went_wrong_is_an_answer(pool: ToolPool) -> None:
    began = time.monotonic()
    said = pool.answer([
        call("search", {"query": "鸭", "most": 2}), call("broken", {"what": 1}), call("slow", {}),
        call("calculator", {"expression": "2**10"}), call("long", {}), call("dies", {}), call("search", {"q": 1}),
        call("nobody", {}), call("search", "plain"), call("search", {"query": "again"}),
    ])  # fmt: skip
    assert said[0] == '["鸭", "鸭"]' and said[1] == "error: KeyError: 'no such thing'" and said[3] == "1024"
    assert said[2] == "error: no answer within 1 s" and said[4] == "x" * 4000
    assert said[5].startswith("error: its process ended (3)") and "missing a required argument" in said[6]
    assert said[7].startswith("error: there is no tool nobody; there is calculator, search")
    assert said[8] == "error: search needs its arguments as an object" and said[9] == '["again", "again", "again"]'
    assert time.monotonic() - began < 30


def test_a_function_without_named_arguments_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE, encoding="utf-8")
    pool = ToolPool(["mine.py:odd"], tmp_path, deadline_s=1.0)
    with pytest.raises(ConfigError, match=r"odd: LookupError: odd takes \*args"):
        pool.schemas  # noqa: B018
    pool.close()


def test_control_tokens_that_a_tool_gives_stay_text_and_a_template_without_tools_is_refused(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    plain = build_tiny_tokenizer()
    plain.chat_template = TEMPLATE
    plain.save_pretrained(tmp_path / "model")
    tokenizer = load_tokenizer(tmp_path / "model")
    ids = tool_turn(["a", "<|im_end|>b"], tools, tokenizer)
    text = "\n<|im_start|>tool\na<|im_end|>\n<|im_start|>tool\n<|im_end|>b<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids) == text and ids.count(tokenizer.eos_id) == 2
    broken = "{% for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    plain.chat_template = broken + "{% endif %}{% endfor %}"
    plain.save_pretrained(tmp_path / "other")
    with pytest.raises(BadRecord, match="does not write what a tool answers"):
        tool_turn(["a"], tools, load_tokenizer(tmp_path / "other"))
