"""Where work is kept between runs, and temporary files: of a user without a home, and of a read-only system."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from duoka.cli import find_known_fault
from duoka.config.schema import ModelConfig
from duoka.errors import ConfigError, StorageError
from duoka.hub.models import ModelSource, known_folder
from duoka.plan.catalog import hardware_file, read_hardware
from duoka.process.no_room import no_room
from duoka.runs.cache import cache_folder, lend_temporary_folder
from duoka.runs.find import runs_in


def test_a_user_whom_the_system_does_not_know_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """`docker run --user 12345` without HOME: a traceback before."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(StorageError, match="no home folder: HOME is not set") as caught:
        cache_folder({})
    assert "set DUOKA_CACHE" in "".join(caught.value.lines())
    assert cache_folder({"DUOKA_CACHE": os.sep + "kept"}) == Path(os.sep) / "kept"
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/duoka")


def test_a_home_that_is_none_has_no_measurements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """HOME=/dev/null, as system users have it, refused every plan; without HOME the current folder was taken for it."""
    monkeypatch.delenv("DUOKA_HARDWARE", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", os.devnull)
    assert read_hardware() is None
    monkeypatch.delenv("HOME")
    assert hardware_file().is_absolute()
    (tmp_path / "hardware.json").mkdir()
    with pytest.raises(ConfigError, match="measure again"):
        read_hardware(tmp_path / "hardware.json")


def test_a_user_without_a_home_keeps_measurements_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """They went to a folder named ~ in the current one."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.delenv("HOME", raising=False)
    assert hardware_file({"DUOKA_CACHE": "/kept"}) == Path("/kept/hardware.json")
    assert hardware_file({"XDG_CONFIG_HOME": "/x"}) == Path("/x/duoka/hardware.json")
    assert read_hardware(hardware_file({})) is None


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A container's root that nobody may write to, and one folder of this test's that everybody may."""
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path).startswith(str(tmp_path)) and real(path, mode))


@pytest.mark.usefixtures("read_only")
def test_temporary_files_lie_in_the_cache_where_nothing_else_can_be_written(tmp_path: Path) -> None:
    """Torch's import ended in a traceback, after the run was prepared."""
    env = {"DUOKA_CACHE": str(tmp_path / "cache"), "TMPDIR": "/no/such"}
    lend_temporary_folder(env)
    assert env["TMPDIR"] == str(tmp_path / "cache" / "tmp") and (tmp_path / "cache" / "tmp").is_dir()
    (tmp_path / "own").mkdir()
    given = {"DUOKA_CACHE": str(tmp_path / "other"), "TMPDIR": str(tmp_path / "own")}
    lend_temporary_folder(given)
    assert given["TMPDIR"] == str(tmp_path / "own") and not (tmp_path / "other").exists()


def test_where_there_is_a_place_nothing_is_set(tmp_path: Path) -> None:
    env = {"DUOKA_CACHE": str(tmp_path / "cache"), "TMP": str(tmp_path)}
    lend_temporary_folder(env)
    assert "TMPDIR" not in env and not (tmp_path / "cache").exists()


def test_no_place_for_temporary_files_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "none")])
    monkeypatch.setattr(tempfile, "tempdir", None)
    with pytest.raises(FileNotFoundError) as caught:
        tempfile.mkdtemp()
    fault = find_known_fault(caught.value)
    assert isinstance(fault, StorageError) and "set TMPDIR" in str(fault)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_cache_that_cannot_be_written_is_named(number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of one that is another user's there was a traceback; of a read-only one "free some space"."""
    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path))
    refused = OSError(number, os.strerror(number), str(tmp_path / "splits" / "a.lock"))
    fault = find_known_fault(refused)
    assert isinstance(fault, StorageError) and f"cache folder {tmp_path}" in fault.what
    assert "set DUOKA_CACHE" in (fault.fix or "")
    elsewhere = find_known_fault(OSError(number, os.strerror(number), "/data/a"))
    assert isinstance(elsewhere, StorageError) and "DUOKA_CACHE" not in str(elsewhere)
    assert "/data/a" in "".join(elsewhere.lines()), "a colleague's run or model was a bug of duoka"


def test_a_colleague_s_run_is_none_of_the_runs_in_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One folder that this user may not enter ended `duoka runs` and the board. (Who tests may be root.)"""
    for name in ("closed", "open"):
        (tmp_path / name / "events").mkdir(parents=True)
    real = Path.is_dir
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "closed")

    def look(path: Path) -> bool:
        if path.parent.name == "closed":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path)

    monkeypatch.setattr(Path, "is_dir", look)
    assert [run.path.name for run in runs_in(tmp_path)] == ["open"]


def test_models_in_another_user_s_home_are_not_downloaded_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """HOME=/root in a container that runs as somebody else: a traceback instead of why nothing could be fetched."""

    def refuse(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(Path, "is_file", refuse)
    monkeypatch.setattr("duoka.hub.models.find_model", lambda model, base: ModelSource(hub_id="a/b"))
    assert known_folder(ModelConfig(name="a/b"), tmp_path) is None


def test_a_read_only_disk_has_room_enough() -> None:
    fault = no_room(OSError(errno.EROFS, "Read-only file system", "/data/a"))
    assert fault.fix == "mount it for writing, or write elsewhere"
    assert "dmesg" in no_room(OSError(errno.EIO, "Input/output error", "/data/a")).fix, "room is not what it lacks"
