"""What this machine really reaches: matrix products by size and type, attention, memory's and the disk's bandwidth.

`duoka bench hardware` calls it in one process and adds collectives; the plan takes the figures instead of a table's.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from duoka.model import compiled_attention
from duoka.model.attention import attend
from duoka.model.documents import Documents
from duoka.model.onednn_products import use_onednn
from duoka.model.wide_products import widen_products
from duoka.optim.disk_file import DiskFile, Slot
from duoka.plan.flops import ATTENTION_BACKWARD
from duoka.plan.offload import SLICE_BYTES

SIZES = (512, 1024, 2048, 4096)
ROUNDS = 4
TOUCHED_BYTES = 256 * 2**20
WRITTEN_BYTES = 256 * 2**20
PASSES_FOR_S = 2.0
DOCUMENTS = (96, 160, 224, 288, 352, 416, 480, 512)  # tokens of each: conversations in one packed row
HEADS, GROUPS, HEAD_DIM = 12, 4, 64
ROWS, WIDTH, INNER = 1365, 768, 2048  # tokens of a micro-batch, of any number, through a layer's two largest products


@dataclass(frozen=True)
class Product:
    precision: str
    size: int
    flops: float  # per second, best of the rounds


@dataclass(frozen=True)
class HardwareBench:
    products: tuple[Product, ...]
    memory_bytes_per_s: float
    threads_share: float | None = None  # of a CPU with several cores
    attention: Mapping[str, float] = field(default_factory=dict)  # of a CPU: flops per second of both passes, by type
    layer: Mapping[str, float] = field(default_factory=dict)  # bf16 products on a CPU, of "trained", "frozen" weights

    def best(self, precision: str) -> float:
        return max((one.flops for one in self.products if one.precision == precision), default=0.0)


def measure_device(device: torch.device, limit_s: float = 20.0, say: Callable[[str], None] = print) -> HardwareBench:
    """Sweep sizes upwards; a type whose products would take longer than the limit is left at the size before."""
    if device.type == "cpu":
        use_onednn()  # as in training
        widen_products()
    products: list[Product] = []
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        began = time.perf_counter()
        for size in SIZES if device.type == "cpu" else (*SIZES, 8192):
            found = Product(precision, size, _product_flops(size, dtype, device))
            products.append(found)
            say(f"{precision} product of {size} x {size}: {_in_words(found.flops)}")
            next_s = 8 * ROUNDS * 2 * size**3 / found.flops
            if time.perf_counter() - began + next_s > limit_s / 2:
                break
    bandwidth = _memory_bytes_per_s(device)
    say(f"memory: {bandwidth / 1e9:.3g} GB/s read and written")
    if device.type != "cpu":
        return HardwareBench(tuple(products), bandwidth)
    attention = {"fp32": _attention_flops(torch.float32), "bf16": _attention_flops(torch.bfloat16)}
    for precision, flops in attention.items():
        say(f"{precision} attention over {len(DOCUMENTS)} documents: {_in_words(flops)}")
    layer = _layer_flops(torch.bfloat16)
    for weights, flops in layer.items():
        say(f"bf16 products of a layer of {weights} weights, there and back: {_in_words(flops)}")
    share = _threads_share(say) if torch.get_num_threads() > 1 else None
    return HardwareBench(tuple(products), bandwidth, share, attention, layer)


def _layer_flops(dtype: torch.dtype) -> dict[str, float]:
    """Of products as they lie in both passes: where a unit multiplies tiles, turning one side costs as much again."""
    rows, slope, first, second = (
        torch.randn(*shape).to(dtype) for shape in ((ROWS, WIDTH), (ROWS, INNER), (INNER, WIDTH), (WIDTH, INNER))
    )

    def frozen() -> None:
        (rows @ first.t()) @ second.t()
        (rows @ second) @ first

    def trained() -> None:
        frozen()
        slope.t() @ rows, rows.t() @ slope

    one = 2 * ROWS * WIDTH * INNER
    return {"trained": 6 * one / _median_s(trained), "frozen": 4 * one / _median_s(frozen)}


def _attention_flops(dtype: torch.dtype) -> float:
    """Of a layer's attention as training has it, there and back, counted as plans count it.

    How far it is from products' rate differs by machine: AMX multiplies much faster than anything exponentiates.
    """
    layer, tokens = torch.nn.Module(), sum(DOCUMENTS)
    setattr(layer, compiled_attention.ALLOWED, True)  # as apply_fused says it of a model's
    edges = torch.tensor((0, *DOCUMENTS)).cumsum(0)
    documents = Documents.of(edges.to(torch.int32), torch.device("cpu"))
    query, key, value = (
        torch.randn(1, heads, tokens, HEAD_DIM).to(dtype).requires_grad_(True) for heads in (HEADS, GROUPS, GROUPS)
    )
    grad = torch.randn(1, tokens, HEADS, HEAD_DIM).to(dtype)

    def passes() -> None:
        out, _ = attend(layer, query, key, value, None, documents=documents)
        torch.autograd.grad(out, (query, key, value), grad)

    looked_at = sum(length * (length + 1) / 2 for length in DOCUMENTS)
    return (1 + ATTENTION_BACKWARD) * 4 * HEADS * HEAD_DIM * looked_at / _median_s(passes)


def _threads_share(say: Callable[[str], None]) -> float:
    """What all threads of one process reach together in a layer's passes, of as many times what one reaches alone."""
    threads = torch.get_num_threads()
    rows, first, second = torch.randn(1024, 768), torch.randn(2048, 768), torch.randn(768, 2048)
    for weight in (first, second):
        weight.requires_grad_(True)

    def passes() -> None:
        inner = torch.nn.functional.silu(rows @ first.t())
        (rows + inner @ second.t()).square().mean().backward()

    together = _median_s(passes)
    torch.set_num_threads(1)
    alone = _median_s(passes)
    torch.set_num_threads(threads)
    share = min(1.0, alone / (threads * together))
    say(f"a layer on {threads} threads of one process: {share:.0%} of {threads} times one thread's speed")
    return share


def _median_s(run: Callable[[], Any]) -> float:
    """Of a while, not the best: threads that come late come late in training too."""
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - began < PASSES_FOR_S:
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _product_flops(size: int, dtype: torch.dtype, device: torch.device) -> float:
    # Random numbers: products of zeros draw less power, and some cards then run faster than they will in training.
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _best_s(lambda: left @ right, device)


def _memory_bytes_per_s(device: torch.device) -> float:
    count = TOUCHED_BYTES // 4 if device.type == "cpu" else TOUCHED_BYTES
    source, target = torch.ones(count, device=device), torch.empty(count, device=device)
    return 8 * count / _best_s(lambda: torch.add(source, 1.0, out=target), device)


def measure_disk(folder: Path) -> float:
    """Bytes per second that reach the disk under `folder`, written as checkpoints are: in order, and forced out."""
    path = folder / f".duoka-disk-{os.getpid()}"
    block = os.urandom(min(WRITTEN_BYTES, 16 * 2**20))  # some disks write zeros faster
    try:
        with path.open("wb", buffering=0) as file:
            started = time.perf_counter()
            for _ in range(WRITTEN_BYTES // len(block)):
                file.write(block)
            os.fsync(file.fileno())
            return WRITTEN_BYTES / (time.perf_counter() - started)
    finally:
        path.unlink(missing_ok=True)


def measure_offload(folder: Path) -> float:
    """Bytes per second read and written together, in the slices of an optimizer whose state lies under `folder`."""
    size = 2 * SLICE_BYTES
    slot = Slot(size)
    slot.memory[:] = os.urandom(size)
    file, starts = DiskFile(folder, WRITTEN_BYTES, "what is measured"), range(0, WRITTEN_BYTES, size)
    with ThreadPoolExecutor(1) as writer:
        for start in starts:  # the first write of a place costs more than later ones
            file.write(start, slot.part(0, size))
        other, started = Slot(size), time.perf_counter()
        for start in starts:
            written = writer.submit(file.write, (start + WRITTEN_BYTES // 2) % WRITTEN_BYTES, slot.part(0, size))
            file.read(start, other.part(0, size))
            written.result()
        return 2 * WRITTEN_BYTES / (time.perf_counter() - started)


def _in_words(flops: float) -> str:
    return f"{flops / 1e12:.3g} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:.3g} GFLOP/s"


def _best_s(run: Callable[[], Any], device: torch.device) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return best
