"""`duoka board` as a browser meets it: over HTTP, on run folders written by a script."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlencode

import pytest
from told_control import ToldControl
from written_runs import T0, event_line, loss_at, rank_line, step_line, write_run

from duoka.cli.act import go_on, stop
from duoka.errors import DuokaError
from duoka.runs.status import leader_identity
from duoka.watch.board import Asked, Board
from duoka.watch.columns import PARTS
from duoka.watch.heat import HeatMap
from duoka.watch.server import BoardServer

WEB = Path(__file__).parents[2] / "src" / "duoka" / "watch" / "web"


class Page:
    """A browser's requests."""

    def __init__(self, server):
        self.server = server
        self.head = {"Authorization": f"Bearer {server.token}"}

    def ask(self, path, method="GET", body=None, head=None, **words):
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=30)
        target = f"{path}?{urlencode(words)}" if words else path
        connection.request(method, target, body, self.head if head is None else head)
        answer = connection.getresponse()
        found = answer.status, dict(answer.getheaders()), answer.read()
        connection.close()
        return found

    def get(self, path, **words):
        status, _, body = self.ask(path, **words)
        assert status == 200, body
        return json.loads(body)

    def look(self, *runs, keys=("loss",), **words):
        """As a page does: what is still being read is asked for again."""
        while True:
            answer = self.get("/api/look", runs=json.dumps(runs), keys=json.dumps(keys), **words)
            if not answer["is_behind"]:
                return answer


@pytest.fixture
def serve(tmp_path):
    """Starts a server over tmp_path/runs; all are gone at the end."""
    servers = []

    def start(control=None):
        server = BoardServer(Board(tmp_path / "runs"), control=control)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        servers.append((server, thread))
        return Page(server)

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def runs(tmp_path):
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def test_only_who_has_the_token_is_answered_and_only_by_this_machines_names(runs, serve):
    write_run(runs / "a", 5)
    page = serve()
    for path in ("/", "/board.js", "/api/look", "/api/log?run=a&file=rank00000.log", "/report?run=a"):
        for head in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": f"duoka-board-{page.server.port}=x"}):
            status, _, body = page.ask(path, head=head)
            assert status == 403 and b"token" in body and b"begins" not in body
    for host in ("evil.example", "127.0.0.1.evil.example:80", "10.0.0.1"):
        assert page.ask("/api/look", head={**page.head, "Host": host})[0] == 403
    assert page.ask("/api/look", head={**page.head, "Host": "localhost:9000"})[0] == 200, "another port: ssh -L"
    assert page.ask("/?token=wrong", head={})[0] == 403
    status, head, _ = page.ask(f"/?token={page.server.token}", head={})
    assert status == 303 and head["Location"] == "/" and "HttpOnly" in head["Set-Cookie"]
    assert page.ask("/", head={"Cookie": head["Set-Cookie"].partition(";")[0]})[0] == 200
    assert page.server.server_address[0] == "127.0.0.1"


def test_no_answer_lets_a_page_ask_for_anything_outside(runs, serve):
    write_run(runs / "a", 5)
    page = serve()
    for path in ("/", "/board.js", "/chart.js", "/panels.js", "/words.js", "/board.css", "/api/look", "/nothing"):
        _, head, _ = page.ask(path)
        assert "default-src 'none'" in head["Content-Security-Policy"] and head["X-Content-Type-Options"] == "nosniff"
    status, head, body = page.ask("/report", run="a")
    assert status == 200 and "script-src" not in head["Content-Security-Policy"] and b"<svg" in body
    for file in WEB.iterdir():
        found = set(re.findall(r"https?://[^\"' )]+", file.read_text(encoding="utf-8")))
        assert found <= {"http://www.w3.org/2000/svg"}, f"{file.name} names {found}"


def test_files_of_the_future_do_not_keep_a_listed_run_young(tmp_path, monkeypatch):
    """After a clock was set back every look of the list began at 0 s, and such a run stood on top for ever."""
    run = write_run(tmp_path / "a", 5, total_steps=9, state="running", **leader_identity())
    ahead = time.time() + 7200

    def write(at):
        for path in (run.events / "run.jsonl", run.progress, run.status):
            if path.is_file():
                os.utime(path, (at, at))

    write(ahead)
    clock = [1000.0]
    stand_in = SimpleNamespace(time=time.time, monotonic=lambda: clock[0], thread_time=time.thread_time)
    monkeypatch.setattr("duoka.watch.board.time", stand_in)
    board, ages = Board(tmp_path), []
    for seconds in (0, 900, 5):
        clock[0] += seconds
        if seconds == 5:
            write(ahead + 60)
        ages.append(board.look(Asked())["runs"][0]["age_s"])
    assert ages == [0, 900, 0], "the last look found it written to anew"


def test_nothing_that_a_page_says_leads_out_of_the_folder(runs, tmp_path, serve):
    run = write_run(runs / "a", 5)
    write_run(tmp_path / "secret", 5)
    (tmp_path / "secret.log").write_text("secret words")
    (run.logs / "link.log").symlink_to(tmp_path / "secret.log")
    page = serve()
    for name in ("../secret", "/etc", "..", "a/../../secret", str(tmp_path / "secret"), "", "a/events"):
        assert page.ask("/api/log", run=name, file="rank00000.log")[0] == 404
        assert page.ask("/report", run=name)[0] == 404 and page.ask("/api/heat", run=name)[0] == 404
        assert "focus" not in page.look(focus=name)
    for file in ("../config.yaml", "link.log", "/etc/passwd", "../../../secret.log", ""):
        status, _, body = page.ask("/api/log", run="a", file=file)
        assert status == 404 and b"secret words" not in body
    for path in ("/../board.py", "/%2e%2e/board.py", "/web/page.html", "//etc/passwd", "/board.js/../../board.py"):
        assert page.ask(path)[0] == 404
    assert page.ask("/api/look", runs="not json")[0] == 400
    assert page.get("/api/log", run="a", file="rank00000.log")["text"] == "begins\ntrains 训练\n"


def test_curves_are_the_logs_numbers_by_step_tokens_and_time(runs, serve):
    write_run(runs / "a", 40)
    page = serve()
    rows = page.look("a")["series"]["a"]["curves"]["loss"]
    assert rows == [[step, pytest.approx(loss_at(step), rel=1e-5)] for step in range(1, 41)]
    by_tokens = page.look("a", axis="tokens")["series"]["a"]
    assert [row[0] for row in by_tokens["curves"]["loss"]] == [1000 * step for step in range(1, 41)]
    assert by_tokens["evals"][0][0] == 10_000 and by_tokens["marks"][1][:3] == ["eval", 10, 10_000]
    by_time = page.look("a", axis="time")["series"]["a"]["curves"]["loss"]
    assert [row[0] for row in by_time] == [0.5 * step for step in range(1, 41)]


@pytest.mark.parametrize("log", [0, 1])
def test_a_pixel_shows_the_mean_least_and_most_of_its_steps(runs, serve, log):
    """No spike is lost, whatever the width; zoomed into, each step comes out again."""
    run = write_run(runs / "a", 5000, ranks=1, rank_steps=5)
    with (run.events / "run.jsonl").open("a") as file:
        file.write(event_line("resume", 4000))
        for step in range(4001, 5001):
            spike = {4321: 50.0, 4322: None, 4777: -3.0}
            file.write(step_line(step, loss=spike.get(step, loss_at(step))))
    page = serve()
    rows = page.look("a", most=100, log=log)["series"]["a"]["curves"]["loss"]
    assert len(rows) <= 100 and 4700 < rows[-1][0] <= 5000
    assert max(row[3] for row in rows) == 50.0 and min(row[2] for row in rows) == -3.0
    for row in rows:
        assert row[2] <= row[1] <= row[3]
    before = [row for row in rows if row[0] < 4000]
    assert all(row[3] + 1e-4 >= loss_at(int(row[0])) >= row[2] - 1e-4 for row in before)
    zoomed = page.look("a", most=100, low=4318, high=4324)["series"]["a"]["curves"]["loss"]
    assert [tuple(row) for row in zoomed][4:6] == [(4321, 50.0), (4322, None)]


def test_an_answer_has_only_what_is_new(runs, serve):
    run = write_run(runs / "a", 10, state="running", **leader_identity())
    write_run(runs / "b", 10)
    page = serve()
    first = page.look("a", "b", focus="a")
    assert set(first["series"]) == {"a", "b"} and first["focus"]["step"] == 10 and first["next_s"] >= 2
    same = page.look("a", "b", focus="a", since=first["version"])
    assert "series" not in same and same["focus"]["age_s"] >= 0 and not same["focus"]["is_new"]
    with (run.events / "run.jsonl").open("a") as file:
        file.write(step_line(11) + '{"v": 1, "type": "st')
    after = page.look("a", "b", focus="a", since=first["version"])
    assert after["series"]["a"]["curves"]["loss"][-1][0] == 11 and after["focus"]["step"] == 11
    assert {one["name"]: one["state"] for one in after["runs"]} == {"a": "running", "b": "done"}


def test_restarts_clocks_that_differ_and_numbers_that_are_none(runs, serve):
    run = write_run(runs / "a", 30, state="running", **leader_identity())
    with (run.events / "run.jsonl").open("a") as file:
        file.write(event_line("resume", 20, t=T0 - 9999, reason="a batch was left out"))
        for step in range(21, 26):  # on a machine whose clock is hours behind
            file.write(step_line(step, t=T0 - 9999 + step, loss=None if step == 22 else 1.0))
        file.write('{"v": 1, "type": "eval", "t": 1, "step": 25, "loss": NaN}\n')
    page = serve()
    answer = page.look("a", focus="a", axis="time")
    rows = answer["series"]["a"]["curves"]["loss"]
    assert len(rows) == 25 and [row[0] for row in rows] == sorted(row[0] for row in rows), "time never runs back"
    assert rows[21] == [11.0, None] and rows[24] == [12.5, 1.0]
    assert ["resume", 20, 10.0, "a batch was left out"] in answer["series"]["a"]["marks"]
    assert [answer["focus"][key] for key in ("num_restarts", "num_rollbacks", "num_lost")] == [0, 1, 10]


def test_runs_that_come_move_and_are_replaced(runs, serve):
    page = serve()
    assert page.look("a", focus="a")["runs"] == []
    run = write_run(runs / "a", 10)
    version = page.look("a", focus="a")["version"]
    run.path.rename(runs / "b")
    moved = page.look("a", focus="a", since=version)
    assert [one["name"] for one in moved["runs"]] == ["b"] and "focus" not in moved and moved["series"] == {}
    assert page.look("b", focus="b")["focus"]["step"] == 10
    write_run(runs / "other", 4)
    (runs / "other" / "events" / "run.jsonl").replace(runs / "b" / "events" / "run.jsonl")
    assert len(page.look("b")["series"]["b"]["curves"]["loss"]) == 4
    runs.rename(runs.parent / "elsewhere")
    assert page.look("b")["runs"] == []


def test_what_differs_between_runs_is_listed_and_what_is_equal_is_not(runs, serve):
    write_run(runs / "a", 5)
    other = write_run(runs / "b", 5, ranks=2)
    other.config.write_text("model: demo\noptim:\n  lr: 0.0001\n  clip: 1.0\noutput: b\n")
    page = serve()
    found = page.get("/api/differences", runs=json.dumps(["a", "b"]))
    rows = {(row["source"], row["key"]): row["values"] for row in found["rows"]}
    assert rows[("config", "optim.lr")] == ["0.0002", "0.0001"] and rows[("config", "optim.clip")] == [None, "1.0"]
    assert not [key for _, key in rows if key in ("model", "output", "python")]
    assert page.get("/api/differences", runs=json.dumps(["a"]))["rows"] == []


def test_the_slow_rank_stands_out_in_the_map_also_when_it_is_sampled(runs):
    run = write_run(runs / "a", 400, ranks=6, slow_rank=4)
    with (run.events / "rank00002.jsonl").open("a") as file:  # it crashed, went back, and was slow from then on
        file.writelines(rank_line(2, step, wait_s=0.01) for step in range(301, 401))
    whole = HeatMap(run, 400)
    whole.catch_up(30.0)
    found = whole.to_json()
    assert found["is_whole"] and not found["is_sampled"] and len(found["own"]) == 6
    assert all(value > 1.15 for value in found["own"][4]) and all(value == 1.0 for value in found["own"][0])
    assert all(value < 0.05 for value in found["wait"][4]) and found["own"][2][100] == 1.0 < found["own"][2][-1]
    assert Board(runs).heat("a")["ranks"] == [0, 1, 2, 3, 4, 5]


def test_a_map_of_logs_too_long_to_read_takes_lines_from_all_over_them(runs, monkeypatch):
    run = write_run(runs / "a", 6000, ranks=4, slow_rank=3)
    for rank in range(4):  # 17 MiB in all
        path = run.events / f"rank{rank:05d}.jsonl"
        lines = path.read_text().splitlines()
        path.write_text("\n".join(line[:-1] + ', "pad": "' + "x" * 500 + '"}' for line in lines) + "\n")
    heat = HeatMap(run, 6000)
    heat.catch_up(0.0)
    heat.catch_up(30.0)
    found = heat.to_json()
    assert found["is_sampled"] and found["is_whole"]
    known = [value for value in found["own"][3] if value is not None]
    assert len(known) > 190 and min(known) > 1.15


def test_logs_are_read_on_from_where_a_page_was(runs, serve):
    run = write_run(runs / "a", 3)
    page = serve()
    path = run.logs / "rank00000.log"
    path.write_bytes("多".encode() * 30_000 + "卡".encode()[:2])
    found = page.get("/api/log", run="a", file="rank00000.log")
    assert found["text"].endswith("多") and found["size"] == 90_002
    with path.open("ab") as file:
        file.write("卡".encode()[2:] + b" end\n")
    assert page.get("/api/log", run="a", file="rank00000.log", start=found["end"])["text"] == "卡 end\n"
    path.write_text("anew\n")
    assert page.get("/api/log", run="a", file="rank00000.log", start=found["end"])["text"] == "anew\n"


def test_texts_events_and_memory_come_with_the_run_that_is_looked_at(runs, serve):
    write_run(runs / "a", 40, ranks=3, slow_rank=1)
    now = serve().look("a", focus="a")["focus"]
    assert now["samples"][-1]["samples"] == [{"prompt": "多卡 is", "text": " at step 40"}]
    assert [note["kind"] for note in now["notes"]][:3] == ["run", "eval", "checkpoint"]
    assert [tail["memory_bytes"] for tail in now["ranks"]] == [2**30 + rank * 2**20 for rank in range(3)]
    assert now["memory"]["peak"] == 2**30 and "rank 1 is the slowest" in now["slowest_says"]
    assert [one["name"] for one in now["logs"]] == ["rank00000.log"]


def test_acting_needs_control_the_pages_header_and_the_runs_name(runs, serve):
    write_run(runs / "a", 5)
    control = ToldControl(answer="stopped")
    done = control.told
    body = json.dumps({"run": "a", "confirm": "a"})
    only_looks = serve()
    assert only_looks.ask("/api/stop", "POST", body, {**only_looks.head, "X-Duoka": "act"})[0] == 403
    assert only_looks.look()["control"] is False
    page = serve(control)
    act = {**page.head, "X-Duoka": "act"}
    assert page.ask("/api/stop", "POST", body, page.head)[0] == 403, "another site's form cannot set the header"
    assert page.ask("/api/stop", "POST", body, {"X-Duoka": "act"})[0] == 403, "no token"
    assert page.ask("/api/stop", "POST", json.dumps({"run": "a"}), act)[0] == 400, "not confirmed"
    assert page.ask("/api/stop", "POST", json.dumps({"run": "../a", "confirm": "../a"}), act)[0] == 404
    assert page.ask("/api/delete", "POST", body, act)[0] == 404
    assert page.ask("/api/stop", "GET", None, act)[0] == 404 and done == []
    assert json.loads(page.ask("/api/stop", "POST", body, act)[2]) == {"done": "stopped"} and done == [("stop", "a")]


def test_stop_asks_the_runs_own_process_and_go_on_does_not_start_a_running_one(runs):
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); print('up', flush=True)\n"
    process = subprocess.Popen([sys.executable, "-c", code + "time.sleep(60)"], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        run = write_run(runs / "a", 5, state="running", **leader_identity(process.pid))
        with pytest.raises(DuokaError, match="is running already"):
            go_on(run)
        assert "save and leave" in stop(run) and process.wait(30) == 75
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    with pytest.raises(DuokaError, match="no process"):
        stop(run)


def test_a_curve_that_nobody_looks_at_makes_room(runs, monkeypatch):
    monkeypatch.setattr("duoka.watch.board.KEPT_BYTES", 1000)
    for name in "abc":
        write_run(runs / name, 20, ranks=1)
    board = Board(runs)
    for name in "abc":
        assert len(board.look(Asked(runs=(name,), keys=("loss",)))["series"][name]["curves"]["loss"]) == 20
    assert board.num_followed == 1


def test_every_word_is_there_in_both_languages_and_every_part_that_is_named():
    text = (WEB / "words.js").read_text(encoding="utf-8")
    named = re.findall(r"(\w+): \[(\"[^\"]+\",\s*\"[^\"]+\")\]", text)
    words = dict(named)
    assert len(named) == len(words) > 80, "a name is there twice, and the second counts"
    sources = {
        name: (WEB / name).read_text(encoding="utf-8") for name in ("board.js", "chart.js", "panels.js", "page.html")
    }
    used = set(re.findall(r"\bsay\(\"(\w+)\"", "".join(sources.values())))
    used |= set(re.findall(r"data-(?:word|hint)=\"(\w+)\"", sources["page.html"]))
    assert used <= words.keys(), f"without words: {used - words.keys()}"
    parts = {*PARTS, "other"}  # of a step's time: one without a color left a hole in the bar
    assert parts <= words.keys() and parts <= set(re.findall(r"(\w+): \"#", sources["panels.js"]))
    ids = set(re.findall(r"\$\(\"([\w-]+)\"\)", sources["board.js"]))
    made = set(re.findall(r"id=\"([\w-]+)\"", sources["page.html"]))
    assert ids <= made, f"not in the page: {ids - made}"


def test_the_command_serves_and_leaves_at_ctrl_c(runs):
    write_run(runs / "a", 5)
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "duoka", "board", str(runs), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    try:
        line = process.stdout.readline()
        port, token = re.search(r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)", line).groups()
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=30)
        connection.request("GET", "/api/look", headers={"Authorization": f"Bearer {token}"})
        assert [run["name"] for run in json.loads(connection.getresponse().read())["runs"]] == ["a"]
        connection.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_long_log_is_answered_at_once_and_read_on(runs, monkeypatch):
    """The first answer has the whole run already, in a few hundred of its steps."""
    monkeypatch.setattr("duoka.watch.board.READ_S", 0.0)
    write_run(runs / "a", 8000, ranks=1, rank_steps=5)
    board = Board(runs)
    asked = Asked(runs=("a",), keys=("loss",), focus="a")
    first = answer = board.look(asked)
    rows = first["series"]["a"]["curves"]["loss"]
    assert first["is_behind"] and 400 < len(rows) <= 500 and rows[0][0] < 100 and rows[-1][0] > 7900
    assert all(row[1] == pytest.approx(loss_at(row[0]), rel=1e-5) for row in rows)
    while answer["is_behind"]:
        assert answer["next_s"] == 0.0
        answer = board.look(replace(asked, since=answer["version"]))
        assert ("series" in answer) == (not answer["is_behind"]), "a curve is drawn twice: sampled, then whole"
    assert answer["series"]["a"]["num_steps"] == 8000 and answer["share_read"] == {"a": 1.0}
