"""Where work is kept between runs, and temporary files: of a user without a home, and of a read-only system."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from duoka.cli import find_known_fault
from duoka.errors import StorageError
from duoka.process.no_room import no_room
from duoka.runs.cache import cache_folder, lend_temporary_folder


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
    elsewhere = OSError(number, os.strerror(number), "/data/a")
    assert "DUOKA_CACHE" not in str(find_known_fault(elsewhere))


def test_a_read_only_disk_has_room_enough() -> None:
    fault = no_room(OSError(errno.EROFS, "Read-only file system", "/data/a"))
    assert fault.fix == "mount it for writing, or write elsewhere"
