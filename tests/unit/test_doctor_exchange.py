"""The doctor's exchange: ranks meet, add and train alike; who adds wrong, drifts, garbles or does not come is named."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from duoka.bench.exchange import ANSWER, bad_copies
from duoka.cluster.exchange import judge_exchanged


def said(**changes: object) -> dict[str, object]:
    told = {"backend": "gloo", "num_wrong": 0, "alone": "aa", "together": "bb", "bad_copies": []}
    return {"exchanged": told | changes}


def judged(told: dict[str, dict[str, object]]) -> list[tuple[str, str, list[str]]]:
    return [(one.severity, one.check, sorted(one.nodes)) for one in judge_exchanged(told)]


@pytest.mark.parametrize(
    ("odd", "expected"),
    [
        (said(), [("ok", "exchange", ["all"])]),
        (said(num_wrong=3, together="other"), [("fail", "exchange", ["c"])]),
        (said(together="other"), [("fail", "same weights", ["a", "c"])]),
        (said(bad_copies=["cuda:0 -> cuda:1"]), [("fail", "copies between GPUs", ["c"])]),
        (said(alone="other"), [("ok", "exchange", ["all"]), ("warn", "same digits", ["a", "c"])]),
        ({"error": "connection timed out"}, [("fail", "exchange", ["c"])]),
    ],
)
def test_the_odd_machine_is_named(odd: dict[str, object], expected: list[tuple[str, str, list[str]]]) -> None:
    assert judged({"a": said(), "b": said(), "c": odd}) == expected


def test_a_copy_that_changes_a_byte_is_named_by_its_pair() -> None:
    one, other = torch.device("cpu"), torch.device("cpu", 0)

    def garbles(data: torch.Tensor, to: torch.device) -> torch.Tensor:
        out = data.clone()
        if to == other:
            out[12345] ^= 4
        return out

    assert bad_copies([one, other], garbles) == ["cpu -> cpu:0"]
    assert bad_copies([one, other], lambda data, _: data.clone()) == []


class Machine:
    """The process that the doctor starts on a machine, spoken to as over ssh."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "duoka.bench.exchange"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, object]:
        assert self.process.stdout is not None
        line = next(line for line in self.process.stdout if line.startswith(ANSWER))
        told: dict[str, object] = json.loads(line.removeprefix(ANSWER))
        return told

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(20)


@pytest.mark.timeout(120)
def test_two_that_meet_agree_and_one_that_waits_in_vain_says_so() -> None:
    first, second = Machine(), Machine()
    try:
        first.ask(serve=True)
        place = {"host": "127.0.0.1", "port": first.answer()["port"], "size": 2, "seconds": 15.0}
        first.ask(meet={**place, "rank": 0})
        second.ask(meet={**place, "rank": 1})
        told = {"a": first.answer(), "b": second.answer()}
        assert judged(told) == [("ok", "exchange", ["all"])], told
        assert second.end() == 1, "it ends with who asked"
        alone = Machine()
        alone.ask(meet={**place, "rank": 1, "size": 3, "seconds": 1.0})
        assert "error" in alone.answer()
        assert alone.end() == 1
        assert first.end() == 1
    finally:
        for machine in (first, second):
            machine.process.kill()
            machine.process.wait()
