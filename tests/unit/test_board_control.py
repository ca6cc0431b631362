"""What `duoka board --control` writes, refuses, starts and hands through; the pages are in tests/web."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from told_control import ToldControl
from written_runs import write_run

from duoka.cli.act import Acts
from duoka.cli.act_draft import draft_yaml, form_fields
from duoka.config.catalog import known_keys
from duoka.config.load import load_config
from duoka.errors import DoesNotFit, DuokaError
from duoka.watch.board import Board
from duoka.watch.control import Draft
from duoka.watch.server import BoardServer

TYPED = {"model.name": "demo", "data.train": "[identity]"}


def test_the_form_has_every_key_that_a_file_may_have() -> None:
    """Fields of the schema, or parts of one: a list's blocks are typed as YAML in the list's field."""
    names = {field["name"] for field in form_fields()["fields"]}
    missing = {
        name for name, key in known_keys().items()
        if key.section is None and name not in names and not any(name.startswith(f"{one}.") for one in names)
    }  # fmt: skip
    assert missing == {"output"}, "the run's name says where it lies"
    assert set(form_fields()["first"]) <= names
    chosen = {field["name"]: field["choices"] for field in form_fields()["fields"]}
    assert chosen["model.quantization"] == ["none", "nf4", "fp4"] and chosen["lora.targets"] == []
    assert all(len(field["help"]) == 2 and all(field["help"]) for field in form_fields()["fields"])


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"optim.lr": "2e-4"}, {"optim": {"lr": "2e-4"}}),  # PyYAML's own words; duoka reads the number
        ({"lora": "true"}, {"lora": {}}),
        ({"lora": "true", "lora.rank": "4"}, {"lora": {"rank": 4}}),
        ({"lora.rank": " "}, {}),
        ({"log.alert.command": "say: it # now"}, {"log": {"alert": {"command": "say: it # now"}}}),
        ({"data.folder": 'a\nb: {"'}, {"data": {"folder": 'a\nb: {"'}}),
        ({"log.to": "[tensorboard]"}, {"log": {"to": ["tensorboard"]}}),
        ({"data.folder": "多卡 🎉"}, {"data": {"folder": "多卡 🎉"}}),
        ({"data.folder": "{a: "}, {"data": {"folder": "{a:"}}),
    ],
)
def test_what_is_typed_stands_in_the_file_and_nothing_else_does(values: dict[str, str], wanted: dict[str, Any]) -> None:
    whole = {"model": {"name": "demo"}, "data": {"train": ["identity"]}}
    for block, keys in wanted.items():
        whole[block] = {**whole.get(block, {}), **keys}
    assert yaml.safe_load(draft_yaml({**TYPED, **values})) == whole


def test_a_draft_means_what_its_file_means(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(draft_yaml({**TYPED, "optim.lr": "2e-4", "lora.rank": "4", "train.epochs": ".5"}))
    config = load_config(str(tmp_path / "a.yaml")).config
    assert config.lora is not None
    assert (config.optim.lr, config.lora.rank, config.train.epochs) == (2e-4, 4, 0.5)
    for key in ("output", "nonsense", "lora.rnk"):
        with pytest.raises(DuokaError):
            draft_yaml({**TYPED, key: "1"})


def test_a_plan_says_fits_does_not_fit_or_what_is_wrong() -> None:
    acts = Acts()
    assert acts.plan(Draft("a", {**TYPED, "lora": "true"}))["plan"]["verdict"] == "fits"
    large = {"model.depth": "300", "model.tokenizer": "demo", "data.train": "[identity]"}
    assert acts.plan(Draft("a", large))["plan"]["verdict"] == "does not fit"
    faults = acts.plan(Draft("a", {**TYPED, "optim.lr": "fast"}))["faults"]
    assert any("optim.lr must be a number" in line for line in faults) and not any("/tmp" in line for line in faults)


def test_nothing_is_started_over_another_run_without_a_fit_or_outside_the_folder(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", 5)
    acts, runs = Acts(), tmp_path / "runs"
    for name in ("", "../b", "b/c", ".b", "/tmp/b", "b\nc", "x" * 200):
        with pytest.raises(DuokaError, match="is no name"):
            acts.start(runs, Draft(name, TYPED))
    with pytest.raises(DuokaError, match="there is a a in"):
        acts.start(runs, Draft("a", TYPED))
    with pytest.raises(DuokaError, match="is one run"):
        acts.start(runs / "a", Draft("b", TYPED))
    with pytest.raises(DuokaError, match="has faults"):
        acts.start(runs, Draft("b", {**TYPED, "optim.lr": "fast"}))
    with pytest.raises(DoesNotFit):
        acts.start(runs, Draft("b", {"model.depth": "300", "model.tokenizer": "demo", "data.train": "[identity]"}))
    with pytest.raises(DuokaError, match="not known"):
        acts.export(Board(runs).find("a"), "../x")
    (runs / "a" / "export-folder").mkdir()
    with pytest.raises(DuokaError, match="nothing is overwritten"):
        acts.export(Board(runs).find("a"), "folder")
    assert sorted(one.name for one in runs.iterdir()) == ["a"] and acts.jobs() == []


class _Model(BaseHTTPRequestHandler):
    """Says what it was asked, in pieces, without an end that a length tells."""

    def do_GET(self) -> None:
        self._answer(self.path.encode())

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["Content-Length"])))

    def _answer(self, text: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Security-Policy", "default-src 'none'")
        self.end_headers()
        for piece in (self.headers.get("Authorization", "").encode(), b" ", text):
            self.wfile.write(piece)
            self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[BoardServer, ToldControl, int]]:
    (tmp_path / "runs").mkdir()
    model = ThreadingHTTPServer(("127.0.0.1", 0), _Model)
    told = ToldControl(chat=(model.server_address[1], "the-key"))
    board = BoardServer(Board(tmp_path / "runs"), control=told)
    threads = [threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.02}) for one in (model, board)]
    for thread in threads:
        thread.start()
    yield board, told, model.server_address[1]
    for one in (model, board):
        one.shutdown()
        one.server_close()
    for thread in threads:
        thread.join()


def ask(board: BoardServer, method: str, path: str, body: str = "", **head: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", board.port, timeout=30)
    connection.request(method, path, body.encode() or None, {"Authorization": f"Bearer {board.token}", **head})
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


def test_the_chat_is_handed_through_to_who_has_the_boards_token_and_to_its_pages_only(served) -> None:
    board, told, _ = served
    status, head, body = ask(board, "GET", "/chat")
    assert (status, body) == (200, b"Bearer the-key /") and head["Content-Security-Policy"] == "default-src 'none'"
    assert ask(board, "GET", "/v1/models")[2] == b"Bearer the-key /v1/models"
    asked = ask(board, "POST", "/v1/chat/completions", "你好" * 40_000)
    assert asked[0] == 200 and asked[2].endswith("你好".encode()) and len(asked[2]) > 200_000
    assert ask(board, "GET", "/chat", Authorization="Bearer wrong")[0] == 403
    assert ask(board, "POST", "/v1/chat/completions", "x", Origin="http://evil.example")[0] == 403
    assert ask(board, "POST", "/v1/chat/completions", "x", Origin=f"http://127.0.0.1:{board.port}")[0] == 200
    for path in ("/v1/adapters", "/v1/load_lora_adapter", "/metrics"):
        assert ask(board, "POST", path, "{}", **{"X-Duoka": "act"})[0] in (400, 404), "only what a chat needs"
    assert told.told == []


def test_a_start_needs_the_header_and_its_name_twice_and_no_strange_values(served) -> None:
    board, told, _ = served
    act = {"X-Duoka": "act"}
    good = {"run": "b", "confirm": "b", "values": {"model.name": "demo"}, "processes": 2}
    assert ask(board, "POST", "/api/start", json.dumps(good))[0] == 403
    for change in (
        {"confirm": "c"}, {"values": []}, {"values": {"a": 1}}, {"values": {"a": "x" * 5000}}, {"processes": -1},
        {"processes": "2"}, {"processes": 10**6},
    ):  # fmt: skip
        assert ask(board, "POST", "/api/start", json.dumps({**good, **change}), **act)[0] == 400, change
    assert ask(board, "POST", "/api/start", "[]", **act)[0] == 400 and told.told == []
    assert ask(board, "POST", "/api/start", json.dumps(good), **act)[0] == 200 and told.told == [("start", "b")]


@pytest.mark.timeout(60)
def test_a_server_that_was_started_for_a_program_ends_with_it() -> None:
    """Killed, not ended in peace: nothing of it could say goodbye."""
    child = (
        "import time; from duoka.process.lifeline import leave_with_starter\n"
        "leave_with_starter(); print('up', flush=True); time.sleep(50)"
    )
    parent = (
        "import os, subprocess, sys, time\n"
        "from duoka.process.lifeline import ENDS_WITH\n"
        f"code = {child!r}\n"
        "one = subprocess.Popen([sys.executable, '-c', code], env={**os.environ, ENDS_WITH: str(os.getpid())},"
        " stdout=subprocess.PIPE)\n"
        "one.stdout.readline(); print(one.pid, flush=True); time.sleep(50)\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    import psutil

    try:
        psutil.wait_procs([psutil.Process(pid)], timeout=30)
    except psutil.NoSuchProcess:
        return
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
