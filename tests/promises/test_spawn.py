"""`duoka.spawn(fn, args, nprocs)`: mp.spawn, with ranks that meet by themselves and failures that name the rank."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import duoka
from duoka.errors import ConfigError, WorkerFailed

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "guides"))

from spawned import work  # noqa: E402  (fresh processes find it where the path leads)


def nobody_is_left() -> bool:
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # what another test left may end, or be a zombie, while it is looked at
            if "spawn_main" in " ".join(child.cmdline()):
                return False
    return True


def test_ranks_get_their_arguments_meet_by_themselves_and_are_given_back(tmp_path: Path) -> None:
    spawned = duoka.spawn(work, args=(str(tmp_path), "well"), nprocs=2, join=False)
    assert len(set(spawned.pids())) == 2 and spawned.join(timeout=0.0) is False
    assert spawned.join() is True and spawned.join() is True
    assert {path.name for path in tmp_path.iterdir()} == {"rank-0", "rank-1"}
    for rank in (0, 1):
        mine, total, place = (tmp_path / f"rank-{rank}").read_text().split(" ", 2)
        assert (mine, total) == (str(rank), "3"), "1 + 2 over both ranks"
        assert place.startswith(f"(True, {rank}, {rank}, 2)") and not place.endswith("None")
    assert "WORLD_SIZE" not in os.environ and nobody_is_left()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", ["rank 1 of 2 raised ValueError: three rows, not four", 'raise ValueError("three rows, not four")']),
        pytest.param("kill", ["rank 1 of 2 was ended by SIGKILL"], marks=pytest.mark.nightly),
        pytest.param("leave", ["rank 1 of 2 was done", "others still waited for it"], marks=pytest.mark.nightly),
        ("sleep", ["rank 1 of 2 raised ValueError: nobody waits for rank 0"]),
    ],
)
def test_the_rank_that_failed_is_named_and_the_others_are_ended(tmp_path: Path, how: str, words: list[str]) -> None:
    with pytest.raises(WorkerFailed) as caught:
        duoka.spawn(work, args=(str(tmp_path), how), nprocs=2)
    said = str(caught.value)
    assert all(word in said for word in words) and said.count("Traceback") <= 1, said
    assert nobody_is_left()


def test_a_script_that_spawns_shows_the_traceback_once_and_fails(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src")}
    command = [sys.executable, str(HERE / "guides" / "spawned.py"), str(tmp_path), "raise"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 1 and "after" not in done.stdout
    assert done.stderr.count("in work\n") == 1 and "worker failed: rank 1 of 2 raised ValueError" in done.stderr


def _is_main_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> object:
    def cell(rank: int) -> None: ...

    cell.__module__, cell.__qualname__ = "__main__", "cell"
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    return cell


def test_what_cannot_be_spawned_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="nprocs is 0"):
        duoka.spawn(work, nprocs=0)
    with pytest.raises(ConfigError, match="cannot be sent to fresh processes") as caught:
        duoka.spawn(lambda rank: None, nprocs=2)
    assert "top level" in str(caught.value)
    with pytest.raises(ConfigError, match="start_method"):
        duoka.spawn(work, nprocs=2, start_method="fork")
    with pytest.raises(ConfigError, match="notebook_launcher"):
        duoka.spawn(_is_main_in_a_notebook(monkeypatch), nprocs=2)
    place = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="rank 1 of a world of 2") as caught:
        duoka.spawn(work, nprocs=2)
    assert "__main__" in str(caught.value)
    assert nobody_is_left()
