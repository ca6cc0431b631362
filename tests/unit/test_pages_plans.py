"""What pages show of a plan is what `duoka plan` prints: of machines that are named, the same everywhere.

Pages leave lines out. Those that they have are compared, whatever their spaces.
"""

import functools
import itertools
import re
import shlex

import pytest
from test_pages import PAGES, blocks_of, read

from duoka import cli

# With at most one line between the sentence and the block.
INLINE = re.compile(
    r"`duoka (plan [^`\n]*--on [^`\n]*)`[^\n]*\n(?:[^`\n][^\n]*\n|`[^`][^\n]*\n)?\n*```[^\n]*\n(.*?)^```", re.S | re.M
)
PLAN = re.compile(r"^duoka (plan (?!\S*yaml).*--on .*)$", re.MULTILINE)


def shown_plans():
    """(where, the command, what the page shows of it): the block itself, or the one of text right behind it."""
    for page in PAGES:
        text = read(page)
        blocks = list(blocks_of(page, text))
        for block, behind in itertools.zip_longest(blocks, blocks[1:]):
            lines = PLAN.findall(block.text.replace("\\\n", " "))
            if not lines or behind is None or behind.kind != "text":
                continue
            if behind.line - block.line <= block.text.count("\n") + 6:
                yield behind.place, re.sub(r"\s+#.*", "", lines[-1]), behind.text
        for found in INLINE.finditer(text):
            yield f"{page}:{text.count(chr(10), 0, found.start()) + 1}", found[1], found[2]


def plain(text):
    return re.sub(r"\s+", " ", text).strip()


@functools.cache
def printed(command):
    import contextlib
    import io

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        cli.run(shlex.split(command))
    return plain(out.getvalue() + err.getvalue())


PLANS = list(shown_plans())


def test_the_plans_of_pages_are_found():
    assert {"docs/plan.md", "docs/plan.zh-CN.md", "docs/howto/fits.md", "docs/guides/ddp.md"} <= {
        place.split(":")[0] for place, _, _ in PLANS
    }


@pytest.mark.parametrize(("place", "command", "shown"), PLANS, ids=[place for place, _, _ in PLANS])
def test_a_plan_on_a_page_is_the_one_that_is_printed(place, command, shown):
    now = printed(command)
    wrong = [line for line in shown.splitlines() if line.strip() and plain(line) not in now]
    assert not wrong, f"{place}: duoka {command} prints otherwise: {wrong}"
