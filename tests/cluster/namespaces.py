"""Machines made of network namespaces on this one: a cable between them, an sshd each, and none left behind.

For tests only. They share disks, memory and the host name; addresses, ports, connections and processes are their own.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_NAMES = Path("/etc/netns")  # `ip netns exec` lays what is in SPACE/ here over /etc
SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


def why_not() -> str:
    """Empty where namespaces with an sshd each can be made."""
    if os.geteuid() != 0:
        return "not root"
    missing = [name for name in ("ip", "ssh", "ssh-keygen") if shutil.which(name) is None]
    if missing or not os.access(SSHD, os.X_OK):
        return f"not installed: {', '.join(missing) or 'sshd'} (on Debian: apt install iproute2 openssh-server)"
    name = f"duoka-try-{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return "" if made.returncode == 0 else f"no network namespaces here: {made.stderr.strip()}"


@dataclass
class Node:
    """One namespace: its name for ssh, and its address."""

    name: str
    space: str
    address: str
    sshd: subprocess.Popen[bytes] | None = None

    def pids(self) -> list[int]:
        done = subprocess.run(["ip", "netns", "pids", self.space], capture_output=True, text=True)
        return [int(word) for word in done.stdout.split()]

    def kill_all(self) -> None:
        """As a power cut does it to all processes of this machine; they are all of this test."""
        for _ in range(50):
            pids = self.pids()
            if not pids:
                return
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if self.sshd is not None:
                self.sshd.poll()
            time.sleep(0.1)
        raise AssertionError(f"processes that do not end: {self.pids()}")

    def know(self, name: str, address: str) -> None:
        """From now on processes of this node resolve `name`: they see an /etc/hosts of their own."""
        folder = _NAMES / self.space
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "hosts").open("a", encoding="utf-8") as file:
            file.write(f"{address} {name}\n")

    def unplug(self) -> None:
        run("ip", "-n", self.space, "link", "set", "eth0", "down")

    def plug_in(self) -> None:
        run("ip", "-n", self.space, "link", "set", "eth0", "up")


@dataclass
class Network:
    """Nodes on one switch, and the command that reaches them."""

    folder: Path
    bridge: str
    nodes: list[Node] = field(default_factory=list)

    @property
    def ssh(self) -> str:
        return f"ssh -F {self.folder / 'ssh_config'}"

    def revive(self, number: int) -> None:
        """Its sshd, after kill_all."""
        self.nodes[number].sshd = _start_sshd(self, self.nodes[number])
        _wait_for_sshd(self)

    def inside(self, node: int, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.nodes[node].space, *command]


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


@contextlib.contextmanager
def machines(folder: Path, count: int = 2) -> Iterator[Network]:
    """`count` of them, called a, b, ..."""
    word = secrets.token_hex(2)
    net = Network(folder, f"dk{word}")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        # The switch is in a space of its own: nothing is added to this machine's own network.
        run("ip", "netns", "add", net.bridge)
        run("ip", "-n", net.bridge, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", net.bridge, "link", "set", "br0", "up")
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key"))
        for number in range(count):
            net.nodes.append(_add_node(net, number))
        _write_ssh_config(net)
        _wait_for_sshd(net)
        yield net
    finally:
        for node in net.nodes:
            node.kill_all()
            if node.sshd is not None:
                node.sshd.wait()
            subprocess.run(["ip", "netns", "del", node.space], capture_output=True)
            shutil.rmtree(_NAMES / node.space, ignore_errors=True)
        subprocess.run(["ip", "netns", "del", net.bridge], capture_output=True)
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert net.bridge not in left, f"namespaces are left: {left}"


def _add_node(net: Network, number: int) -> Node:
    node = Node("abcdefgh"[number], f"{net.bridge}-{number}", f"10.77.0.{number + 1}")
    run("ip", "netns", "add", node.space)
    port = f"port{number}"
    run("ip", "link", "add", port, "netns", net.bridge, "type", "veth", "peer", "name", "eth0", "netns", node.space)
    run("ip", "-n", net.bridge, "link", "set", port, "master", "br0", "up")
    run("ip", "-n", node.space, "addr", "add", f"{node.address}/24", "dev", "eth0")
    run("ip", "-n", node.space, "link", "set", "eth0", "up")
    run("ip", "-n", node.space, "link", "set", "lo", "up")
    key = net.folder / f"host_{node.name}"
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
    config = net.folder / f"sshd_{node.name}"
    config.write_text(
        f"Port 22\nListenAddress {node.address}\nHostKey {key}\nAuthorizedKeysFile {net.folder / 'key.pub'}\n"
        "StrictModes no\nUsePAM no\nPermitRootLogin yes\nPasswordAuthentication no\nPidFile none\n"
        "MaxStartups 200\nLogLevel ERROR\n",
        encoding="utf-8",
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    node.sshd = _start_sshd(net, node)
    return node


def _start_sshd(net: Network, node: Node) -> subprocess.Popen[bytes]:
    config = net.folder / f"sshd_{node.name}"
    log = (net.folder / f"sshd_{node.name}.log").open("wb")
    command = ["ip", "netns", "exec", node.space, SSHD, "-D", "-e", "-f", str(config)]
    started = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    log.close()
    return started


def _write_ssh_config(net: Network) -> None:
    lines = [
        f"Host {node.name}\n  HostName {node.address}\n  IdentityFile {net.folder / 'key'}\n  IdentitiesOnly yes\n"
        f"  StrictHostKeyChecking no\n  UserKnownHostsFile {net.folder / 'known'}\n  LogLevel ERROR\n"
        for node in net.nodes
    ]
    (net.folder / "ssh_config").write_text("\n".join(lines), encoding="utf-8")


def _wait_for_sshd(net: Network) -> None:
    for node in net.nodes:
        deadline = time.monotonic() + 30
        while subprocess.run([*net.inside(0, *net.ssh.split()), node.name, "true"], capture_output=True).returncode:
            assert time.monotonic() < deadline, (net.folder / f"sshd_{node.name}.log").read_text()
            time.sleep(0.2)
