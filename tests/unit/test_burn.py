"""The doctor's burn: a processor that computes wrong or slow is named, one that is right and alike is not; and which
fixes may be run.

Speeds are made up here, and no GPU was looked at.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from duoka.bench.burn import burn_device, make_pair
from duoka.cli import cli
from duoka.cluster.burn import burn_here, judge_burned
from duoka.cluster.findings import NodeFinding
from duoka.cluster.fixes import safe_command


def device(name: str, tera: float, wrong: int = 0, kind: str = "H100") -> dict[str, object]:
    return {"device": name, "kind": kind, "flops": tera * 1e12, "num_products": 1000, "num_wrong": wrong}


def test_products_are_known_to_the_last_bit_in_any_order() -> None:
    pair = make_pair(256, seed=3)
    whole = pair.a.long() @ pair.b.long()
    assert torch.equal(pair.product.long(), whole)
    shuffled = torch.randperm(256)
    assert torch.equal(pair.a[:, shuffled] @ pair.b[shuffled], pair.product), "another order of the same sums"
    largest = pair.product.bfloat16()
    assert torch.equal((pair.a.double() @ pair.b.double()).bfloat16(), largest), "rounded once, on every device alike"


def test_one_wrong_value_in_one_product_is_counted() -> None:
    calls = 0

    def flips_a_bit(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        out = a @ b
        if calls == 3:
            out[7, 11] += 1
        return out

    cpu = torch.device("cpu")
    found = burn_device(cpu, "CPU", 0.3, 64, flips_a_bit)
    assert found.num_wrong >= 1 and found.num_products == calls and found.flops > 0
    assert burn_device(cpu, "CPU", 0.1, 64).num_wrong == 0


@pytest.mark.parametrize(
    ("burned", "expected"),
    [
        ({"a": [700] * 8, "b": [690] * 8}, []),
        ({"a": [700] * 8, "b": [700] * 7 + [640]}, [("warn", ["b cuda:7"])]),
        ({"a": [700, 700], "b": [300, 700]}, [("fail", ["b cuda:0"])]),
        ({"a": [700], "b": [640]}, [("warn", ["b cuda:0"])]),  # of two the slower one
        ({"a": [660], "b": [700]}, []),
        ({"a": [700, 700, 400], "b": [700, 650, 700]}, [("fail", ["a cuda:2", "b cuda:1"])]),
        ({"": [700]}, []),
    ],
)
def test_the_slow_one_is_named(burned: dict[str, list[int]], expected: list[tuple[str, list[str]]]) -> None:
    """More than 7% below the median of its kind; from 30% it is a blocker."""
    found = judge_burned(
        {node: [device(f"cuda:{number}", one) for number, one in enumerate(rates)] for node, rates in burned.items()}
    )
    assert [(one.severity, list(one.nodes)) for one in found if one.severity != "ok"] == expected


def test_the_wrong_one_is_named_and_its_speed_counts_for_nothing() -> None:
    found = judge_burned({"a": [device("cuda:0", 700)], "b": [device("cuda:0", 99, wrong=2)]})
    assert [(one.severity, one.check, dict(one.nodes)) for one in found if one.severity != "ok"] == [
        ("fail", "arithmetic", {"b cuda:0": "2 of 1,000 products wrong"})
    ]
    kinds = judge_burned({"a": [device("cuda:0", 700)], "b": [device("cuda:0", 300, kind="A100")]})
    assert {one.severity for one in kinds} == {"ok"} and len(kinds) == 2, "each kind by itself"


def test_this_machines_processor_is_burned_in_a_process_of_its_own() -> None:
    (found,) = burn_here(1.0)
    assert found.severity == "ok" and "1 x CPU" in found.nodes["all"] and "every product right" in found.nodes["all"]


@pytest.mark.parametrize(
    ("fix", "words"),
    [
        ("pip install peft", [sys.executable, "-m", "pip", "install", "peft"]),
        ("/env/bin/python -m pip install 'torch==2.13.0+cu128'",
         ["/env/bin/python", "-m", "pip", "install", "torch==2.13.0+cu128"]),
        ("ssh -p 2222 me@b /env/bin/python3.11 -m pip install 'numpy==2.0'",
         ["ssh", "-p", "2222", "me@b", "/env/bin/python3.11 -m pip install numpy==2.0"]),
        ("rsync -a /w/run.yaml c:/w/run.yaml", ["rsync", "-a", "/w/run.yaml", "c:/w/run.yaml"]),
        ("ssh b sudo nvidia-smi -pm 1", None), ("sudo pip install peft", None), ("ulimit -n 65536", None),
        ("pip install --index-url http://evil x", None), ("pip install 'a; rm -rf /'", None), ("pip install", None),
        ("ssh -oProxyCommand=evil b python -m pip install x", None), ("ssh -p 22 -oX python -m pip install x", None),
        ("rsync -a --rsh=evil a b:c", None), ("python -m pip install /tmp/x", None), ("install a newer driver", None),
        ("python -c 'print(1)'", None), ("/env/bin/python -m pip uninstall torch", None), ("don't", None),
    ],
)  # fmt: skip
def test_only_what_a_user_could_take_back_may_be_run(fix: str, words: list[str] | None) -> None:
    assert safe_command(fix) == words


@pytest.mark.parametrize("yes", [False, True])
def test_a_fix_is_run_after_a_yes_only(
    yes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frame_findings: Callable[[NodeFinding], None]
) -> None:
    mark = tmp_path / "ran"
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $* > {mark}\n")
    python.chmod(0o755)
    frame_findings(NodeFinding("fail", "torch", {"b": "2.12"}, "differ", f"{python} -m pip install torch==2.13.0"))
    done = CliRunner().invoke(
        cli, ["doctor", "--hosts", "a,b", "--fix"], input="y\n" if yes else "\n", standalone_mode=False
    )
    assert done.return_value == 3 and f"run:   {python} -m pip install torch==2.13.0" in done.output, done.output
    assert mark.exists() == yes and (not yes or mark.read_text() == "-m pip install torch==2.13.0\n")


@pytest.fixture
def frame_findings(monkeypatch: pytest.MonkeyPatch) -> Callable[[NodeFinding], None]:
    def put(finding: NodeFinding) -> None:
        monkeypatch.setattr("duoka.cluster.survey.examine_nodes", lambda hosts, question, level: [finding])

    return put


def test_the_level_is_judged_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duoka.cluster.survey.examine_nodes", lambda *words: [NodeFinding("ok", "reach")])
    slow = NodeFinding("warn", "speed", {"b cpu": "slow"}, "heat", "look")
    monkeypatch.setattr("duoka.cluster.burn.burn_nodes", lambda hosts, folder, seconds: [slow])
    done = CliRunner().invoke(cli, ["doctor", "--hosts", "a,b", "--level", "burn", "--json"], standalone_mode=False)
    assert [one["check"] for one in json.loads(done.stdout)["findings"]] == ["reach", "speed"]
