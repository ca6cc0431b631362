"""Pages do not lie where a program can tell: each block of YAML is a config, each `duoka ...` parses.

In process and without running anything: the schema reads the YAML, the real parser the commands. A block of another
kind says so behind its fence: ```text for what is printed, ```yaml other for a file that is not ours.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
import yaml

from duoka import cli as frame
from duoka.cli.typed import mend
from duoka.config.catalog import known_keys
from duoka.config.load import load_config
from duoka.config.pipeline import read_pipeline
from duoka.errors import DuokaError

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "examples/*.md", ".github/**/*.md")
    for path in ROOT.glob(pattern)
)
# Records of what was: commands of old days stay as they were typed.
HISTORY = ("CHANGELOG.md", "docs/decisions.md")
SHELL, OURS = ("", "sh", "bash", "console"), re.compile(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*duoka(?= |$)")
KEY_OF_RUN = re.compile(r"([a-z_]+(?:\.[a-z_]+)*)=")
# Commands whose KEY=VALUE are keys of one config; those of `duoka run` begin with a stage's name.
TAKE_KEYS = ("train", "plan", "chaos", "profile")


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    kind: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str, text: str) -> Iterator[Block]:
    for found in re.finditer(r"^```([^\n]*)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        yield Block(page, text.count("\n", 0, found.start()) + 2, found[1].strip(), found[2])


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def all_blocks(*kinds: str) -> list[Block]:
    return [block for page in PAGES for block in blocks_of(page, read(page)) if block.kind in kinds]


# --- YAML ---


def fault_of_yaml(text: str, folder: Path) -> str:
    """What the loader says of a block; a block that shows a part of a config is completed by the rest."""
    keys = yaml.safe_load(text)
    file = folder / "block.yaml"
    if "pipeline" not in keys:
        text += "" if "model" in keys else "\nmodel: demo\n"
        text += "" if "data" in keys else "\ndata: {train: [identity], eval: 0.1}\n"
    file.write_text(text, encoding="utf-8")
    try:
        if "pipeline" in keys:
            read_pipeline(file)
        else:
            load_config(file)
    except DuokaError as error:
        return "\n".join(error.lines())
    return ""


def test_every_yaml_of_a_page_is_a_config(tmp_path: Path) -> None:
    blocks = all_blocks("yaml")
    assert len(blocks) > 12, "this test no longer finds the blocks"
    faults = {block.place: fault for block in blocks if (fault := fault_of_yaml(block.text, tmp_path))}
    assert not faults, f"YAML that duoka refuses: {faults}"


def test_a_wrong_yaml_would_be_found(tmp_path: Path) -> None:
    for wrong in ("model: demo\ndata: {trian: [x]}\n", "lora: {rank: eight}\n", "pipeline: {a: {eval: [sort]}}\n"):
        assert fault_of_yaml(wrong, tmp_path), wrong


# --- commands ---


def commands_in_blocks() -> list[tuple[str, str]]:
    """(place, line) of every line that begins with duoka; comments behind two spaces and a # are left out."""
    found = []
    for block in all_blocks(*SHELL):
        lines = block.text.replace("\\\n", " ").splitlines()
        found += [(f"{block.place}", re.sub(r"\s+#.*", "", line)) for line in lines if OURS.match(line)]
    return found


def commands_in_spans() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        if page in HISTORY:
            continue
        text = re.sub(r"^```.*?^```", "", read(page), flags=re.DOTALL | re.MULTILINE)
        found += [(page, span.replace("\\|", "|")) for span in re.findall(r"`(duoka [^`]+)`", text)]
    return found


def find_command(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that the first words name, and the words behind it."""
    command: click.Command = frame.cli
    context = click.Context(command)
    while isinstance(command, click.Group):
        name = words[0] if words else ""
        inner = command.get_command(context, name)
        if inner is None and command.name == "runs":  # `list` need not be written
            inner, words = command.get_command(context, "list"), ["list", *words]
        if inner is None:
            raise click.UsageError(f"there is no command {name!r}")
        command, words = inner, words[1:]
    return command, words


def fault_of_line(line: str) -> str:
    """What the parser says of a line that stands in a block: it has to be whole."""
    try:
        line = re.split(r"\s[|>]|&&|;", OURS.sub("", line))[0]
        words, _ = mend(shlex.split(line))
        if words in (["--help"], ["--version"], []):
            return ""
        command, rest = find_command(list(words))
        if "--help" in rest:
            return ""
        typed = command.make_context(str(command.name), list(rest)).params.get("overrides") or ()
        keys = [found[1] for word in typed if (found := KEY_OF_RUN.match(word))] if words[0] in TAKE_KEYS else []
        wrong = [key for key in keys if key not in known_keys()]
        return f"there is no key {wrong[0]}" if wrong else ""
    except (click.ClickException, ValueError) as error:
        return error.format_message() if isinstance(error, click.ClickException) else str(error)


def fault_of_span(span: str) -> str:
    """Of a span, in which arguments may be left out or stand in [brackets] and as A|B: its command and options."""
    words = re.sub(r"[\[\]]", " ", span).split()[1:]
    words = words[: next((place for place, word in enumerate(words) if word in (">", "&&", "|")), None)]
    paths: list[list[str]] = [[]]
    for word in words:
        if not re.fullmatch(r"[a-z][a-z|-]*", word):
            break
        paths = [[*path, part] for path in paths for part in word.split("|")]
    for path in paths or [[]]:
        if not path:
            return "" if words[0] in ("--help", "--version", "...") else "names no command"
        try:
            command, _ = find_command(path) if not isinstance(_group(path), click.Group) else (_group(path), [])
        except click.ClickException as error:
            return error.format_message()
        options = {name for one in command.params for name in one.opts + one.secondary_opts} | {"--help"}
        typed = [part for word in words if word.startswith("-") for part in word.split("=")[0].split("|")]
        wrong = [name for name in typed if name.replace("_", "-") not in options and name != "--"]
        if wrong and not command.context_settings.get("ignore_unknown_options"):
            return f"{command.name} has no option {wrong[0]}"
    return ""


def _group(path: list[str]) -> click.Command | None:
    """The group that a path names and stops at, such as `duoka comm`."""
    command = frame.cli.get_command(click.Context(frame.cli), path[0])  # type: ignore[attr-defined]
    return command if len(path) == 1 and isinstance(command, click.Group) else None


def test_every_command_line_of_a_page_parses() -> None:
    lines = commands_in_blocks()
    assert len(lines) > 25, "this test no longer finds the lines"
    faults = {f"{place}: {line}": fault for place, line in lines if (fault := fault_of_line(line))}
    assert not faults, f"lines that duoka refuses: {faults}"


def test_every_command_that_a_text_names_is_there_with_its_options() -> None:
    spans = commands_in_spans()
    assert len(spans) > 80, "this test no longer finds the spans"
    faults = {f"{place}: {span}": fault for place, span in spans if (fault := fault_of_span(span))}
    assert not faults, f"commands and options that are not there: {faults}"


@pytest.mark.parametrize(
    "wrong",
    ["duoka trian x.yaml", "duoka train", "duoka train x.yaml --nprocs 2", "duoka plan x.yaml optim.lrr=1",
     "duoka comm tset", "duoka data inspect", "duoka runs stop", "duoka train x.yaml --nproc two"],
)  # fmt: skip
def test_a_wrong_line_would_be_found(wrong: str) -> None:
    assert fault_of_line(wrong)


@pytest.mark.parametrize(
    "wrong", ["duoka trian", "duoka train X [--nprocs N]", "duoka config show|skema", "duoka comm tset [--nproc N]"]
)
def test_a_wrong_span_would_be_found(wrong: str) -> None:
    assert fault_of_span(wrong)


# --- the rest ---


def test_python_and_json_of_pages_parse() -> None:
    for block in all_blocks("python"):
        ast.parse(block.text, block.place)
    for block in all_blocks("json"):
        json.loads(block.text)
    for block in all_blocks("jsonl"):
        assert all(json.loads(line) for line in block.text.splitlines()), block.place


def test_every_block_says_what_it_is() -> None:
    known = {*SHELL, "yaml", "yaml other", "python", "json", "jsonl", "text"}
    strange = [f"{block.place}: {block.kind}" for page in PAGES for block in blocks_of(page, read(page))
               if block.kind not in known]  # fmt: skip
    assert not strange, f"blocks of a kind that no test looks at: {strange}"


def test_links_between_pages_lead_somewhere() -> None:
    faults = []
    for page in PAGES:
        for target, mark in re.findall(r"\]\(([^)#\s:]+)?(#[^)\s]*)?\)", read(page)):
            path = (ROOT / page).parent / target if target else ROOT / page
            if not path.exists():
                faults.append(f"{page}: {target}")
            elif mark and path.suffix == ".md" and mark[1:] not in anchors_of(path):
                faults.append(f"{page}: {target}{mark}")
    assert not faults, f"links to what is not there: {faults}"


def anchors_of(path: Path) -> set[str]:
    """Headings as their links are written."""
    heads = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
