"""`make site`: the pages of the repository as one site in two languages, in build/site, whole and without the network.

Pages link to each other as files of the repository do. This script lays them out as the site has them (English at the
top, Chinese below zh/, where a page without a Chinese side stands in English), mends the links, takes along what
pages link to outside of docs/, and calls the generator for each language. A link that leads nowhere ends it.
"""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "site"
BUILD = ROOT / "build"
# Where files from outside docs/ stand in the site.
OUTSIDE = "repository/"
LINK = re.compile(r"(\]\()([^)#\s]*)(#[^)\s]*)?(\))")
FENCE = re.compile(r"^(```.*?^```[^\n]*\n)", flags=re.DOTALL | re.MULTILINE)
CJK = re.compile(r"[\u4e00-\u9fff\u3000-\u303f\uff00-\uffef”]$")
CHINESE = ".zh-CN.md"
# The generator would fetch a script for searching in pages that are opened as files; this one is ours.
SHIM, OURS = "https://unpkg.com/iframe-worker/shim", "assets/iframe-worker.js"
LANGUAGES = {"en": "", "zh": "zh/"}


def navigation() -> dict[str, object]:
    """The titles and pages of site/pages.yml, in its order."""
    pages: dict[str, object] = yaml.safe_load((HERE / "pages.yml").read_text(encoding="utf-8"))
    return pages


def titles_and_pages(nav: dict[str, object]) -> Iterator[tuple[str, str]]:
    for title, below in nav.items():
        if isinstance(below, dict):
            yield from titles_and_pages(below)
        else:
            yield title, str(below)


def title_in(title: str, language: str) -> str:
    """Titles are written `English | Chinese`, or once for both."""
    english, _, chinese = title.partition(" | ")
    return chinese if language == "zh" and chinese else english


def sources(language: str) -> dict[str, Path]:
    """Each page of the site, and the file it is made from: in Chinese its Chinese side where there is one."""
    found: dict[str, Path] = {}
    for path in sorted((ROOT / "docs").rglob("*.md")):
        name = path.relative_to(ROOT / "docs").as_posix()
        if name.endswith(CHINESE):
            continue
        other = path.with_name(path.name.removesuffix(".md") + CHINESE)
        found[name] = other if language == "zh" and other.exists() else path
    return found


def outside(pages: dict[str, Path]) -> set[Path]:
    """Files outside of docs/ that pages link to, and those that these link to."""
    found: set[Path] = set()
    left = list(pages.values())
    while left:
        page = left.pop()
        for match in LINK.finditer(_without_code(page.read_text(encoding="utf-8"))):
            path = (page.parent / match[2]).resolve()
            is_new = ":" not in match[2] and path.is_file() and path not in found
            if is_new and path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "docs"):
                found.add(path)
                left += [path] if path.suffix == ".md" else []
    return found


def _without_code(text: str) -> str:
    return FENCE.sub("", text)


def mended(text: str, here: str, source: str, language: str) -> str:
    """A page's text with links as they are in the site. `here`: its name there; `source`: in the repository."""

    def moved(match: re.Match[str]) -> str:
        if ":" in match[2] or not match[2]:
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        return f"{match[1]}{_link(here, target)}{_anchor(target, match[3] or '', language)}{match[4]}"

    parts = FENCE.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(moved, part) for part in parts)


def _link(here: str, target: str) -> str:
    if target.startswith("docs/"):
        there = target.removeprefix("docs/")
        there = there.removesuffix(CHINESE) + ".md" if there.endswith(CHINESE) else there
        there = there if there.endswith(".md") else f"{there}/README.md"
    elif (ROOT / target).is_dir():
        there = "gallery.md"  # examples/ as a whole
    else:
        there = OUTSIDE + target
    return posixpath.relpath(there, posixpath.dirname(here) or ".")


def _anchor(target: str, mark: str, language: str) -> str:
    """A link to a heading of an English page is, in Chinese, one to the same heading of its Chinese side."""
    other = ROOT / (target.removesuffix(".md") + CHINESE)
    if not mark or language != "zh" or target.endswith(CHINESE) or not other.exists():
        return mark
    theirs, ours = anchors_of(ROOT / target), anchors_of(other)
    return f"#{ours[theirs.index(mark[1:])]}" if mark[1:] in theirs and mark[1:] not in ours else mark


def anchors_of(page: Path) -> list[str]:
    """The marks of a page's headings, in its order, as GitHub and the generator make them."""
    heads = re.findall(r"^#+ (.*)$", _without_code(page.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads]


def lay_out(language: str, folder: Path) -> None:
    """Write the pages of one language to `folder`."""
    pages = sources(language)
    for name, path in pages.items():
        text = mended(path.read_text(encoding="utf-8"), name, path.relative_to(ROOT).as_posix(), language)
        first, below, rest = in_the_generators_markdown(text).partition("\n")  # the title, and what stands below it
        _write(folder / name, first + below + "\n" + _aside(language, name, path) + rest)
    for path in sorted(outside(pages)):
        name = path.relative_to(ROOT).as_posix()
        if path.suffix == ".md":
            text = mended(path.read_text(encoding="utf-8"), OUTSIDE + name, name, language)
            _write(folder / OUTSIDE / name, in_the_generators_markdown(text))
        else:
            (folder / OUTSIDE / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / OUTSIDE / name)
    shutil.copytree(HERE / "assets", folder / "assets")


def _aside(language: str, name: str, path: Path) -> str:
    """The line below a page's title that leads to its other side, or says that there is none."""
    page = re.sub(r"(^|/)README\.html$", r"\1index.html", name.removesuffix(".md") + ".html")
    up = "../" * name.count("/")
    if language == "en":
        return f'<a class="side" href="{up}zh/{page}">中文</a>\n\n'
    in_english_only = not path.name.endswith(CHINESE)
    return f'<a class="side" href="{up}../{page}">{"这一页还没有中文。" if in_english_only else ""}English</a>\n\n'


def in_the_generators_markdown(text: str) -> str:
    """What the pages' own Markdown means, for the generator's: it wants an empty line before a list, takes a line's end
    for a blank even between Chinese characters, and knows no languages that are words for our tests."""
    parts = FENCE.split(text)
    return "".join(_fence(part) if part.startswith("```") else _lines(part) for part in parts)


def _lines(text: str) -> str:
    lines: list[str] = []
    for line in text.split("\n"):
        before = lines[-1] if lines else ""
        if re.match(r"(- |\d+\. )", line) and before and not re.match(r"(- |\d+\. |\s)", before):
            lines.append("")
        if CJK.search(before) and not before.startswith(("#", "|")) and re.match(r"\s*[\u4e00-\u9fff（“]", line):
            lines[-1] += line.lstrip()
        else:
            lines.append(line)
    return "\n".join(lines)


def _fence(block: str) -> str:
    first, _, rest = block.partition("\n")
    words = {"```yaml other": "```yaml", "```jsonl": "```json", "```": "```text", "```console": "```text"}
    return words.get(first, first) + "\n" + rest


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def config_of(language: str) -> str:
    text = (HERE / "site.yml").read_text(encoding="utf-8").replace("LANGUAGE", language)
    return text + yaml.safe_dump({"nav": _nav(navigation(), language)}, allow_unicode=True, sort_keys=False)


def _nav(pages: dict[str, object], language: str) -> list[dict[str, object]]:
    return [
        {title_in(title, language): _nav(below, language) if isinstance(below, dict) else below}
        for title, below in pages.items()
    ]


def _up(page: Path, top: Path) -> str:
    return "../" * (len(page.relative_to(top).parts) - 1)


def main() -> int:
    site = BUILD / "site"
    shutil.rmtree(site, ignore_errors=True)
    for language, below in LANGUAGES.items():
        work = BUILD / "pages" / language
        shutil.rmtree(work, ignore_errors=True)
        lay_out(language, work / "docs")
        config = work / "mkdocs.yml"
        config.write_text(config_of(language), encoding="utf-8")
        built = subprocess.run(
            [str(Path(sys.executable).with_name("zensical")), "build", "--strict", "-f", str(config)],
            cwd=work,
            env=os.environ | {"NO_COLOR": "1"},
        )
        if built.returncode:
            return built.returncode
        for page in (work / "out").rglob("*.html"):
            _write(page, page.read_text(encoding="utf-8").replace(SHIM, _up(page, work / "out") + OURS))
        shutil.copytree(work / "out", site / below, dirs_exist_ok=True)
    print(f"the site is in {site.relative_to(ROOT)}: open index.html, or   python -m http.server -d build/site")
    return 0


if __name__ == "__main__":
    sys.exit(main())
