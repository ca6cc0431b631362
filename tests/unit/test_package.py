"""The wheel holds all that duoka reads at run time: it is built from an sdist here, without a network."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "duoka"
NEEDED = ("pyproject.toml", "README.md", "LICENSE")


def build(kind: str, source: Path, out: Path) -> Path:
    """Run setuptools' own hook, as pip does, in `source`."""
    program = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", program], cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = [path for path in out.iterdir() if path.suffix in (".whl", ".gz")]
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of the files of a wheel that was built from an sdist of this tree."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    shutil.copytree(PACKAGE, source / "src" / "duoka", ignore=shutil.ignore_patterns("__pycache__"))
    for name in NEEDED:
        shutil.copy(ROOT / name, source / name)
    for kind in ("sdist", "wheel"):
        (folder / kind).mkdir()
    sdist = build("sdist", source, folder / "sdist")
    with tarfile.open(sdist) as archive:
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # from Python 3.11.4 on
        archive.extractall(folder / "unpacked", **safe)  # type: ignore[arg-type]
    (unpacked,) = (folder / "unpacked").iterdir()
    with zipfile.ZipFile(build("wheel", unpacked, folder / "wheel")) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_every_file_of_the_package(wheel: set[str]) -> None:
    here = {path.relative_to(PACKAGE.parent).as_posix() for path in PACKAGE.rglob("*") if path.is_file()}
    here = {name for name in here if "__pycache__" not in name}
    assert sum(not name.endswith(".py") for name in here) > 15, "this test no longer finds pages, texts and tables"
    assert not here - wheel, f"files that pyproject.toml's package-data forgets: {sorted(here - wheel)}"


def test_the_wheel_holds_nothing_else(wheel: set[str]) -> None:
    strangers = [name for name in wheel if not name.startswith(("duoka/", "duoka-"))]
    assert not strangers, f"files that would be installed outside of duoka: {strangers}"
    assert any(name.endswith("entry_points.txt") for name in wheel), "the command duoka would be missing"


def test_the_page_has_a_row_for_every_extra() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = text.split("[project.optional-dependencies]")[1].split("\n\n")[0]
    extras = set(re.findall(r"^([a-z-]+) =", block, flags=re.MULTILINE))
    rows = set(
        re.findall(r"^\| `duoka\[([a-z-]+)\]`", (ROOT / "docs/install.md").read_text("utf-8"), flags=re.MULTILINE)
    )
    assert extras == rows


def install_step(environment: Path) -> str:
    """What the Dockerfile types to install duoka, into another folder."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if line.startswith("RUN") and "-m venv" in line]
    return line.removeprefix("RUN ").replace("/opt/duoka", str(environment))


def test_the_oldest_versions_are_those_that_pyproject_admits() -> None:
    """What `constraints-oldest.txt` installs is what the whole suite was run with (docs/install.md)."""
    block = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("\ndependencies = [")[2].partition("\n]")[0]
    admitted = dict(re.findall(r'"([\w-]+)>=([\d.]+)', block))
    lines = (ROOT / "constraints-oldest.txt").read_text(encoding="utf-8").splitlines()
    oldest = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert admitted and admitted.keys() == oldest.keys()
    assert all(f"{oldest[name]}.".startswith(f"{version}.") for name, version in admitted.items())


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_what_the_dockerfile_installs_works_without_the_repository(tmp_path: Path) -> None:
    """Needs a package index: some minutes of downloads, and the whole demo."""
    source, environment, here = tmp_path / "source", tmp_path / "env", tmp_path / "here"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in (*NEEDED, "MANIFEST.in", "constraints.txt"):
        shutil.copy(ROOT / name, source / name)
    step = install_step(environment).replace("python3 -m venv", f"{sys.executable} -m venv")
    subprocess.run(["sh", "-c", step], cwd=source, check=True, timeout=1800)
    shutil.rmtree(source)
    here.mkdir()
    env = {"PATH": f"{environment}/bin:/usr/bin:/bin", "HOME": str(tmp_path), "DUOKA_CACHE": str(tmp_path / "cache")}

    def type_line(line: str, code: int = 0) -> str:
        done = subprocess.run(line, shell=True, cwd=here, env=env, capture_output=True, text=True, timeout=1500)
        assert done.returncode == code, f"{line}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
        return done.stdout + done.stderr

    assert "Usage: duoka" in type_line("duoka --help")
    assert "_DUOKA_COMPLETE" in type_line("duoka completion bash")
    assert "installed" in type_line("duoka env") and str(environment) in type_line("duoka env --json").replace(
        "~", str(tmp_path)
    )
    assert "混合精度" in type_line("duoka explain zero --lang zh")
    assert "verdict  fits" in type_line("duoka new mine.yaml --on 1xRTX4090 < /dev/null")
    assert "median" in type_line("duoka plan --validate"), "the tables of published runs are there"
    assert "quantization" in type_line("duoka config schema")
    out = type_line("duoka demo")
    assert "The whole demo took" in out and "runs/demo.yaml" in out
    assert type_line("duoka report runs/demo -o page.html") and (here / "page.html").stat().st_size > 20_000
    for page in ("duoka.serve.api:chat.html", "duoka.watch:web/page.html"):
        package, _, name = page.partition(":")
        type_line(f"python -c \"from importlib.resources import files; (files('{package}') / '{name}').read_bytes()\"")


def test_every_target_of_the_makefile_can_be_made() -> None:
    text = (ROOT / "Makefile").read_text("utf-8")
    (targets,) = re.findall(r"^\.PHONY: (.*)$", text, re.M)
    for target in targets.split():
        assert re.search(rf"^{target}:.*  ## ", text, re.M), f"make {target} has no line of help"
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
