"""tests/requirements.csv: what the guides behind this project ask for, and which test or command shows it.

States: `holds` (a test asserts it, or a command shows it), `partly` (the note says what is missing), `later` (the note
begins with the letter of the part that will bring it), `elsewhere` (the note says what it needs that a CPU lacks).
"""

from __future__ import annotations

import ast
import csv
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests" / "requirements.csv"
COUNTS = {0: 65, 1: 81, 2: 34, 3: 18, 4: 54}  # requirements of each guide
STATES = ("holds", "partly", "later", "elsewhere")
# Of the plan of work, by the letters that notes use: what is not there yet is brought by one of them.
PARTS = {
    "I": "tensor, pipeline, sequence and expert axes",
    "J": "models larger than memory: disk, quantized exchange, DeepSpeed's engine",
    "K": "many machines from one command, the doctor over nodes",
    "L": "dashboards and the API server",
    "M": "the stages after fine-tuning",
    "N": "speed, benchmarks, GPUs",
    "P": "packages, pages, the first hour",
}


def read_rows() -> list[dict[str, str]]:
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def proofs_of(row: dict[str, str]) -> list[str]:
    """Tests (tests/FILE::NAME) and commands (duoka ...: what to look for), one after the other."""
    return [proof for proof in row["proof"].split("; ") if proof]


@cache
def names_in(file: str) -> frozenset[str]:
    """Names of the test functions of a file, from its text: nothing is imported."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in tree.body if isinstance(node, kinds) and node.name.startswith("test_"))


def faults_of(rows: list[dict[str, str]]) -> list[str]:
    """What is wrong with the table, a line each."""
    from duoka.cli import COMMANDS

    wanted = [f"S{guide}-{number:02}" for guide, count in COUNTS.items() for number in range(1, count + 1)]
    found = [row["id"] for row in rows]
    faults = [] if found == wanted else [f"not each once and in order: {sorted(set(found) ^ set(wanted))}"]
    for row in rows:
        name, state, note = row["id"], row["state"], row["note"]
        if state not in STATES:
            faults.append(f"{name}: there is no state {state!r}")
        if state == "holds" and not proofs_of(row):
            faults.append(f"{name}: holds, and nothing shows it")
        if state in ("partly", "elsewhere") and not note:
            faults.append(f"{name}: {state}, and the note does not say what is missing")
        if state == "later" and not re.match(f"[{''.join(PARTS)}]: .", note):
            faults.append(f"{name}: later, and the note does not begin with the part that brings it")
        for proof in proofs_of(row):
            file, _, test = proof.partition("::")
            if proof.startswith("duoka "):
                command, _, look_for = proof.partition(": ")
                if shlex.split(command)[1] not in COMMANDS or not look_for:
                    faults.append(f"{name}: no command of duoka, or nothing to look for: {proof}")
            elif not file.startswith("tests/") or not (ROOT / file).is_file():
                faults.append(f"{name}: there is no file {file}")
            elif test not in names_in(file):
                faults.append(f"{name}: {file} has no test {test}")
    return faults


def test_every_requirement_has_its_row_and_every_proof_is_there() -> None:
    assert faults_of(read_rows()) == []


@pytest.mark.parametrize(
    ("place", "change", "words"),
    [
        (0, {"id": "S0-66"}, "not each once and in order: ['S0-01', 'S0-66']"),
        (3, {"state": "done"}, "no state 'done'"),
        (0, {"proof": ""}, "nothing shows it"),
        (0, {"proof": "tests/promises/test_any_split.py::test_nothing"}, "has no test test_nothing"),
        (0, {"proof": "tests/unit/test_nothing.py::test_x"}, "there is no file"),
        (0, {"proof": "duoka fly: it flies"}, "no command of duoka"),
        (0, {"proof": "duoka plan x.yaml"}, "nothing to look for"),
        (0, {"state": "later", "note": "some day"}, "does not begin with the part"),
        (0, {"state": "partly", "note": ""}, "what is missing"),
    ],
)
def test_a_fault_of_the_table_would_be_found(place: int, change: dict[str, str], words: str) -> None:
    rows = read_rows()
    rows[place] |= change
    (fault,) = faults_of(rows)
    assert words in fault
