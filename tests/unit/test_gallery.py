"""examples/: each YAML loads with its data, says why, types lines that parse, and has its row in the gallery."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_pages import fault_of_line

from duoka.cluster.pipeline.nodes import Nodes
from duoka.config.load import load_config
from duoka.config.pipeline import read_pipeline
from duoka.data.read.registry import check_data

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
PAGE = ROOT / "docs" / "gallery.md"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_whole_and_says_why(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = path.read_text(encoding="utf-8")
    if "\npipeline:\n" in text:
        pipeline = read_pipeline(path.relative_to(ROOT))
        assert Nodes(pipeline, tmp_path, {}).faults == [] and str(pipeline.output) == f"runs/{path.stem}"
    else:
        assert load_config(path.relative_to(ROOT), checks=(check_data,)).config.output == f"runs/{path.stem}"
    assert "# Why so:" in text and sum(line.startswith("#") for line in text.splitlines()) >= 9
    # The command ends where its explanation begins, three spaces later.
    lines = [re.split(r"\s{3,}", line)[0] for line in re.findall(r"^#   (duoka .*)$", text, flags=re.MULTILINE)]
    assert lines, "no command"
    faults = {line: fault for line in lines if (fault := fault_of_line(line))}
    assert not faults, f"lines that duoka refuses: {faults}"


def test_the_gallery_has_a_row_for_every_example() -> None:
    rows = re.findall(r"^\| \[([a-z0-9_]+)\.yaml\]", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(rows) == [path.stem for path in EXAMPLES]


@pytest.mark.parametrize(("language", "name"), [("en", "gallery.md"), ("zh", "gallery.zh-CN.md")])
def test_the_gallery_is_what_its_script_writes(language: str, name: str) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "gallery.py", language], capture_output=True, text=True, check=True
    )
    made = PAGE.with_name(name).read_text(encoding="utf-8")
    assert done.stdout == made, f"python benchmarks/gallery.py {language} > docs/{name}"
