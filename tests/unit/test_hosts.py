"""Machines by name, what ssh is told, one voice for all of them, and the far end that ends with the near one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from duoka.cli import cli
from duoka.cluster.fleet import Fleet, fetch_logs, node_variables
from duoka.cluster.one_voice import HOLD_S, OneVoice
from duoka.cluster.ssh import Connection, in_folder, ssh_command, why_lost
from duoka.config.hosts import Host, choose_hosts, parse_host, parse_hosts, read_hostfile
from duoka.config.trackers import TRACKERS
from duoka.errors import ConfigError
from duoka.runs.folder import RunFolder

DOCS = Path(__file__).parents[2] / "docs"
# The last word is what sshd would hand to a shell.
FAKE_SSH = '#!/bin/sh\nfor word; do last=$word; done\nexec sh -c "$last"\n'
YAML = "model: {model}\ndata: {{train: [identity], max_length: 64}}\ntrain: {{precision: fp32}}\noutput: out\n"


@pytest.fixture
def fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every host is this machine, and there is no network in it."""
    path = tmp_path / "fake-ssh"
    path.write_text(FAKE_SSH)
    path.chmod(0o755)
    monkeypatch.setenv("DUOKA_SSH", str(path))
    return path


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("a", Host("a")),
        ("b:2222", Host("b", port=2222)),
        ("user@c slots=4", Host("c", "user", slots=4)),
        ("me@[fe80::1]:22", Host("fe80::1", "me", 22)),
    ],
)
def test_a_machine_is_read_as_it_is_written(text: str, host: Host) -> None:
    assert parse_host(text) == host


@pytest.mark.parametrize(
    "text", ["", "-oProxyCommand=x", "a b", "a slots=0", "a slots=x", "a max_slots=3", "a;b", "a:99999"]
)
def test_what_is_no_machine_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"names no machine|not understood|ports are"):
        parse_host(text)


def test_lists_refuse_a_machine_twice_and_unequal_slots() -> None:
    assert [host.name for host in parse_hosts("a, b:22")] == ["a", "b"]
    with pytest.raises(ConfigError, match="a twice"):
        parse_hosts("a,b,a")
    with pytest.raises(ConfigError, match="different numbers of processes"):
        parse_hosts("a slots=4,b slots=2")


def test_a_hostfile_with_filters_is_deepspeeds(tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    path.write_text("# ours\nworker-0 slots=4\n\nworker-1 slots=4  # new\n")
    hosts = read_hostfile(str(path))
    assert [(host.name, host.slots) for host in hosts] == [("worker-0", 4), ("worker-1", 4)]
    chosen = choose_hosts(hosts, "worker-0:0,2@worker-1:1,3", "")
    assert [(host.devices, host.slots) for host in chosen] == [((0, 2), 2), ((1, 3), 2)]
    assert node_variables(chosen[1], 1, {})["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert choose_hosts(hosts, "worker-1", "") == hosts[1:] and choose_hosts(hosts, "", "worker-1") == hosts[:1]
    assert choose_hosts(hosts, "", "worker-1:0")[1].devices == (1, 2, 3)
    for include, exclude, words in (
        ("x", "", "not in the hostfile"),
        ("a", "b", "exclude each other"),
        ("worker-0:9", "", "GPU 9"),
    ):
        with pytest.raises(ConfigError, match=words):
            choose_hosts(hosts, include, exclude)
    path.write_text("worker-0:4\n")
    with pytest.raises(ConfigError, match="colon") as caught:
        read_hostfile(str(path))
    assert "line 1" in str(caught.value)


def test_ssh_is_told_the_users_name_and_port_and_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DUOKA_SSH", raising=False)
    words = ssh_command(Host("c", "me", 2222), in_folder("/a b", ("/py", "-m", "x")))
    assert words[0] == "ssh" and "BatchMode=yes" in words and words[words.index("-p") + 1] == "2222"
    assert words[-2] == "me@c" and words[-1].startswith("exec sh -c ")
    assert "cd -- " in words[-1] and "/a b" in words[-1]


def test_the_nodes_get_what_was_set_here_for_training_and_no_more() -> None:
    env = {
        "NCCL_DEBUG": "INFO",
        "DUOKA_CACHE": "/c",
        "DUOKA_SSH": "x",
        "DUOKA_PARENT_PID": "3",
        "HOME": "/me",
        "PATH": "/bin",
    }
    assert node_variables(Host("a"), 1, env) == {"NCCL_DEBUG": "INFO", "DUOKA_CACHE": "/c", "NODE_RANK": "1"}


@pytest.mark.parametrize("name", sorted(TRACKERS.keys() - {"tensorboard"}))
def test_the_nodes_get_what_the_runs_tracker_reads(name: str) -> None:
    """Without its address and key there, the numbers of a run over --hosts would stay in a file of the first node."""
    variable = f"{name.upper()}_API_KEY"
    assert node_variables(Host("a"), 0, {variable: "k"})[variable] == "k"
    for page in ("cluster.md", "cluster.zh-CN.md"):
        assert f"`{name.upper()}_*`" in (DOCS / page).read_text(encoding="utf-8")


def test_what_all_say_is_shown_once_and_what_differs_with_its_name() -> None:
    shown: list[tuple[int, bytes]] = []
    now = [0.0]
    voice = OneVoice(["a", "b", "c"], lambda stream, data: shown.append((stream, data)), now=lambda: now[0])
    voice.add(1, 1, b"world 1\nonly b\n")  # before the first node says it
    voice.add(2, 1, b"world 1\nboth others\n")
    voice.add(1, 1, b"both others\nunfini")
    voice.show()
    assert not shown, "they wait for the first node"
    voice.add(0, 1, b"world 1\n")
    now[0] = HOLD_S
    voice.show()
    voice.add(1, 1, b"shed")
    voice.add(1, 1, b"")
    voice.show(all_of_it=True)
    assert [data for _, data in shown] == [b"world 1\n", b"[b] only b\n", b"[b, c] both others\n", b"[b] unfinished\n"]
    voice.add(0, 0, b"progress without an end")
    voice.add(2, 1, b"late\n")
    voice.show(all_of_it=True)
    assert shown[-1][1] == b"\n[c] late\n", "not in the middle of a line"


def test_the_far_end_ends_with_the_near_one(tmp_path: Path, fake_ssh: Path) -> None:
    """The near end is killed: what ran on the node is gone within 10 s, its children that ignore SIGTERM too."""
    note = tmp_path / "pids"
    stubborn = (
        "import os,signal,subprocess,sys,time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "one = subprocess.Popen(['sleep', '300'], start_new_session=True);"
        f"open({str(note)!r}, 'w').write(f'{{os.getpid()}} {{one.pid}}'); time.sleep(300)"
    )
    leader = (
        "import sys,time; from duoka.cluster.ssh import *; from duoka.config.hosts import Host;"
        "from duoka.process.interpreter import python_module;"
        "c = Connection(Host('x'), in_folder('/', python_module('duoka.cluster.tether')));"
        f"c.send({{'run': {{'command': [sys.executable, '-c', {stubborn!r}], 'env': {{}}}}}}); time.sleep(300)"
    )
    near = subprocess.Popen([sys.executable, "-c", leader])
    try:
        deadline = time.monotonic() + 60
        while not note.exists() or len(note.read_text().split()) < 2:
            assert time.monotonic() < deadline and near.poll() is None
            time.sleep(0.1)
        pids = [int(word) for word in note.read_text().split()]
        assert all(psutil.pid_exists(pid) for pid in pids)
    finally:
        near.send_signal(signal.SIGKILL)
        near.wait()
    killed = time.monotonic()
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() - killed < 20, "10 s are promised; this machine is shared"
        time.sleep(0.1)


def ended(host: str, script: str) -> Connection:
    connection = Connection(Host(host), script)
    deadline = time.monotonic() + 30
    while connection.look():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return connection


def test_each_way_to_fail_has_its_own_words(fake_ssh: Path, tmp_path: Path) -> None:
    cases = {
        in_folder("/no/such", ("/bin/true",)): "working folder must be on all machines",
        in_folder("/", ("/no/python", "-m", "x")): "no Python under the path",
        "echo Permission denied '(publickey).' >&2; exit 255": "ssh-copy-id b",
        "echo Could not resolve hostname b >&2; exit 255": "b cannot be reached",
        "echo Host key verification failed. >&2; exit 255": "not known to ssh",
        "echo python: No module named duoka >&2; exit 1": "no duoka",
    }
    for script, words in cases.items():
        connection = ended("b", script)
        said = os.read(connection.streams[1].fileno(), 4096).decode()
        assert words in " ".join(why_lost(connection, said)), script
        connection.close(1)


def test_nodes_that_are_unfit_are_all_named_before_anything_starts(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.yaml").write_text(YAML.format(model=tiny_model))
    fake = tmp_path / "fake-ssh"
    fake.write_text(
        FAKE_SSH.replace(
            "exec sh",
            'case "$*" in *" gone "*) echo ssh: connect to host gone port 22: No route to host >&2; exit 255;;\n'
            '*" bare "*) exit 82;; esac\nexec sh',
        )
    )
    fake.chmod(0o755)
    monkeypatch.setenv("DUOKA_SSH", str(fake))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["train", "run.yaml", "--hosts", "good,gone,bare"], standalone_mode=False)
    error = done.exception
    assert error is not None and getattr(error, "exit_code", None) == 3
    said = str(error)
    assert "gone cannot be reached: ssh: connect to host gone port 22: No route to host" in said
    assert "bare has no Python" in said and "nothing was started" in said and "good" not in said
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".duoka-*"))


def test_flags_that_contradict_are_refused(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.yaml").write_text(YAML.format(model=tiny_model))
    monkeypatch.chdir(tmp_path)
    for flags, env, words in (
        (["--hosts", "a,b", "--hostfile", "x"], {}, "keep one"),
        (["--include", "a"], {}, "choose from a hostfile"),
        (["--hosts", "a,b", "--nodes", "3"], {}, "there are 2 hosts"),
        (["--hosts", "a slots=2,b slots=2", "--nproc", "4"], {}, "slots=2 and --nproc 4"),
        (["--hosts", "a,b", "--meet", "x"], {}, "--meet is"),
        (["--hosts", "a,b"], {"NNODES": "2", "NODE_RANK": "0"}, "one machine's part"),
    ):
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        error = CliRunner().invoke(cli, ["train", "run.yaml", *flags], standalone_mode=False).exception
        assert isinstance(error, ConfigError) and words in str(error), (flags, error)


def test_hosts_of_the_yaml_are_the_terminals_and_not_a_nodes(tmp_path: Path, tiny_model: Path, monkeypatch) -> None:
    """A node reads the same YAML: it must not start all machines again."""
    (tmp_path / "run.yaml").write_text(
        YAML.format(model=tiny_model) + "cluster: {hosts: [a, 'b:2222', user@c slots=1]}\n"
    )
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["train", "run.yaml", "--dry-run"], standalone_mode=False)
    assert done.exception is None, done.exception
    assert (
        done.output.count("NODE_RANK=") == 3
        and "--nproc 1 " in done.output
        and "user@c:   cd" in done.output
        and "--nodes 3:3" in done.output
    )
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    dry = CliRunner().invoke(cli, ["train", "run.yaml", "--dry-run"], standalone_mode=False)
    assert "HF_TOKEN=" in dry.output and "hf_very_secret" not in dry.output
    alone = CliRunner().invoke(cli, ["train", "run.yaml", "cluster.hosts=[]", "--dry-run"], standalone_mode=False)
    assert alone.exception is None and "NODE_RANK=" not in alone.output
    fleet = Fleet([Host("a")], ("run.yaml",), Path("run.yaml"), RunFolder(Path("out")))
    assert "--meet" in fleet.command("x:1")


def test_a_terminal_that_does_not_share_the_run_gets_its_logs(
    fake_ssh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    (there / "out/logs").mkdir(parents=True)
    (there / "out/logs/rank00001.log").write_text("one\n")
    here.mkdir()
    monkeypatch.chdir(here)
    said = fetch_logs(Host("a"), str(there), RunFolder(Path("out")))
    assert (here / "out/logs/rank00001.log").read_text() == "one\n" and "does not share the run folder" in said
    assert "the logs stay on a" in fetch_logs(Host("a"), "/no/such", RunFolder(Path("out")))


def test_without_an_ssh_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUOKA_SSH", "/no/ssh -F x")
    with pytest.raises(ConfigError, match="cannot start /no/ssh"):
        Connection(Host("a"), "true")
