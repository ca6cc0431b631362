"""The front page's commands, in its order and as they stand there, on a machine that has installed duoka."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
# What a user types at a prompt, and what keeps two cores from fine-tuning for long: the words of the page come first.
TYPED = {"chat": "Who are you?\n"}
SHORT = {"train": ["train.max_steps=3"], "plan": ["train.max_steps=3"]}


def commands_of(page):
    """The lines of its first block of `duoka` commands, without what is said behind them."""
    blocks = re.findall(r"^```\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    block = next(one for one in blocks if one.startswith("duoka new"))
    return [shlex.split(line, comments=True)[1:] for line in block.splitlines()]


@pytest.mark.parametrize("page", ["docs/index.md", "docs/index.zh-CN.md"])
def test_the_front_page_s_commands_end_with_a_model_that_others_read(tmp_path, page):
    words = commands_of(page)
    assert [one[0] for one in words] == ["new", "plan", "train", "chat", "export"], "the page's order"
    rows = (ROOT / "examples" / "own_data.jsonl").read_text(encoding="utf-8")
    (tmp_path / "mine.jsonl").write_text(rows, encoding="utf-8")
    for one in words:
        done = subprocess.run(
            [sys.executable, "-m", "duoka", *one, *SHORT.get(one[0], [])], cwd=tmp_path, text=True,
            input=TYPED.get(one[0], ""), capture_output=True, timeout=900,
        )  # fmt: skip
        assert done.returncode == 0, (one, done.stdout[-2000:], done.stderr[-2000:])
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "mine-model").num_parameters() > 1e8
