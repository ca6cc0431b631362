"""`python -m duoka.bench.burn --seconds 10`: does each processor of this machine compute fast, and right?

Started by cluster/burn.py here or over ssh, for `duoka doctor --level burn`. Every device multiplies the same seeded
matrices of whole numbers again and again. All sums are exact in 32 bits, in whatever order they are made, so that
the product is known to the last bit on every kind of processor: one wrong value is a broken one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
ANSWER = "duoka-answer "  # in front of the line that is meant for who asked
_LARGEST = 4  # of a value: a sum of 4096 products is below 2**24
_WINDOW_S = 0.25
_NUM_PAIRS = 2


@dataclass(frozen=True)
class Burned:
    """One device: median operations per second of short windows, and products that were wrong."""

    device: str
    kind: str
    flops: float
    num_products: int
    num_wrong: int


@dataclass(frozen=True)
class Pair:
    """Two matrices and what their product is."""

    a: torch.Tensor  # (size, size)
    b: torch.Tensor
    product: torch.Tensor


def make_pair(size: int, seed: int) -> Pair:
    """In fp32 on the CPU. Raises ArithmeticError when the CPU itself is wrong."""
    draw = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-_LARGEST, _LARGEST + 1, (size, size), generator=draw) for _ in range(2))
    product = a.float() @ b.float()
    # (A B) c = A (B c), in whole numbers: another way to the same sums, at a thousandth of the work.
    weights = torch.randint(1, 100, (size,), generator=draw)
    if not torch.equal((product.long() * weights).sum(1), (a * (b * weights).sum(1)).sum(1)):
        raise ArithmeticError("the CPU's product of whole numbers is wrong")
    return Pair(a.float(), b.float(), product)


def burn_device(
    device: torch.device, kind: str, seconds: float, size: int, multiply: Multiply = torch.matmul
) -> Burned:
    """Multiply for so long, and compare every product with the one that it has to be."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        made = [make_pair(size, seed) for seed in range(_NUM_PAIRS)]
    except ArithmeticError:
        return Burned(str(device), kind, 0.0, 1, 1)
    pairs = [Pair(*(one.to(device, dtype) for one in (pair.a, pair.b, pair.product))) for pair in made]
    num_products = num_wrong = 0
    rates: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until or not rates:
        begun, count = time.monotonic(), 0
        wrong = torch.zeros((), dtype=torch.long, device=device)
        while time.monotonic() - begun < _WINDOW_S or not count:
            for pair in pairs:
                wrong += (multiply(pair.a, pair.b) != pair.product).any()
            count += len(pairs)
            if count % 16 == 0 and device.type == "cuda":
                torch.cuda.synchronize(device)
        num_wrong += int(wrong)
        num_products += count
        rates.append(2 * size**3 * count / (time.monotonic() - begun))
    return Burned(str(device), kind, statistics.median(rates), num_products, num_wrong)


def burn_all(seconds: float) -> list[Burned]:
    """All devices side by side, as in training: they share power and cooling."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # partial sums would be rounded
    if not torch.cuda.is_available():
        return [burn_device(torch.device("cpu"), "CPU", seconds, 1024)]
    found: list[Burned] = []

    def burn(number: int) -> None:
        device = torch.device("cuda", number)
        found.append(burn_device(device, torch.cuda.get_device_name(device), seconds, 4096))

    threads = [threading.Thread(target=burn, args=(number,)) for number in range(torch.cuda.device_count())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(found, key=lambda one: one.device)


def _end_with_stdin() -> None:
    """Who asked for this is gone."""
    while sys.stdin.buffer.readline():
        pass
    os._exit(1)


def main(words: list[str]) -> None:
    read = argparse.ArgumentParser(prog="python -m duoka.bench.burn")
    read.add_argument("--seconds", type=float, default=10.0)
    seconds = read.parse_args(words).seconds
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    burned = [asdict(one) for one in burn_all(seconds)]
    print(ANSWER + json.dumps({"burned": burned}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
