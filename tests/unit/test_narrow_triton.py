"""The update of bf16 weights for GPUs, run by Triton's interpreter, beside the one in torch's functions.

SKIPPED where Triton is not installed: torch brings it for CUDA alone (`pip install triton` beside the CPU build).
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="NO TRITON")

PROGRAM = """
import torch
from duoka.model.dropout import place_key
from duoka.optim import narrow, narrow_triton

dice = torch.Generator().manual_seed(0)
for count, first in ((1, 0), (1024, 7), (3000, 2**33 + 5)):
    weight, grad, average = (torch.randn(count, generator=dice).bfloat16() for _ in range(3))
    square = torch.rand(count, generator=dice).bfloat16()
    ours, theirs = ([one.clone() for one in (weight, grad, average, square)] for _ in range(2))
    told = (first, place_key("layer", 3), 1e-2, 0.9, 0.999, 1e-8, 0.1, 1 / (1 - 0.9**3), (1 - 0.999**3) ** -0.5)
    narrow.update_narrow(*ours, *told)
    narrow_triton.update_narrow(*theirs, *told)
    for one, two in zip(ours, theirs):
        alike = float((one == two).float().mean())
        assert alike > 0.99, (count, alike)  # sums in another order move a few over the edge of a chance
        torch.testing.assert_close(one.float(), two.float(), rtol=2**-7, atol=0)
    assert count == 1 or not theirs[0].equal(weight)
print("the same")
"""


@pytest.mark.timeout(300)
def test_the_kernel_makes_torch_s_numbers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0 and "the same" in done.stdout, done.stdout + done.stderr[-3000:]
