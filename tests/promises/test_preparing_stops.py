"""Who ends `duoka train` while it tokenizes is obeyed at once: no worker stays, a word is said, and work is kept."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from duoka.cluster.forks import SWITCH

YAML = """
model: {model}
data: {{train: [{data}], max_length: 256, workers: 2}}
train: {{max_steps: 1, precision: fp32}}
output: {output}
"""
WITHIN_S = 60


@pytest.fixture(scope="module")
def yaml(tmp_path_factory, tiny_model):
    """Records whose tokenizing takes a while: one piece of them longer than any patience of this test."""
    folder = tmp_path_factory.mktemp("preparing")
    long = {
        "messages": [{"role": "user", "content": "词 and word " * 400}, {"role": "assistant", "content": "yes " * 99}]
    }
    with (folder / "chats.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(long, ensure_ascii=False) + "\n" for _ in range(9000))
    path = folder / "run.yaml"
    path.write_text(YAML.format(model=tiny_model, data=folder / "chats.jsonl", output=folder / "run"), encoding="utf-8")
    return path


def start(yaml, cache, name):
    """Of four launchers one imports beside, for its ranks, what costs as much as all the rest of this file."""
    env = {**os.environ, "DUOKA_CACHE": str(cache), SWITCH: str(int(name == "SIGTERM"))}
    return subprocess.Popen(
        [sys.executable, "-m", "duoka", "train", str(yaml), "--nproc", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env,
    )  # fmt: skip


def is_at_work(process):
    with contextlib.suppress(psutil.Error):  # it may end while it is looked at
        return "duoka.data.tokens.tokenize" in process.cmdline() and process.cpu_times().user > 1.2
    return False


def wait_for_workers(launcher):
    deadline = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline:
        found = [one for one in psutil.Process(launcher.pid).children(recursive=True) if is_at_work(one)]
        if len(found) == 2:
            return found
        assert launcher.poll() is None, launcher.communicate()[0]
        time.sleep(0.05)
    raise AssertionError("no two workers came")


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGHUP", "SIGINT"])
def test_no_tokenizing_worker_outlives_its_launcher(yaml, tmp_path, name):
    launcher = start(yaml, tmp_path, name)
    workers = []
    try:
        workers = wait_for_workers(launcher)
        launcher.send_signal(getattr(signal, name))
        code = launcher.wait(WITHIN_S)
        _, living = psutil.wait_procs(workers, timeout=5)
        assert not living, "they end with it, and not after their pieces"
        said = launcher.communicate()[0]
    finally:
        for one in (launcher, *workers):
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                one.kill()
        launcher.wait()
    assert "Traceback" not in said, said
    expected = {"SIGKILL": (-9, ""), "SIGINT": (130, "interrupted")}
    want = expected.get(name, (75, f"stopped by {name} while model and data were prepared"))
    assert code == want[0] and want[1] in said, said
