"""Dockerfile, compose file, workflow and templates: read by a program, as no container is built here.

What the Dockerfile installs is executed by test_package.py, nightly.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from duoka import __version__
from duoka import cli as frame

ROOT = Path(__file__).parents[2]
KNOWN = ("ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "ENTRYPOINT", "CMD")


def instructions() -> list[tuple[str, str]]:
    """(word, the rest) of each instruction, lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(line.split(None, 1)[0], line.split(None, 1)[1].strip()) for line in lines]


def read_yaml(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_the_dockerfile_ends_without_root_and_copies_what_is_there() -> None:
    found = instructions()
    assert {word for word, _ in found} <= set(KNOWN)
    assert [rest for word, rest in found if word == "USER"] == ["duoka"], "the last stage must not be root's"
    assert [rest.split()[0] for word, rest in found if word == "FROM"] == ["${BASE}", "${BASE}"]
    for word, rest in found:
        if word == "COPY" and "--from" not in rest:
            missing = [name for name in shlex.split(rest)[:-1] if not (ROOT / name).exists()]
            assert not missing, f"the Dockerfile copies what is not there: {missing}"


def test_both_nodes_of_the_compose_file_type_what_duoka_takes() -> None:
    services = read_yaml("compose.yaml")["services"]
    assert set(services) == {"node1", "node2"}
    train = frame.cli.get_command(None, "train")  # type: ignore[attr-defined]
    for name, service in services.items():
        word, *rest = service["command"]
        context = train.make_context(word, list(rest))
        assert word == "train" and (ROOT / context.params["config"]).is_file()
        assert context.params["meet"] == "node1:29500" and service["hostname"] == name
        folders = [volume.split(":")[1] for volume in service["volumes"]]
        assert "/home/duoka/jobs/runs" in folders, "nodes need one disk for their checkpoints"


def test_the_public_workflow_does_what_ci_does() -> None:
    workflow = read_yaml(".github/workflows/ci.yml")
    typed = [step.get("run") for job in workflow["jobs"].values() for step in job["steps"]]
    assert "bash .ci/run" in typed and "make nightly" in typed and "make dist" in typed
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", text, flags=re.MULTILINE))
    for line in filter(None, typed):
        if line.startswith("make "):
            words = re.sub(r"\$\{\{.*?\}\}", "x", line).split()[1:]
            assert {word for word in words if "=" not in word} <= targets, line
            assert all(
                re.search(rf"^{word.partition('=')[0]} \??:?=", text, re.MULTILINE) for word in words if "=" in word
            )
    for ends in workflow["jobs"]["versions"]["strategy"]["matrix"]["include"]:
        assert (ROOT / ends["constraints"]).exists()


def test_templates_ask_for_what_duoka_prints() -> None:
    for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")):
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        if path.name != "config.yml":
            assert form["name"] and form["description"] and all(one["type"] == "textarea" for one in form["body"])
    assert "duoka env" in (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text(encoding="utf-8")


def test_the_version_is_the_same_wherever_it_is_written() -> None:
    assert read_yaml("CITATION.cff")["version"] == __version__
    assert f"duoka-{__version__}-py3-none-any.whl" in (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
