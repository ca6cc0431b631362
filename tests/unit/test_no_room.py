"""A disk that takes no more is said to be one, whoever found it out: libraries raise kinds of their own for it.

The limit of a file's size (ulimit -f) is a full disk that a test can have.
"""

import contextlib
import errno
import os
import resource
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from tiny import write_conversations, write_tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from duoka import cli
from duoka.cli import find_known_fault
from duoka.errors import ConfigError, StorageError
from duoka.process.no_room import disk_error

LIMIT = 4096


@contextlib.contextmanager
def small_files(limit=LIMIT):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write_with_python(path):
    path.write_bytes(bytes(10 * LIMIT))


def write_with_safetensors(path):
    save_file({"a": torch.zeros(10 * LIMIT)}, path)


def write_with_torch(path):
    torch.save({"a": torch.zeros(10 * LIMIT)}, path)


def write_with_tokenizers(path):
    Tokenizer(WordLevel({str(number): number for number in range(LIMIT)}, unk_token="0")).save(str(path))


@pytest.mark.parametrize("write", [write_with_python, write_with_safetensors, write_with_torch, write_with_tokenizers])
def test_what_writes_too_much_is_a_storage_error_and_no_bug(write, tmp_path):
    with small_files(), pytest.raises(Exception) as caught:
        write(tmp_path / "file")
    known = find_known_fault(caught.value)
    assert isinstance(known, StorageError) and known.exit_code == 6
    if write is not write_with_torch:  # torch does not tell why
        with small_files():
            assert "ulimit -f" in str(find_known_fault(caught.value))


def test_a_full_disk_is_told_as_such_by_rust_too():
    said = "Error while serializing: I/O error: No space left on device (os error 28)"
    known = find_known_fault(type("SafetensorError", (Exception,), {})(said))
    assert isinstance(known, StorageError) and "no space left" in str(known) and "free some space" in str(known)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("(os error 28)"),  # words of a user, perhaps
        Exception("no such file (os error 2)"),
        RuntimeError("inline_container.cc: file not found"),
        ConfigError("a message with (os error 28)"),
        OSError(errno.EACCES, os.strerror(errno.EACCES)),
        KeyboardInterrupt(),
    ],
)
def test_other_errors_are_no_matter_of_room(error):
    assert disk_error(error) is None


@pytest.mark.parametrize("line", ["export MODEL -o out", "data tokenizer texts.jsonl --out out"])
def test_a_command_whose_file_is_too_large_says_so_and_leaves_nothing(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = line.split()
    if "MODEL" in words:
        words[words.index("MODEL")] = str(write_tiny_model(tmp_path / "tiny"))
    else:
        write_conversations(tmp_path / "texts.jsonl", 20)
    there = sorted(path.name for path in tmp_path.iterdir())
    with small_files():
        assert cli.run(words) == 6
    said = capsys.readouterr().err
    assert "ulimit -f" in said and "Traceback" not in said, said
    assert sorted(path.name for path in tmp_path.iterdir()) == there, "half a result was left"


def test_a_first_config_that_finds_no_room_leaves_no_empty_file(tmp_path, monkeypatch, capsys):
    """The next try was refused: the empty file existed, and init overwrites nothing."""
    monkeypatch.chdir(tmp_path)
    with small_files(100):
        assert cli.run(["init", "first.yaml"]) == 6
    said = capsys.readouterr().err
    assert "cannot write first.yaml" in said and "ulimit -f" in said, said
    assert cli.run(["init", "first.yaml"]) == 0


@pytest.mark.parametrize("line", ["plan sft.yaml --html", "data inspect sft.yaml --html"])
def test_a_page_goes_where_it_is_asked_for_or_it_is_said_why_not(line, tmp_path, monkeypatch, capsys):
    """A folder that was not there was a bug."""
    monkeypatch.chdir(tmp_path)
    model, data = write_tiny_model(tmp_path / "tiny"), write_conversations(tmp_path / "a.jsonl", 4)
    (tmp_path / "sft.yaml").write_text(f"model: {model}\ndata: {{train: [{data}]}}\n", encoding="utf-8")
    assert cli.run([*line.split(), "new/page.html"]) == 0
    assert "<!doctype html>" in (tmp_path / "new" / "page.html").read_text(encoding="utf-8")
    assert cli.run([*line.split(), "a.jsonl/page.html"]) == 6
    said = capsys.readouterr().err
    assert "cannot write a.jsonl/page.html" in said and "Traceback" not in said, said


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_words_that_found_no_room_are_a_storage_error_and_never_cut_in_silence(unbuffered, tmp_path):
    """With PYTHONUNBUFFERED, as in containers, half a page was written with exit code 0; without it Python left with
    120 and an error of its own."""
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open(tmp_path / "out", "w") as out:
        done = subprocess.run(
            [sys.executable, "-m", "duoka", "--help"], stdout=out, stderr=subprocess.PIPE, env=env, text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
        )  # fmt: skip
    assert done.returncode == 6 and "ulimit -f" in done.stderr, (done.returncode, done.stderr)
    assert "ignored" not in done.stderr
