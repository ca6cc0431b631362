"""tests/same_results.py: what it calls equal, on recordings and tensors made by hand."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from same_results import compare, digests, exact

RESULTS = {
    "steps": {"1": exact({"loss": 2.5, "lr": 0.1}), "2": exact({"loss": 2.25, "lr": 0.05})},
    "evaluations": [exact({"step": 2, "loss": 2.0, "num_bytes": None})],
    "final": {"head.weight": "ab" * 32},
}
RECORDING = {"made_by": {"commit": "a", "torch": "2"}, "runs": {"ddp x2": RESULTS, "single": RESULTS}}


def compared(folder: Path, one: dict[str, Any], other: dict[str, Any]) -> int:
    paths = folder / "one.json", folder / "other.json"
    for path, recording in zip(paths, (one, other), strict=True):
        path.write_text(json.dumps(recording), encoding="utf-8")
    return compare(*paths)


def test_another_commit_with_the_same_numbers_is_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = RECORDING | {"made_by": {"commit": "b", "torch": "2"}}
    assert compared(tmp_path, RECORDING, other) == 0
    assert "all equal" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        (("steps", "2", "loss"), math.nextafter(2.25, 3).hex(), "steps 2 loss: 2.25"),
        (("steps", "2"), None, "steps 2: something and nothing"),
        (("evaluations",), [], "evaluations 0: something and nothing"),
        (("final", "head.weight"), "cd" * 32, "final head.weight: abababababab and cdcdcdcdcdcd"),
    ],
)
def test_one_bit_of_one_run_is_found_and_named(
    where: tuple[str, ...], value: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = RECORDING | {"runs": {"ddp x2": RESULTS, "single": copy.deepcopy(RESULTS)}}
    *outer, last = ("runs", "single", *where)
    place: Any = other
    for key in outer:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    assert compared(tmp_path, RECORDING, other) == 1
    told = capsys.readouterr().out
    assert said in told and "1 runs differ" in told


def test_a_run_that_is_missing_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = RECORDING | {"runs": {"ddp x2": RESULTS}}
    assert compared(tmp_path, RECORDING, other) == 1
    assert f"not in {tmp_path / 'other.json'}" in capsys.readouterr().out
    assert compared(tmp_path, other, RECORDING) == 1


def test_a_tensor_in_pieces_of_two_ranks_has_the_digest_of_the_whole(tmp_path: Path) -> None:
    whole = torch.arange(15, dtype=torch.float32).reshape(5, 3)
    for rank, (start, stop) in enumerate(((0, 3), (3, 5))):
        notes = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [start, 0]}})}
        save_file({"w": whole[start:stop].clone()}, tmp_path / f"tensors-{rank}.safetensors", notes)
    save_file({"w": whole}, tmp_path / "whole.safetensors")
    expected = hashlib.sha256(b"torch.float32 [5, 3] " + whole.numpy().tobytes()).hexdigest()
    assert digests(tmp_path.glob("tensors-*")) == digests(tmp_path.glob("whole*")) == {"w": expected}
    with pytest.raises(SystemExit, match="w: its pieces make no whole tensor"):
        digests([tmp_path / "tensors-1.safetensors"])
