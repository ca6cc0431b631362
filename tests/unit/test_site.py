"""The site of docs/: pages made from the code say what it says, each page has its place, links hold.

Building it takes the extra duoka[site] and half a minute (`make site`, strict); what could break it is looked at here.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"site_{name}", ROOT / "site" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build, reference = load("build"), load("reference")


def test_pages_made_from_the_code_say_what_it_says() -> None:
    stale = [name for name, text in reference.pages().items() if (ROOT / "docs" / name).read_text("utf-8") != text]
    assert not stale, f"not what the code says: {stale}; write them:   python site/reference.py"


def test_the_chinese_page_of_keys_has_every_key_of_the_english_one() -> None:
    def keys(page: str) -> list[str]:
        return re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / page).read_text("utf-8"), flags=re.MULTILINE)

    assert len(keys("config.md")) > 150
    assert keys("config.zh-CN.md") == keys("config.md")


def test_every_page_has_one_place_in_the_navigation() -> None:
    placed = sorted(page for _, page in build.titles_and_pages(build.navigation()))
    assert placed == sorted(build.sources("en")), "site/pages.yml and docs/ differ"


def test_a_page_in_chinese_stands_beside_one_in_english() -> None:
    alone = [path.name for path in (ROOT / "docs").rglob(f"*{build.CHINESE}")
             if not path.with_name(path.name.removesuffix(build.CHINESE) + ".md").exists()]  # fmt: skip
    assert not alone


def test_a_page_in_chinese_has_the_headings_of_its_other_side() -> None:
    """Links to headings are turned by their order."""
    differ = {
        path.name: (len(build.anchors_of(path)), len(build.anchors_of(other)))
        for path in (ROOT / "docs").rglob(f"*{build.CHINESE}")
        if len(build.anchors_of(path))
        != len(build.anchors_of(other := path.with_name(path.name.removesuffix(build.CHINESE) + ".md")))
    }
    assert not differ


@pytest.mark.parametrize("language", ["en", "zh"])
def test_links_lead_somewhere_in_the_site(language: str, tmp_path: Path) -> None:
    build.lay_out(language, tmp_path)
    pages = list(tmp_path.rglob("*.md"))
    assert len(pages) > 40
    broken = [
        f"{page.relative_to(tmp_path)}: {match[2]}"
        for page in pages
        for match in build.LINK.finditer(build._without_code(page.read_text(encoding="utf-8")))
        if match[2]
        and ":" not in match[2]
        and not (
            (page.parent / match[2]).exists()
            and (not match[3] or match[3][1:] in build.anchors_of(page.parent / match[2]))
        )
    ]
    assert not broken


def test_the_other_side_of_a_page_is_where_its_link_leads(tmp_path: Path) -> None:
    for language, below in build.LANGUAGES.items():
        build.lay_out(language, tmp_path / below)
    for page in ("index", "guides/ddp", "howto/lora"):
        there = re.search(r'class="side" href="([^"]+)"', (tmp_path / f"{page}.md").read_text(encoding="utf-8"))
        assert there, page
        other = (tmp_path / page).parent / there[1].replace(".html", ".md")
        assert other.exists(), page
        back = re.search(r'class="side" href="([^"]+)"', other.read_text(encoding="utf-8"))
        assert back and (other.parent / back[1].replace(".html", ".md")).resolve() == (tmp_path / f"{page}.md"), page


def test_a_link_to_a_heading_leads_to_the_same_heading_in_chinese() -> None:
    told = "see [it](faults.md#machines-that-come-and-go)"
    assert build.mended(told, "x.md", "docs/x.md", "en") == told
    assert build.mended(told, "x.md", "docs/x.md", "zh") == "see [it](faults.md#会走会回来的机器)"


def test_the_generator_is_given_markdown_that_it_reads_as_we_do() -> None:
    told = build.in_the_generators_markdown
    assert told("why:\n- one\n  more\n- two\n") == "why:\n\n- one\n  more\n- two\n"
    assert told("两行，\n一句。\nThen\nEnglish\n") == "两行，一句。\nThen\nEnglish\n"
    assert told("```yaml other\na:\n- 一\n二\n```\n") == "```yaml\na:\n- 一\n二\n```\n"


@pytest.mark.nightly
@pytest.mark.skipif(
    not shutil.which("zensical", path=str(Path(sys.executable).parent)), reason="pip install duoka[site]"
)
def test_the_site_is_built_whole_and_asks_nothing_of_the_network() -> None:
    assert build.main() == 0
    pages = list((ROOT / "build" / "site").rglob("*.html"))
    assert len(pages) > 100
    asks = [
        page.name
        for page in pages
        if re.search(r'(?:src|href)="https?://[^"]+\.(?:js|css|woff2?)"', page.read_text("utf-8"))
    ]
    assert not asks, f"pages that fetch from elsewhere: {asks}"
