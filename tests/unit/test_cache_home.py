"""Where work is kept between runs, of a user that has no home."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from duoka.errors import StorageError
from duoka.runs.cache import cache_folder


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
