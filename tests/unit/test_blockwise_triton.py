"""The packing kernels for GPUs, run by Triton's interpreter: torch's bytes, and torch's numbers back.

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
from duoka.comm import blockwise, blockwise_triton as kernels
from duoka.plan.traffic import PACKED_BLOCKS

dice = torch.Generator().manual_seed(0)
looked = 0
for bits, block in PACKED_BLOCKS.items():
    for rows, count in ((1, 1), (1, block), (3, block + 1), (2, 5 * block - 3), (1, 4096 * 2 + 7)):
        for dtype in (torch.float32, torch.bfloat16):
            values = torch.randn(rows, count, generator=dice).mul(torch.logspace(-6, 6, count)).to(dtype)
            values[0, : min(count, block)] = 0  # a block of nothing
            if count > block:
                values[-1, -1] = float("nan")
                values[0, block] = float("inf")
                values[-1, 0] = 0.5  # a tie, where the largest is the number of levels
                values[-1, 1] = {8: 127.0, 4: 7.0}[bits]
            wanted = blockwise.pack(values, bits)
            found = kernels.pack(values, bits, block)
            assert found.shape == wanted.shape, (found.shape, wanted.shape)
            numbers = -(-count // block) * block * bits // 8
            assert found[:, :numbers].equal(wanted[:, :numbers]), (bits, rows, count, dtype)
            scales = (one[:, numbers:].contiguous().view(torch.float32) for one in (found, wanted))
            torch.testing.assert_close(*scales, rtol=0, atol=0, equal_nan=True)
            for kind in (torch.float32, torch.bfloat16):
                back, again = (torch.empty(rows, count, dtype=kind) for _ in range(2))
                blockwise.unpack(wanted, back, bits)
                kernels.unpack(wanted, again, bits, block)
                # The interpreter cuts bf16 off, where a GPU rounds it.
                rtol = 0 if kind == torch.float32 else 2**-7
                torch.testing.assert_close(again, back, rtol=rtol, atol=0, equal_nan=True)
                looked += 1
print("the same", looked)
"""


@pytest.mark.timeout(300)
def test_kernels_make_torch_s_bytes_and_numbers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0 and "the same 40" in done.stdout, done.stdout + done.stderr[-3000:]
