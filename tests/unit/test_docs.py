"""The developers' pages are true where a program can tell: files, functions and tests are there, rooms on their floors.

CONTRIBUTING.md and docs/one_step.md name `path.py`, `path.py:function` and `tests/path.py::test` in code spans;
comments and docstrings of src/ name files.
"""

from __future__ import annotations

import ast
import functools
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("CONTRIBUTING.md", "docs/one_step.md")
# Where a name may begin: pages leave `src/duoka/` out.
STARTS = (ROOT / "src" / "duoka", ROOT)
REFERENCE = re.compile(r"([\w./-]+\.py)(?:(::|:)([A-Za-z_]\w*(?:\.\w+)*))?")


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def words_of(text: str) -> Iterator[str]:
    """What stands in code spans, word by word; `file.py` also within a command."""
    without_blocks = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for span in re.findall(r"`([^`]+)`", without_blocks):
        yield from span.split()


@functools.cache
def names_in(path: Path) -> set[str]:
    """Functions, classes and constants of a module, and members of classes as `Class.member`."""

    def members(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from members(node.body, f"{prefix}{node.name}.")
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
            leaves = (leaf for target in targets for leaf in ast.walk(target))
            yield from (prefix + leaf.id for leaf in leaves if isinstance(leaf, ast.Name))

    return set(members(ast.parse(path.read_text(encoding="utf-8")).body, ""))


def faults_of(text: str) -> list[str]:
    faults = []
    for word in words_of(text):
        if ".py" not in word or "/python" in word:
            continue
        found = REFERENCE.fullmatch(word)
        if found is None:
            faults.append(f"{word}: no path.py, path.py:name or tests/path.py::test")
            continue
        file, mark, name = found.groups()
        path = next((start / file for start in STARTS if (start / file).is_file()), None)
        if path is None:
            faults.append(f"{word}: there is no such file")
        elif name and name not in names_in(path):
            faults.append(f"{word}: the file has no {name}")
        elif name and (mark == "::") != name.startswith("test_"):
            faults.append(f"{word}: tests are named with ::, all else with :")
    return faults


@pytest.mark.parametrize("page", PAGES)
def test_every_file_function_and_test_that_a_page_names_is_there(page: str) -> None:
    num_named = sum(".py" in word for word in words_of(text_of(page)))
    assert num_named > 20, "this test no longer finds the names"
    assert not faults_of(text_of(page))


def test_a_name_that_is_not_there_would_be_found() -> None:
    right = "`train/loop.py:train`, `parallel/engine.py:Engine.step` and `tests/unit/test_docs.py:faults_of`"
    assert not faults_of(right)
    for wrong in (
        "`train/loops.py`", "`loop.py`", "`train/loop.py:trains`", "`parallel/engine.py:Engine.stride`",
        "`tests/unit/test_docs.py::test_nothing`", "`train/loop.py::train`", "`train/*.py`",
    ):  # fmt: skip
        assert len(faults_of(wrong)) == 1, wrong


def contract(name: str, key: str) -> list[str]:
    """A list of one of pyproject's import contracts; tomllib is not in Python 3.10."""
    text = text_of("pyproject.toml").split(f'name = "{name}', 1)[1].split("[[", 1)[0]
    found = re.search(rf"^{key} = (\[.*?^\]|\[.*?\]$)", text, flags=re.DOTALL | re.MULTILINE)
    assert found is not None, f"the contract {name!r} has no {key}"
    value: list[str] = ast.literal_eval(found[1])
    return value


def rooms_of_table() -> list[list[tuple[str, bool]]]:
    """(room, whether it is marked as free of torch) of each row of CONTRIBUTING's table."""
    section = text_of("CONTRIBUTING.md").split("## The rooms", 1)[1].split("\n## ", 1)[0]
    rows = [line.split("|")[2] for line in section.splitlines() if line.startswith("|")][2:]
    return [[(name, bool(star)) for name, star in re.findall(r"`(\w+)`(\\\*)?", row)] for row in rows]


def test_the_table_of_rooms_is_the_import_contract() -> None:
    layers = [sorted(layer.split(" | ")) for layer in contract("Floors", "layers")]
    assert [sorted(name for name, _ in row) for row in rooms_of_table()] == layers


def test_rooms_marked_as_free_of_torch_are_those_of_the_contract() -> None:
    held = {name.removeprefix("duoka.") for name in contract("config, plan, explain", "source_modules")}
    assert {name for row in rooms_of_table() for name, star in row if star} == held


def test_every_room_has_its_place_in_the_table() -> None:
    source = ROOT / "src" / "duoka"
    rooms = {path.parent.name for path in source.glob("*/__init__.py")}
    rooms |= {path.stem for path in source.glob("*.py")} - {"__init__"}
    assert {name for row in rooms_of_table() for name, _ in row} == rooms


def test_files_that_comments_name_are_there() -> None:
    kinds = (("src", "*.py"), ("tests", "*.py"), ("benchmarks", "*"), ("docs", "*.md"), (".", "*.md"))
    there = {
        path.name for folder, kind in kinds for path in (ROOT / folder).glob(f"**/{kind}" if folder != "." else kind)
    }
    missing = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        with tokenize.open(path) as file:
            for token in tokenize.generate_tokens(file.readline):
                is_text = token.type == tokenize.COMMENT or token.string.startswith('"""')
                names = re.findall(r"(?<![\w{}*])[\w/]+\.(?:py|md)\b", token.string) if is_text else []
                missing += [
                    f"{path.name}:{token.start[0]} {name}" for name in names if name.split("/")[-1] not in there
                ]
    assert not missing, f"comments that name files which are not there: {missing}"
