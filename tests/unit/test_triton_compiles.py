"""Every Triton kernel of duoka becomes code for real cards, which needs none: the interpreter takes what that refuses.

SKIPPED where Triton is not installed: torch brings it for CUDA alone (`pip install triton` beside the CPU build).
"""

import importlib.util
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton is not installed")

PROGRAM = """
import sys

from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from duoka.comm import blockwise_triton
from duoka.model import norm_triton, slope_triton
from duoka.optim import narrow_triton

target = GPUTarget("cuda", int(sys.argv[1]), 32)


def build(kernel, types, constants, **options):
    names = kernel.arg_names
    signature = dict(zip(names, [*types, *["constexpr"] * len(constants)], strict=True))
    made = compile(ASTSource(fn=kernel, signature=signature, constexprs=constants), target=target, options=options)
    assert made.asm["cubin"]
    # None of what a program holds goes to memory in between.
    assert ".local" not in made.asm["ptx"]


for logits in ("*bf16", "*fp16", "*fp32"):
    build(slope_triton._slope, [logits, "*i64", "*fp32", "i64", "i32"], {"at_once": 16384}, num_warps=16)
for dim in (64, 128, 2048, 4096, 5000, 8192):
    how = norm_triton._laid_out(dim)
    warps = how.pop("num_warps")
    for stream in ("*fp32", "*bf16"):
        types = [stream, "*fp32", "*bf16", "*fp32", "i32", "fp32"]
        build(norm_triton._forward, types, how, num_warps=warps)
        types = ["*bf16", stream, "*fp32", "*fp32", stream, "*fp32", "i32"]
        build(norm_triton._backward, types, how | {"learns": stream == "*fp32"}, num_warps=warps)
for key in ("i32", "i64"):
    build(narrow_triton._update, ["*bf16"] * 4 + ["i32", "i64", key] + ["fp32"] * 7, {"size": 1024})
for bits in (4, 8):
    sizes = {"bits": bits, "block": 256, "num": 16}
    build(blockwise_triton._pack, ["*fp32", "*u8", "*fp32"] + ["i32"] * 5, sizes)
    build(blockwise_triton._unpack, ["*u8", "*fp32", "*bf16"] + ["i32"] * 5, sizes)
"""


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_are_code_for_a_card(capability, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(capability)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
