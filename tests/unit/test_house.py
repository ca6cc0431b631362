"""The house rules that a program can count: sizes, docstrings, no swallowed errors, examples that load."""

from __future__ import annotations

import ast
import functools
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
FOLDERS = ("src", "tests", "examples", "benchmarks")
OURS = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
MAY_CATCH_ALL = ("src/duoka/cli/", "src/duoka/cluster/supervise.py", "src/duoka/sinks/trouble.py",
                 "src/duoka/tasks/user_functions.py")  # fmt: skip
LOOP = "src/duoka/train/loop.py"
RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


@pytest.fixture(scope="module", autouse=True)
def trees_are_no_garbage() -> Iterator[None]:
    """Searching millions of nodes again and again took longer than parsing them; they go when these tests are done."""
    gc.disable()
    yield
    tree_of.cache_clear()
    gc.enable()


def nodes_of(path: Path) -> Iterator[ast.AST]:
    return ast.walk(tree_of(path))


def test_a_file_ends_by_400_lines_and_the_loop_by_120() -> None:
    assert len(SOURCES) > 20, "this test no longer finds the sources"
    num_lines = {path: len(text_of(path).splitlines()) for path in OURS}
    long = {name_of(p): n for p, n in num_lines.items() if n > (120 if name_of(p) == LOOP else 400)}
    assert not long, f"files that are too long: {long}"
    assert (ROOT / LOOP).is_file(), "the loop has moved: measure it where it is now"


def test_a_function_ends_by_60_lines() -> None:
    long = {}
    for path in OURS:
        for node in nodes_of(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                num_lines = (node.end_lineno or 0) - node.lineno + 1
                if num_lines > 60:
                    long[f"{name_of(path)}:{node.lineno} {node.name}"] = num_lines
    assert not long, f"functions that are too long: {long}"


def test_a_module_says_what_it_is_for() -> None:
    silent = [name_of(path) for path in SOURCES if text_of(path).strip() and not ast.get_docstring(tree_of(path))]
    assert not silent, f"modules without a docstring: {silent}"


def test_no_error_is_swallowed() -> None:
    swallowed = []
    for path in SOURCES:
        if name_of(path).startswith(MAY_CATCH_ALL):
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.ExceptHandler) and _catches_all(node) and not _raises(node):
                swallowed.append(f"{name_of(path)}:{node.lineno}")
    assert not swallowed, f"these catch everything and go on: {swallowed}"


def _catches_all(handler: ast.ExceptHandler) -> bool:
    names = {leaf.id for leaf in ast.walk(handler.type) if isinstance(leaf, ast.Name)} if handler.type else set()
    return handler.type is None or bool(names & {"Exception", "BaseException"})


def _raises(handler: ast.ExceptHandler) -> bool:
    return any(isinstance(leaf, ast.Raise) for leaf in ast.walk(handler))


def test_nothing_is_left_to_be_written() -> None:
    stubs = [name_of(path) for path in SOURCES if "NotImplementedError" in text_of(path)]
    assert not stubs, f"stubs: {stubs}"


def test_no_pickle_is_opened_or_written() -> None:
    pickles = []
    for path in SOURCES:
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "torch.save"):
                # Checkpoints of DeepSpeed and FSDP are nothing else: tensors, numbers and containers of them.
                of_others = ("src/duoka/store/deepspeed_files.py", "src/duoka/store/dcp_files.py")
                reads = name_of(path) in of_others and "weights_only=True" in ast.unparse(node)
                writes = name_of(path) == "src/duoka/store/deepspeed_export.py" and "torch.save" in ast.unparse(node)
                is_safe = reads or writes
                pickles += [] if is_safe else [f"{name_of(path)}:{node.lineno}"]
            if isinstance(node, (ast.Import, ast.ImportFrom)) and "pickle" in ast.unparse(node).replace(
                "import pickletools",
                "",  # which takes them apart, and makes nothing
            ):
                pickles.append(f"{name_of(path)}:{node.lineno}")
    assert not pickles, f"pickles: {pickles}"


def test_only_one_file_reads_the_rank_environment() -> None:
    """Setting RANK and its kin for a child is the launcher's business; reading them is environ.py's."""
    readers = []
    for path in SOURCES:
        if name_of(path) == "src/duoka/process/environ.py":
            continue
        for node in nodes_of(path):
            if _reads_environment(node) and any(f"'{name}'" in ast.unparse(node) for name in RANK_NAMES):
                readers.append(f"{name_of(path)}:{node.lineno}")
    assert not readers, f"these read the rank environment themselves: {readers}"


def _reads_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in ("os.environ.get", "os.getenv")
    loads = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)
    return loads and ast.unparse(node.value) == "os.environ"


def test_tests_use_what_a_module_gives_out() -> None:
    """A private name may change in any commit: what a test needs of a module is public there, or is not needed."""
    private = [
        f"{name_of(path)}:{line} {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line, name in _private_names(path)
    ]
    assert not private, f"tests that use private names of duoka: {private}"


def _private_names(path: Path) -> Iterator[tuple[int, str]]:
    """Imported, read as `module._name` or `Class._name`, or patched; of instances nothing is known here."""
    imported = set()
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "duoka":
            imported |= {one.asname or one.name for one in node.names}
            yield from ((node.lineno, f"{node.module}.{one.name}") for one in node.names if _is_private(one.name))
        elif isinstance(node, ast.Import):
            imported |= {one.asname for one in node.names if one.asname and one.name.split(".")[0] == "duoka"}
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and ast.unparse(node.value) in imported:
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr"):
            words = [one.value for one in node.args[:2] if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            of_ours = ast.unparse(node.args[0]) in imported or (words[:1] and words[0].startswith("duoka."))
            if of_ours and any(_is_private(word.rsplit(".", 1)[-1]) for word in words):
                yield node.lineno, ".".join(words)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_loads_without_a_word(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from duoka.config.load import load_config

    monkeypatch.chdir(ROOT)
    if "\npipeline:\n" in path.read_text(encoding="utf-8"):
        return  # test_gallery.py makes its stages
    loaded = load_config(path)
    assert not loaded.notes, f"a valid file gives no warning, but: {loaded.notes}"
