"""Alerts: each thing is told once, whoever is told may hang for ever, and a run never waits for it."""

import json
import os
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from commands import run_duoka
from written_runs import event_line, loss_at, nonfinite_line, step_line, write_run

from duoka.runs.folder import RunFolder, write_json_atomic
from duoka.runs.status import leader_identity
from duoka.watch.alerts import Alert, Watchman, only_one, post, run_command

ALERT = Alert("failed", "a", "/runs/a", "a: failed after step 3", 3, 2.0)


@pytest.fixture(autouse=True)
def settled(monkeypatch):
    monkeypatch.setattr("duoka.watch.alerts.SETTLE_S", 0.0)


def running(folder, steps=40):
    return write_run(folder, steps, total_steps=900, state="running", **leader_identity())


def append(run, *lines):
    with (run.events / "run.jsonl").open("a") as file:
        file.writelines(lines)


def told(watchman):
    return [alert.kind for alert in watchman.look()]


def test_a_jump_of_the_loss_is_told_once_and_noise_is_not(tmp_path):
    run = running(tmp_path / "a")
    watchman = Watchman(run)
    append(run, *(step_line(step, loss=loss_at(step) * 1.05) for step in range(41, 60)))
    assert told(watchman) == []
    append(run, step_line(60, loss=30.0), step_line(61, loss=31.0))
    [alert] = watchman.look()
    assert alert.kind == "spike" and "jumped to 30 at step 60" in alert.text
    append(run, step_line(62, loss=32.0))
    assert told(watchman) == [] and told(Watchman(run)) == [], "what happened before it came is no news"
    append(run, *(step_line(step) for step in range(63, 300)), step_line(300, loss=None))
    assert told(watchman) == ["spike"], "no number is a jump too"


def test_a_crash_that_goes_back_to_a_checkpoint_is_followed(tmp_path):
    run = running(tmp_path / "a")
    watchman = Watchman(run)
    append(run, event_line("resume", 20), *(step_line(step) for step in range(21, 42)), step_line(42, loss=40.0))
    assert told(watchman) == ["spike"]


def test_done_failed_and_gone_are_told_once_and_a_stop_that_was_asked_for_is_not(tmp_path):
    for state, kinds in (("done", ["done"]), ("failed", ["failed"]), ("stopped", [])):
        run = running(tmp_path / state)
        watchman = Watchman(run)
        assert told(watchman) == [] and not watchman.is_over
        write_json_atomic(run.status, {"state": state, "version": 2, "cause": "rank 3 was killed"})
        assert told(watchman) == kinds and watchman.is_over
    gone = write_run(tmp_path / "gone", 5, state="running", **{**leader_identity(), "pid_started": 1.0})
    assert told(Watchman(gone)) == ["failed"]


def test_silence_is_told_once_and_again_only_after_it_was_over(tmp_path):
    run = running(tmp_path / "a")
    watchman = Watchman(run)
    for path in (run.events / "run.jsonl", run.status, run.progress):
        os.utime(path, (time.time() - 3600, time.time() - 3600))
    assert told(watchman) == ["stalled"] and told(watchman) == []
    append(run, step_line(41))
    assert told(watchman) == []


def test_a_command_knows_what_happened_and_is_ended_when_it_hangs(tmp_path):
    out = tmp_path / "out"
    assert run_command(f'echo "$DUOKA_ALERT $DUOKA_RUN $DUOKA_STEP $DUOKA_TEXT" > {out}', ALERT) == ""
    assert out.read_text() == "failed a 3 a: failed after step 3\n"
    assert "exit code 7" in run_command("exit 7", ALERT)
    assert "was ended" in run_command(f"sleep 600 & echo $! > {out}; sleep 600", ALERT, limit_s=0.5)
    child = int(out.read_text())
    deadline = time.monotonic() + 20
    while is_running(child):
        assert time.monotonic() < deadline, "what the command started lives on"
        time.sleep(0.05)


def test_a_webhook_gets_json_and_one_that_never_answers_is_given_up(tmp_path):
    seen = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self):
            seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Hook)
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    assert post(f"http://127.0.0.1:{server.server_port}/", ALERT) == ""
    thread.join()
    server.server_close()
    assert seen == [{"kind": "failed", "run": "a", "path": "/runs/a", "text": ALERT.text, "step": 3, "loss": 2.0}]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "did not answer" in post(f"http://127.0.0.1:{silent.getsockname()[1]}/", ALERT, limit_s=0.5)
    assert "failed" in post("http://127.0.0.1:9/", ALERT)


def test_what_is_no_address_is_said_at_once_and_not_repeated():
    """Its words have the address, and a webhook's address is a secret; a blank in it was said to be a late answer."""
    for address in ("hooks.example/T0/s3cret", "http://127.0.0.1:9/T0/s3 cret", "http://127.0.0.1:port/s3cret"):
        said = post(address, ALERT)
        assert "no http or https address" in said and "s3" not in said, said


def test_a_webhook_that_answers_something_else_than_http_has_failed_and_is_not_late():
    with socket.create_server(("127.0.0.1", 0)) as rude:

        def answer():
            connection, _ = rude.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"220 mail.example ESMTP\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        said = post(f"http://127.0.0.1:{rude.getsockname()[1]}/", ALERT)
        thread.join()
    assert "no HTTP (BadStatusLine)" in said


def test_a_batch_that_is_left_out_is_told(tmp_path):
    """faults.nonfinite: skip and rollback log no step for it: a run's loss of no number was never told."""
    run = running(tmp_path / "a")
    watchman = Watchman(run)
    append(run, nonfinite_line(41), *(step_line(step) for step in range(42, 50)))
    [alert] = watchman.look()
    assert alert.kind == "spike" and "the loss or gradient of step 41 was no number" in alert.text
    append(run, nonfinite_line(50), step_line(51))
    assert told(watchman) == [], "told once, and then not for a while"


def test_a_batch_that_is_gone_back_for_is_told(tmp_path):
    run = running(tmp_path / "a")
    watchman = Watchman(run)
    append(run, event_line("resume", 20, reason="back"), nonfinite_line(41), *(step_line(step) for step in (21, 22)))
    assert told(watchman) == ["spike"]


def test_only_one_process_tells_of_a_run(tmp_path):
    run = RunFolder(tmp_path)
    with only_one(run) as first, only_one(run) as second:
        assert (first, second) == (True, False)
    with only_one(run) as again:
        assert again


def test_a_run_whose_command_hangs_for_ever_trains_as_one_without(tmp_path, tiny_model):
    """A real run: the command is begun when it is done, and neither a step nor the end waits for it."""
    (tmp_path / "sft.yaml").write_text(
        f"model: {tiny_model}\ndata: {{train: [identity], max_length: 64}}\nlora: {{rank: 2}}\n"
        "train: {epochs: 1, global_batch: 32, precision: fp32}\n"
        "log: {to: [], alert: {command: 'echo $$ > told; exec sleep 600'}}\n"
    )
    done = run_duoka("train", "sft.yaml", "--nproc", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    told_at, run = tmp_path / "told", tmp_path / "runs" / "sft"
    deadline = time.monotonic() + 60
    while not told_at.is_file() or not told_at.read_text().strip():
        assert time.monotonic() < deadline, "nobody was told"
        time.sleep(0.1)
    hook = int(told_at.read_text())
    assert (run / "final").is_dir()
    follower = int(Path(f"/proc/{hook}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(hook, 9)
    while is_running(follower):
        assert time.monotonic() < deadline, "it does not leave when the run has ended"
        time.sleep(0.1)
    assert "done" in (run / "logs" / "alerts.log").read_text()


def is_running(pid):
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
