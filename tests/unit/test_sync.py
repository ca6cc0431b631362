"""What `duoka sync` brings, what it refuses, and that nothing is ever written outside of the folder.

The connection is a shell of this machine in place of ssh; real ones are tried in tests/cluster.
"""

from __future__ import annotations

import io
import os
import subprocess
from pathlib import Path

import pytest

from duoka.cluster.node_receive import Escape, digest_of, find_wanted, place_of, receive
from duoka.cluster.sync import Cargo, bring, pack, write_lock
from duoka.config.hosts import Host
from duoka.errors import Faults

LIMIT = 1 << 20


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    (home / "data").mkdir(parents=True)
    (home / "src").mkdir()
    (home / "src" / "mine.py").write_text("print('hello')\n")
    (home / "start.sh").write_text("#!/bin/sh\n")
    (home / "start.sh").chmod(0o755)
    (home / "data" / "chats.jsonl").write_text('{"text": "你好"}\n' * 9)
    (home / ".env").write_text("HF_TOKEN=secret\n")
    (home / "runs" / "sft").mkdir(parents=True)
    (home / "runs" / "sft" / "weights.bin").write_bytes(b"x" * 5000)
    return home


def test_what_git_ignores_is_left_and_what_the_config_names_is_taken(home: Path) -> None:
    """Hidden files and the output folder are never taken."""
    plain = {"src/mine.py", "start.sh", "data/chats.jsonl"}
    assert set(pack(home, [], home / "runs", LIMIT).files) == plain
    (home / ".gitignore").write_text("data/\n*.log\n")
    (home / "big.log").write_text("no\n")
    subprocess.run(["git", "init", "-q", str(home)], check=True)
    assert set(pack(home, [], home / "runs", LIMIT).files) == plain - {"data/chats.jsonl"}
    assert set(pack(home, [str(home / "data")], home / "runs", LIMIT).files) == plain
    assert set(pack(home, ["data/chats.jsonl", "../other.jsonl"], home / "runs", LIMIT).files) == plain


def test_too_much_is_refused_with_the_figure_and_the_largest(home: Path) -> None:
    (home / "data" / "huge.bin").write_bytes(b"x" * 3_000_000)
    with pytest.raises(Faults) as caught:
        pack(home, [], home / "runs", LIMIT)
    assert "4 files of 2.86 MiB" in str(caught.value) and "data/huge.bin (2.86 MiB)" in str(caught.value)


def test_nothing_from_outside_is_taken(home: Path, tmp_path: Path) -> None:
    """Neither by a path nor by a link; both are said."""
    (tmp_path / "secret").write_text("key\n")
    (home / "link.txt").symlink_to(tmp_path / "secret")
    (home / "folder").symlink_to(tmp_path)
    cargo = pack(home, [str(tmp_path / "secret"), "folder"], home / "runs", LIMIT)
    assert set(cargo.files) == {"src/mine.py", "start.sh", "data/chats.jsonl"}
    said = "\n".join(cargo.left_out)
    assert (
        "secret is not below" in said and "link.txt is a link to" in said and f"{home / 'folder'} is not below" in said
    )


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "", "a//b", "./x", "a\\..\\x", "a/\0b", "..", "out/x"])
def test_a_receiver_writes_nowhere_else(name: str, tmp_path: Path) -> None:
    """`out` is a link to a folder outside, which was there before."""
    folder, other = tmp_path / "folder", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    (folder / "out").symlink_to(other)
    with pytest.raises(Escape):
        place_of(str(folder), name)
    with pytest.raises(Escape):
        find_wanted(str(folder), {name: [1, ""]})
    stream = io.BytesIO(b"0123456789next")
    with pytest.raises(Escape):
        receive(stream, str(folder), name, 10, False)
    assert stream.read() == b"next", "what follows is found"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder", "other", "out"]


def test_a_link_in_a_files_place_is_replaced_and_half_a_file_is_none(tmp_path: Path) -> None:
    folder, target = tmp_path / "folder", tmp_path / "target"
    folder.mkdir()
    target.write_text("mine")
    (folder / "name").symlink_to(target)
    assert find_wanted(str(folder), {"name": [4, digest_of(str(target))]}) == ["name"]
    receive(io.BytesIO(b"yours"), str(folder), "name", 5, False)
    assert target.read_text() == "mine" and (folder / "name").read_text() == "yours"
    with pytest.raises(OSError, match="in the middle"):
        receive(io.BytesIO(b"you"), str(folder), "name", 5, False)
    assert os.listdir(folder) == ["name"] and (folder / "name").read_text() == "yours"


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of ssh: what it would run there runs here; a machine called away cannot be reached."""
    script = tmp_path / "shell"
    script.write_text(
        '#!/bin/sh\nfor word; do last=$word; done\ncase "$*" in *" away "*) echo "No route" >&2; exit 255;; esac\n'
        'eval "$last"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("DUOKA_SSH", str(script))


def test_files_arrive_as_they_are_and_only_changes_are_sent_again(home: Path, tmp_path: Path, shell: None) -> None:
    there = tmp_path / "there"
    (home / "data" / "long.bin").write_bytes(os.urandom(700_001))
    cargo = pack(home, [], home / "runs", LIMIT)
    (one,) = bring([Host("b")], cargo, str(there))
    assert (one.num_files, one.num_alike) == (4, 0) and one.num_bytes == cargo.num_bytes
    for name in cargo.files:
        assert (there / name).read_bytes() == (home / name).read_bytes()
    assert os.access(there / "start.sh", os.X_OK) and not os.access(there / "src" / "mine.py", os.X_OK)
    assert not (there / ".env").exists()
    (there / "notes.txt").write_text("theirs")
    (there / "src" / "mine.py").write_text("print('hallo')\n")  # as long as ours
    (one,) = bring([Host("b")], cargo, str(there))
    assert (one.num_files, one.num_alike) == (1, 3) and (there / "notes.txt").read_text() == "theirs"
    assert (there / "src" / "mine.py").read_text() == "print('hello')\n"


def test_all_machines_faults_are_one_message(home: Path, tmp_path: Path, shell: None) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "src").write_text("a file where a folder should be")
    cargo = pack(home, [], home / "runs", LIMIT)
    with pytest.raises(Faults) as caught:
        bring([Host("b"), Host("away")], cargo, str(there))
    assert "away cannot be reached" in str(caught.value)
    with pytest.raises(Faults) as caught:
        bring([Host("b")], cargo, str(there))
    assert "b: " in str(caught.value) and "src" in str(caught.value)


def test_a_file_that_shrinks_meanwhile_is_said(home: Path, tmp_path: Path, shell: None) -> None:
    cargo = pack(home, [], home / "runs", LIMIT)
    grown = Cargo(cargo.folder, {"start.sh": (10_000, "0")})
    with pytest.raises(Faults) as caught:
        bring([Host("b")], grown, str(tmp_path / "there"))
    assert "became shorter" in str(caught.value)
    assert not list((tmp_path / "there").glob("*")), "half a file is none"


def test_the_lock_names_the_packages(tmp_path: Path) -> None:
    lines = write_lock(tmp_path).read_text().splitlines()
    assert any(line.startswith("torch==") for line in lines) and not any(line.startswith("duoka==") for line in lines)
