"""`duoka chat --tools`: the calculator is exact and bounded, programs have limits, and a model's calls are answered."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from talking import ASKS_SUM, write_talking_model
from transformers import LlamaConfig

from duoka.cli import run as duoka
from duoka.data.tokens.tokenizer import load_tokenizer
from duoka.serve.chat import Chat, talk
from duoka.serve.tools import end_of_speech
from duoka.tasks.calculate import Refused, calculate
from duoka.tasks.run_code import output_of
from duoka.tasks.tools import TOOLS, call_tool


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"), ("(2+3)*4", "20"), ("2^10", "1024"), ("7 // 2 + 7 % 2", "4"), ("-2 ** 2", "-4"),
        ("1/4", "0.25"), ("10/5", "2"), ("0.1 + 0.2", "0.3"), ("sqrt(2)", f"{math.sqrt(2):.12g}"),
        ("round(pi, 2)", "3.14"), ("max(3, 9, 4) × 2", "18"),
        ("123456789 * 987654321", "121932631112635269"), ("2**200", str(2**200)),
    ],
)  # fmt: skip
def test_the_calculator_is_right(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9", "(-8)**0.5", "1/0", "2**5000", "10**1000*10**1000", "round(5, -1000000000)", "factorial(9)",
        "__import__('os').system('true')", "(1).__class__", "[1 for _ in range(9)]", "open('x')", "lambda: 1", "a",
        "'a'*9",
        "1 if 1 else 2", "True", "1j", "x := 3", "", "1+", "exp(1000)", "(" * 150 + "1" + ")" * 150, "1+" * 200 + "1",
        "1 << 9999999", "max()", "sqrt(-1)", "sin(x=1)", "1e308*10",
    ],
)  # fmt: skip
def test_what_is_no_arithmetic_or_too_much_is_refused_at_once(expression: str) -> None:
    began = time.process_time()
    with pytest.raises(Refused) as reason:
        calculate(expression)
    assert str(reason.value) and time.process_time() - began < 1


def test_programs_are_ended_and_what_they_print_is_bounded() -> None:
    assert output_of("print(sum(range(10)))") == "45"
    assert "ZeroDivisionError" in output_of("1/0")
    assert "ended after 1 s" in output_of("while True: pass", 1.0)
    assert len(output_of("print('x' * 10_000_000)")) < 5000
    assert "MemoryError" in output_of("x = bytearray(4 << 30)")
    assert "HOME" not in output_of("import os; print(os.environ)")


def test_a_wrong_call_is_answered_in_words() -> None:
    def call(name: str, arguments: str) -> str:
        return call_tool({"calculator": TOOLS["calculator"]}, {"function": {"name": name, "arguments": arguments}})

    assert call("calculator", '{"expression": "6*7"}') == "42"
    assert call("python", "{}") == "error: there is no tool python; there is calculator"
    assert call("calculator", '{"x": 1}') == "error: calculator needs expression as text"
    assert call("calculator", "not json").startswith("error: ")


def test_speech_is_shown_up_to_where_a_call_may_begin() -> None:
    shown = {
        "Hi": 2, "Hi <tool": 3, "Hi <b>": 6, '{"name"': 0, "Hi <tool_call>{": 3,
        ' [{"name"': 0, "Hi [TOOL": 3, "Hi [1]": 6, "Hi [TOOL_CALLS][{": 3,
    }  # fmt: skip
    assert {text: end_of_speech(text) for text in shown} == shown
    named = {
        "Hi": 2, "Hi calc": 3, "Hi calculator": 3, 'calculator{"a': 0, "Hi calculatorabc123XYZ{": 3,
        "The calculator is": 17, "calculators are": 15, "a cal ": 6,
    }  # fmt: skip
    assert {text: end_of_speech(text, ("calculator", "python")) for text in named} == named


def test_a_model_calls_the_calculator_and_says_what_came(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_talking_model(tmp_path / "talking")
    ask = ["chat", str(folder), "--prompt", ASKS_SUM]
    assert duoka([*ask, "--tools", "calculator"]) == 0
    said = capsys.readouterr().out
    assert said == '[calculator {"expression": "2**10 - 24"} -> 1000]\nIt is 1000.\n'
    assert duoka([*ask, "--tools", "calculator", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["answer"].endswith("It is 1000.")
    assert duoka([*ask, "--tools", "oracle"]) == 2
    assert "known: calculator, python" in capsys.readouterr().err
    assert duoka(["chat", str(tiny_model), "--prompt", "a", "--tools", "calculator"]) == 2
    assert "knows no tools" in capsys.readouterr().err


def test_calls_without_end_are_made_eight_times(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def stream(*_: object) -> Iterator[str]:
        yield '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>'

    def counted(*asked: object) -> str:
        made.append(asked)
        return "2"

    monkeypatch.setattr("duoka.serve.chat.stream_answer", stream)
    monkeypatch.setattr("duoka.serve.chat.call_tool", counted)
    lm = SimpleNamespace(config=LlamaConfig(max_position_embeddings=4096))  # has a window, and answers nothing
    chat = Chat(lm, load_tokenizer(tiny_model), None, tools={"calculator": TOOLS["calculator"]})  # type: ignore[arg-type]
    assert "after 8 rounds" in "".join(chat.ask("go")) and len(made) == 8
    assert chat.messages[-1]["role"] == "assistant" and "tool_calls" not in chat.messages[-1]


@pytest.mark.parametrize("breaks_at", [0, 1])
def test_a_call_that_is_broken_off_leaves_no_call_without_an_answer(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, breaks_at: int
) -> None:
    """Templates refuse such a history (Mistral's), and with it each later question."""
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>'
    made = []

    def broken_off(*asked: object) -> str:
        if len(made) == breaks_at:
            raise KeyboardInterrupt
        made.append(asked)
        return "2"

    monkeypatch.setattr("duoka.serve.chat.stream_answer", lambda *_: iter(["Wait. ", call, call]))
    monkeypatch.setattr("duoka.serve.chat.call_tool", broken_off)
    lm = SimpleNamespace(config=LlamaConfig(max_position_embeddings=4096))
    chat = Chat(lm, load_tokenizer(tiny_model), None, tools={"calculator": TOOLS["calculator"]})  # type: ignore[arg-type]
    typed = iter(["go", "/quit"])
    talk(chat, lambda prompt: next(typed), lambda text: None)
    assert [(one["role"], one["content"]) for one in chat.messages] == [("user", "go"), ("assistant", "Wait.")]
    assert "tool_calls" not in chat.messages[-1]
