"""The doctor over real connections: a firewall that rejects, one that drops, and no way at all are told apart."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from namespaces import machines, run, why_not

WHY_NOT = why_not() or ("" if shutil.which("nft") else "not installed: nft (on Debian: apt install nftables)")
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"NO MACHINES: {WHY_NOT}")
NEW = ["tcp", "dport", "1024-65535", "tcp", "flags", "&", "(syn|ack)", "==", "syn"]


def filter_new_connections(space: str, *verdict: str) -> None:
    """ssh's own port stays open."""
    nft = ["ip", "netns", "exec", space, "nft"]
    run(*nft, "add", "table", "inet", "f")
    run(*nft, "add", "chain", "inet", "f", "i", "{ type filter hook input priority 0; }")
    run(*nft, "add", "rule", "inet", "f", "i", *NEW, *verdict)


@pytest.mark.timeout(150)
def test_refused_filtered_and_unroutable_are_told_apart_both_ways(tmp_path: Path) -> None:
    with machines(tmp_path / "net", 4) as net:
        filter_new_connections(net.nodes[1].space, "drop")
        filter_new_connections(net.nodes[2].space, "reject", "with", "tcp", "reset")
        # From a to d; its answers to d's own connections do not get there either.
        wanted = ["to", net.nodes[3].address, "ipproto", "tcp", "dport", "1024-65534"]
        run("ip", "-n", net.nodes[0].space, "rule", "add", *wanted, "unreachable")
        command = net.inside(
            0, sys.executable, "-m", "duoka", "doctor", "--hosts", "a,b,c,d", "--level", "net", "--json"
        )
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, "DUOKA_SSH": net.ssh}, capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 3, done.stderr
    findings = json.loads(done.stdout)["findings"]
    links = {}
    for one in findings:
        if one["check"] == "links":
            links |= {pair: said.split()[-1] for pair, said in one["nodes"].items()}
    expected = {f"{one} -> b": "filtered" for one in "acd"} | {f"{one} -> c": "refused" for one in "abd"}
    assert links == {**expected, "a -> d": "unroutable", "d -> a": "filtered"}, f"every pair, and no other: {links}"
    others = [one for one in findings if one["severity"] == "fail" and one["check"] != "links"]
    assert not others, others
    assert not list(tmp_path.glob(".duoka-*"))


@pytest.mark.nightly
@pytest.mark.timeout(150)
def test_the_machine_with_the_slow_cable_is_named(tmp_path: Path) -> None:
    """One of three sends at 100 Mbit/s; what it receives is as fast as ever."""
    with machines(tmp_path / "net", 3) as net:
        limit = ["rate", "100mbit", "burst", "64kb", "latency", "50ms"]
        run("ip", "netns", "exec", net.nodes[1].space, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)
        # Its receiving side too: acknowledgements alone would not slow it down.
        run("ip", "netns", "exec", net.bridge, "tc", "qdisc", "add", "dev", "port1", "root", "tbf", *limit)
        command = net.inside(0, sys.executable, "-m", "duoka", "doctor", "--hosts", "a,b,c", "--level", "net", "--json")
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, "DUOKA_SSH": net.ssh}, capture_output=True, text=True, timeout=120
        )
    findings = {one["check"]: one for one in json.loads(done.stdout)["findings"]}
    found = findings["bandwidth"]
    assert found["severity"] == "fail" and list(found["nodes"]) == ["b"], found
    assert findings["exchange"]["severity"] == "ok" and "3 ranks over gloo" in str(findings["exchange"]), findings
