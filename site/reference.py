"""Pages made from the code: commands and exit codes in docs/reference, and docs/config.zh-CN.md and
docs/llamafactory.zh-CN.md.

    python site/reference.py            writes them
    python site/reference.py --check    says which of them are not what the code says

A test compares them (tests/unit/test_site.py), so a new command, option, key or code without its page is found.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import yaml

from duoka import cli as frame
from duoka.cli import words_zh
from duoka.config.dialects.page import dialects_markdown
from duoka.config.document import config_markdown

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ROOT / "src" / "duoka" / "explain" / "texts"
MADE = "This page is made from the code (`python site/reference.py`); do not edit it."
MADE_ZH = "本页由代码生成（`python site/reference.py`），请勿手改。"


def commands_page(language: str) -> str:
    is_zh = language == "zh"
    lines = ["# 命令" if is_zh else "# Commands", "", MADE_ZH if is_zh else MADE, ""]
    if is_zh:
        lines += ["每条命令做什么；选项的说明是英文，与 `--help` 打印的相同。", ""]
    for name, what in frame.COMMANDS.items():
        command = frame.cli.get_command(click.Context(frame.cli), name)  # type: ignore[attr-defined]
        assert command is not None, name
        lines += [f"## {name}", "", words_zh.COMMANDS[name] if is_zh else what, ""]
        lines += _of_command(f"duoka {name}", command, is_zh)
    return "\n".join(lines).rstrip() + "\n"


def _of_command(path: str, command: click.Command, is_zh: bool) -> list[str]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        found: list[str] = []
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None, name
            found += [f"### {path.removeprefix('duoka ')} {name}", "", _sentence(inner), ""]
            found += _of_command(f"{path} {name}", inner, is_zh)
        return found
    usage = " ".join([path, *command.collect_usage_pieces(click.Context(command))])
    rows = list(_rows(command))
    table = [f"| {'选项' if is_zh else 'option'} | {'作用' if is_zh else 'what it does'} |", "|---|---|", *rows, ""]
    return [f"    {usage}", "", *(table if rows else [])]


def _sentence(command: click.Command) -> str:
    return " ".join((command.help or "").split("\n\n")[0].split()).replace("\f", "").replace("|", "\\|")


def _rows(command: click.Command) -> Iterator[str]:
    for one in command.get_params(click.Context(command)):
        if isinstance(one, click.Option) and not one.hidden and "--help" not in one.opts:
            record = one.get_help_record(click.Context(command))
            if record:
                names, what = record
                yield f"| `{_cell(names)}` | {_cell(what)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def codes_page(language: str) -> str:
    is_zh = language == "zh"
    codes: dict[str, Any] = yaml.safe_load((TEXTS / "codes.yaml").read_text(encoding="utf-8"))
    lines = ["# 退出码" if is_zh else "# Exit codes", "", MADE_ZH if is_zh else MADE, ""]
    lines += [("`duoka explain 5 --lang zh` 打印同样的文字。" if is_zh else "`duoka explain 5` prints the same."), ""]
    for code in codes.values():
        text = code[language]
        lines += [f"## {text['title']}", "", text["text"].strip(), ""]
    return "\n".join(lines).rstrip() + "\n"


def keys_page() -> str:
    """docs/config.md with the meanings in Chinese: the same tables, from the same schema."""
    words: dict[str, str] = yaml.safe_load((TEXTS / "keys.zh.yaml").read_text(encoding="utf-8"))
    block, lines = "", ["# 配置", "", MADE_ZH + "键、默认值和取值照写在 YAML 里的样子。", ""]
    for line in config_markdown().splitlines():
        heading = re.match(r"## (\S+)$", line)
        row = re.match(r"\| `([^`]+)` \| (.*) \|$", line)
        if line.startswith("##"):
            block = heading[1] if heading else ("" if line.startswith("## ") else "data.train")
            lines += ["", f"## {heading[1]}" if heading else _HEADINGS.get(line, line), ""]
            lines += [words[block], ""] if block in words and heading else []
            lines += [_HEAD, "|---|---|---|---|---|"]
        elif row and block is not None:
            cells = re.split(r" \| ", row[2])
            if len(cells) != 4 or not lines[-1].startswith("|"):
                continue
            key = f"{block}.{row[1]}" if block else row[1]
            what = words.get(key, cells[2])
            lines.append(f"| `{row[1]}` | {cells[0]} | {cells[1]} | {_cell(what)} | {_YES.get(cells[3], cells[3])} |")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


_HEAD = "| 键 | 默认 | 取值 | 含义 | 续训时可改 |"
_YES = {"yes": "可以", "no": "不可以"}
_HEADINGS = {
    "## At the top": "## 最外层",
    "### A data set in data.train or data.eval": "### data.train、data.eval 里的一个数据集",
}


def dialects_page() -> str:
    """docs/llamafactory.md with its words in Chinese; the notes stay as duoka prints them."""
    rows = dialects_markdown().split("\n## ", 1)[1]
    for words, chinese in _DIALECTS.items():
        rows = rows.replace(words, chinese)
    return Path(__file__).with_name("dialects.zh.md").read_text(encoding="utf-8") + "\n## " + rows


_DIALECTS = {
    "| key | class | duoka's key | note |": "| 键 | 类别 | duoka 的键 | 备注 |",
    "| implemented |": "| 实现 |", "| reported |": "| 说明 |", "| refused |": "| 拒绝 |",
    "## the nested DDP form": "## DDP 教程的嵌套写法",
}  # fmt: skip


def pages() -> dict[str, str]:
    return {
        "reference/commands.md": commands_page("en"),
        "reference/commands.zh-CN.md": commands_page("zh"),
        "reference/exit-codes.md": codes_page("en"),
        "reference/exit-codes.zh-CN.md": codes_page("zh"),
        "config.zh-CN.md": keys_page(),
        "llamafactory.zh-CN.md": dialects_page(),
    }


def main() -> int:
    stale = []
    for name, text in pages().items():
        path = ROOT / "docs" / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    word = "stale" if "--check" in sys.argv else "written"
    print("\n".join(f"{word}: docs/{name}" for name in stale) or "all as the code says")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
