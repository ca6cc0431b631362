"""Ranks are forked from one process that imported torch and the model once, and are as any rank: same weights, same
ends, children of the launcher; without that process, or against the user's wish, each starts by itself."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from struck import WITHIN_S, finish, make_case, same_weights, start_really, wait_for_step

from duoka.cluster.forks import SWITCH, ForkServer, imports_of, imports_of_model
from duoka.cluster.ranks import adopt_orphans
from duoka.config.schema import RunConfig
from duoka.process.interpreter import python_module
from duoka.runs.folder import RunFolder

PR_SET_CHILD_SUBREAPER = 36
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def case(tmp_path_factory, tiny_model):
    return make_case(tmp_path_factory.mktemp("forked"), tiny_model, epochs=4)


def servers_below(pid):
    """The fork server itself: ranks have its command line too, and sessions of their own as it has, but no socket."""
    children = psutil.Process(pid).children()
    return [one for one in children if os.readlink(f"/proc/{one.pid}/fd/0").startswith("socket:")]


def test_ranks_share_one_import_and_restart_without_it_when_it_is_gone(case):
    folder, yaml = case
    process = start_really(yaml, folder / "forked", "--restarts", "1")
    beats = wait_for_step(RunFolder(folder / "forked"), 3)
    (server,) = servers_below(process.pid)
    for beat in beats.values():
        rank = psutil.Process(beat.pid)
        assert rank.ppid() == process.pid and rank.cmdline() == server.cmdline()
        assert os.getsid(beat.pid) == beat.pid
    server.kill()
    beats = wait_for_step(RunFolder(folder / "forked"), 6)
    os.kill(beats[1].pid, signal.SIGKILL)
    code, output = finish(process)
    assert code == 0, output
    assert "restart 1 of 1" in output
    assert same_weights(folder / "forked", folder / "whole")


def ranks_of(launcher):
    """Those of its children that are told their rank; one that ends while it is looked at is none."""
    found = []
    for child in psutil.Process(launcher).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [child] if "RANK" in child.environ() else []
    return found


def test_each_rank_starts_by_itself_where_the_user_says_so(case):
    folder, yaml = case
    process = start_really(yaml, folder / "alone", **{SWITCH: "0"})
    try:  # to their first moments: what two of them import by themselves is what forking spares
        deadline = time.monotonic() + WITHIN_S
        # One that was just forked looks like the launcher, until it is what it becomes.
        while len(ranks := ranks_of(process.pid)) < 2:
            assert time.monotonic() < deadline and process.poll() is None, "no two ranks came"
            time.sleep(0.02)
        assert all("duoka.process.fork_server" not in rank.cmdline() for rank in ranks)
        assert not servers_below(process.pid)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def server():
    env = {**os.environ, "COLOR": "red"}
    made = ForkServer(["json", "no_such_module"], env)
    yield made, env
    made.close()


def test_only_the_environment_it_was_started_with_is_forked(server, tmp_path):
    made, env = server
    command = python_module("this")
    with open(tmp_path / "out", "w") as out:
        streams = (out.fileno(), out.fileno())
        assert made.fork(command, {**env, "OMP_NUM_THREADS": "3"}, streams) is None
        assert made.fork(("bash", "-c", "true"), env, streams) is None
        place = {"RANK": "0", "WORLD_SIZE": "1", "DUOKA_PARENT_PID": str(os.getpid())}
        adopt_orphans()
        try:
            forked = made.fork(command, {**env, **place}, streams)
        finally:  # other tests' orphans are not for this process to wait for
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    assert forked is not None
    forked.wait()
    assert "Beautiful is better than ugly." in (tmp_path / "out").read_text()


def test_who_is_asked_to_stop_waits_for_no_import(server):
    made, env = server
    made.is_hurried = lambda: True
    began = time.monotonic()
    assert made.fork(python_module("this"), env, (1, 2)) is None
    assert made.pid == 0 and time.monotonic() - began < 60


def test_what_ranks_are_forked_from_has_the_table_that_each_of_them_would_make():
    """Half of the CPU of loading a small model; here, as whatever came before in this process may have made it."""
    code = (
        "import duoka.model.preload, sys; from transformers import conversion_mapping as made; "
        "sys.exit(made._checkpoint_conversion_mapping_cache is None)"
    )
    assert "duoka.model.preload" in imports_of(RunConfig.model_validate({"model": "demo", "data": {"train": ["x"]}}))
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_models_own_code_is_named_by_its_config(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert imports_of_model(tmp_path) == ["transformers.models.qwen3.modeling_qwen3"]
    (tmp_path / "config.json").write_text('{"model_type": "../evil"}')
    assert imports_of_model(tmp_path) == []
    assert imports_of_model(tmp_path / "nowhere") == []
