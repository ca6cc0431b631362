"""Two machines that are odd: a disk of its own, a clock that is off, a swapped rank, another user's job, a cable that
is out for a moment, a firewall, a machine that dies and comes back.

The machines are network namespaces with an sshd each. SKIPPED, loudly, where they cannot be. Most are nightly.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors
from namespaces import Network, machines, run, why_not
from test_doctor_between import filter_new_connections
from test_two_machines import WITHIN_S, finish, same_bits, start, train_alone, write_home

import duoka.errors as duoka_errors
from duoka.cluster.fault_injection import wait_for_ranks
from duoka.runs.events import read_steps
from duoka.runs.folder import RunFolder

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"NO MACHINES: {WHY_NOT}")


def wrap_ssh(folder: Path, net: Network, before: str) -> str:
    """An ssh that lets machine b do `before` first."""
    wrapped = folder / "ssh"
    wrapped.write_text(
        "#!/bin/bash\n# The last word is what is to run there.\n"
        'words=("$@"); last="${words[-1]}"\n'
        'case " $* " in *" b "*) words[-1]="' + before + '; $last";; esac\n'
        f'exec {net.ssh} "${{words[@]}}"\n'
    )
    wrapped.chmod(0o755)
    return str(wrapped)


def duoka(net: Network, home: Path, ssh: str, *words: str) -> subprocess.CompletedProcess[str]:
    """From a terminal on machine a."""
    command = net.inside(0, sys.executable, "-m", "duoka", *words)
    env = {**os.environ, "DUOKA_SSH": ssh}
    return subprocess.run(command, cwd=home, env=env, capture_output=True, text=True, timeout=WITHIN_S)


@pytest.mark.timeout(150)
def test_files_reach_the_other_machine_and_nothing_outside_of_the_folder(tmp_path: Path) -> None:
    """Machine b has a disk of its own where the working folder is."""
    home, disk = tmp_path / "home", tmp_path / "disk_of_b"
    for folder in (home / "src", disk):
        folder.mkdir(parents=True)
    (home / "src" / "mine.py").write_text("print('hello')\n")
    (home / "link.txt").symlink_to("/etc/hostname")
    with machines(tmp_path / "net") as net:
        inside = tmp_path / "inside"
        mount = f"mount --bind {disk} {home}"
        inside.write_text(f'#!/bin/sh\nexec unshare -m sh -c \'{mount} && exec sh -c "$0"\' "$1"\n')
        wrapped = tmp_path / "ssh"
        wrapped.write_text(
            '#!/bin/bash\nwords=("$@")\n'
            f'case " $* " in *" b "*) words[-1]="{inside} $(printf %q "${{words[-1]}}")";; esac\n'
            f'exec {net.ssh} "${{words[@]}}"\n'
        )
        for script in (inside, wrapped):
            script.chmod(0o755)
        done = duoka(net, home, str(wrapped), "sync", "--hosts", "a,b")
        again = duoka(net, home, str(wrapped), "sync", "--hosts", "a,b")
    assert done.returncode == 0, done.stderr
    assert "a: 0 files sent" in done.stdout and "b: 2 files sent" in done.stdout, done.stdout
    assert "link.txt is a link to /etc/hostname" in done.stderr
    assert sorted(str(path.relative_to(disk)) for path in disk.rglob("*") if path.is_file()) == [
        "duoka-lock.txt", "src/mine.py"
    ]  # fmt: skip
    assert "b: 0 files sent, 0 B; 2 were there" in again.stdout, again.stdout


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_all_processors_of_both_machines_are_burned(tmp_path: Path) -> None:
    with machines(tmp_path / "net") as net:
        done = duoka(net, tmp_path, net.ssh, "doctor", "--hosts", "a,b", "--level", "burn", "--seconds", "3", "--json")
    found = [one for one in json.loads(done.stdout)["findings"] if one["check"] in ("speed", "arithmetic", "burn")]
    assert [one["check"] for one in found] == ["speed"], found
    assert any(words in str(found) for words in ("2 x CPU", "a cpu", "b cpu")), found


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_another_name_package_and_line_of_code_are_found_on_the_machine_that_has_them(tmp_path: Path) -> None:
    """Machine b has a host name, a package's version and a file of duoka of its own, by mount and UTS namespaces."""
    installed, code = Path(safetensors.__file__).parent.parent, Path(duoka_errors.__file__)
    real, links, other = tmp_path / "real", tmp_path / "links", tmp_path / "errors.py"
    for folder in (real, links):
        folder.mkdir()
    for one in installed.iterdir():
        other_name = "safetensors-0.0.1.dist-info" if one.match("safetensors-*.dist-info") else one.name
        (links / other_name).symlink_to(real / one.name)
    other.write_text(code.read_text() + "\n# changed\n")
    mounts = (
        f"mount --bind {installed} {real}; mount --bind {links} {installed}; mount --bind {other} {code}; hostname odd"
    )
    inside = tmp_path / "inside"
    inside.write_text(f'#!/bin/sh\nexec unshare -m -u sh -c \'{mounts}; exec sh -c "$0"\' "$1"\n')
    wrapped = tmp_path / "ssh"
    with machines(tmp_path / "net") as net:
        wrapped.write_text(
            '#!/bin/bash\nwords=("$@")\n'
            f'case " $* " in *" b "*) words[-1]="{inside} $(printf %q "${{words[-1]}}")";; esac\n'
            f'exec {net.ssh} "${{words[@]}}"\n'
        )
        for script in (inside, wrapped):
            script.chmod(0o755)
        looked = duoka(net, tmp_path, str(wrapped), "doctor", "--hosts", "a,b", "--json")
        alike = duoka(net, tmp_path, net.ssh, "doctor", "--hosts", "a,b", "--json")
    bad = {one["check"]: one for one in json.loads(looked.stdout)["findings"] if one["severity"] == "fail"}
    assert looked.returncode == 3 and bad.keys() == {"safetensors", "duoka"}, bad
    assert bad["safetensors"]["nodes"]["b"] == "0.0.1" and "pip install" in bad["safetensors"]["fix"], bad
    assert not [one for one in json.loads(alike.stdout)["findings"] if one["severity"] == "fail"], alike.stdout


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_clock_that_is_off_by_an_hour_is_found_and_costs_no_bit(tmp_path: Path, tiny_model: Path) -> None:
    home = write_home(tmp_path / "home", tiny_model, 1)
    late = tmp_path / "late"
    late.mkdir()
    (late / "sitecustomize.py").write_text("import time\n_now = time.time\ntime.time = lambda: _now() - 3600\n")
    with machines(tmp_path / "net") as net:
        ssh = wrap_ssh(tmp_path, net, f"export PYTHONPATH={late}")
        looked = duoka(net, home, ssh, "doctor", "--hosts", "a,b", "--json")
        clocks = [one for one in json.loads(looked.stdout)["findings"] if one["check"] == "clocks"]
        assert looked.returncode == 3 and clocks[0]["severity"] == "fail", looked.stdout
        assert clocks[0]["nodes"]["b"].startswith(("-3600", "-3599", "-359", "-358")), clocks
        done = duoka(net, home, ssh, "train", "run.yaml", "--hosts", "a,b")
        assert done.returncode == 0, done.stderr
    assert same_bits(RunFolder(home / "out"), train_alone(home))


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_swapped_node_rank_is_refused_on_the_machine_that_has_the_address(tmp_path: Path, tiny_model: Path) -> None:
    home = write_home(tmp_path / "home", tiny_model, 1)
    with machines(tmp_path / "net") as net:
        env = {**os.environ, "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500"}
        command = net.inside(0, sys.executable, "-m", "duoka", "train", "run.yaml")
        done = subprocess.run(command, cwd=home, env=env, capture_output=True, text=True, timeout=WITHIN_S)
    assert done.returncode == 2 and "is this machine's own address" in done.stderr, done.stderr


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_two_users_jobs_on_the_same_machines_do_not_meet(tmp_path: Path, tiny_model: Path) -> None:
    homes = [write_home(tmp_path / name, tiny_model, 2) for name in ("mine", "theirs")]
    with machines(tmp_path / "net") as net:
        both = [start(net, home, "--hosts", "a,b") for home in homes]
        ends = [finish(process) for process in both]
    assert [code for code, _, _ in ends] == [0, 0], ends
    runs = [RunFolder(home / "out") for home in homes]
    assert same_bits(runs[0], runs[1]) and same_bits(runs[0], train_alone(homes[0]))


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_cable_that_is_out_for_five_seconds_costs_nothing(tmp_path: Path, tiny_model: Path) -> None:
    home = write_home(tmp_path / "home", tiny_model, 40)
    run_folder = RunFolder(home / "out")
    with machines(tmp_path / "net") as net:
        process = start(net, home, "--hosts", "a,b")
        try:
            wait_for_ranks(run_folder, 2, lambda beat: beat.step >= 3, within_s=WITHIN_S)
            net.nodes[1].unplug()
            time.sleep(5)
        finally:
            net.nodes[1].plug_in()
        code, _, err = finish(process)
    assert code == 0, err
    assert "world 2" not in err, "the same world went on"
    assert same_bits(run_folder, train_alone(home))


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_rendezvous_behind_a_firewall_is_said_in_time(tmp_path: Path, tiny_model: Path) -> None:
    home = write_home(tmp_path / "home", tiny_model, 1)
    with machines(tmp_path / "net") as net:
        filter_new_connections(net.nodes[0].space, "drop")
        code, _, err = finish(start(net, home, "--hosts", "a,b", "--wait", "8s"))
    assert (code == 5 and "machines joined within" in err) or "no rendezvous at" in err, err


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_slow_network_shows_in_the_time_that_ranks_wait_and_is_named(tmp_path: Path, tiny_model: Path) -> None:
    home = write_home(tmp_path / "home", tiny_model, 6)
    waited = {}
    with machines(tmp_path / "net") as net:
        for name in ("fast", "slow"):
            if name == "slow":
                limit = ["rate", "10mbit", "burst", "16kb", "latency", "400ms"]
                for node in net.nodes:
                    run("ip", "netns", "exec", node.space, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)
            process, folder = start(net, home, "--hosts", "a,b", f"output={name}"), RunFolder(home / name)
            deadline = time.monotonic() + WITHIN_S
            while len(read_steps(folder)) < 20 and time.monotonic() < deadline and process.poll() is None:
                time.sleep(0.1)
            shown = duoka(net, home, net.ssh, "top", name, "--once").stdout
            code, _, err = finish(process)
            assert code == 0, err
            steps = read_steps(folder)[5:]
            waited[name] = sum(one["wait_s"] for one in steps) / sum(one["step_s"] for one in steps)
    assert waited["slow"] > max(0.7, waited["fast"] + 0.1), waited
    assert "the exchange is slow, not a rank" in shown and "parallel.compress sends" in shown, shown
    assert same_bits(RunFolder(home / "slow"), RunFolder(home / "fast"))


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_machine_that_dies_is_left_out_and_joins_when_it_is_back(tmp_path: Path, tiny_model: Path) -> None:
    """Two, one, two machines; the losses are those of an undisturbed run within rounding."""
    home = write_home(tmp_path / "home", tiny_model, 400)
    run_folder, said = RunFolder(home / "out"), tmp_path / "said"
    with machines(tmp_path / "net") as net, said.open("w") as err:
        command = net.inside(0, sys.executable, "-m", "duoka", "train", "run.yaml", "--hosts", "a,b", "--nodes", "1:2")
        env = {**os.environ, "DUOKA_SSH": net.ssh}
        process = subprocess.Popen(command, cwd=home, env=env, stdin=subprocess.DEVNULL, stdout=err, stderr=err)

        def wait_for(text: str) -> None:
            deadline = time.monotonic() + WITHIN_S
            while text not in said.read_text():
                assert time.monotonic() < deadline and process.poll() is None, said.read_text()
                time.sleep(0.1)

        try:
            wait_for_ranks(run_folder, 2, lambda beat: beat.step >= 5, within_s=WITHIN_S)
            net.nodes[1].kill_all()
            wait_for("b is lost")
            wait_for("world 2: 1 machine")
            net.revive(1)
            wait_for("world 3: 2 machines")
            before = len(read_steps(run_folder))
            deadline = time.monotonic() + WITHIN_S
            while len(read_steps(run_folder)) < before + 5 and time.monotonic() < deadline:
                time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            code = process.wait(WITHIN_S)
        finally:
            process.kill()
    assert code == 75, said.read_text()
    steps = read_steps(run_folder)
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1)), "each step once"
    assert said.read_text().count("b is lost: ") == 1, said.read_text()
    alone = RunFolder(home / "alone")
    command = [sys.executable, "-m", "duoka", "train", "run.yaml", "output=alone"]
    with subprocess.Popen(command, cwd=home, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + WITHIN_S
        while len(read_steps(alone)) < len(steps) and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.1)
        process.terminate()
    for ours, theirs in zip(steps, read_steps(alone), strict=False):
        # Sums of two ranks round otherwise than those of one, and each step of training adds to it.
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4 if ours["step"] <= 50 else 2e-3), ours["step"]
