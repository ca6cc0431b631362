"""`python -m duoka.bench.exchange`: do ranks on these machines exchange what they should, and learn the same?

Started by cluster/exchange.py over ssh, one process a machine, for `duoka doctor --level net`. The processes meet as
training's ranks do, add whole numbers whose sum is known, and train a tiny model for three steps, first each alone,
then together. GPUs also copy to each other, pair by pair.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from duoka.process.interface import interface_environment

ANSWER = "duoka-answer "  # in front of the line that is meant for who asked
NUM_VALUES = 1 << 17  # 1 MiB of 64-bit numbers
NUM_STEPS = 3
COPY_BYTES = 64 << 20
Copy = Callable[[torch.Tensor, torch.device], torch.Tensor]


@dataclass(frozen=True)
class Place:
    """Where all meet, and which of them this process is."""

    host: str
    port: int
    rank: int
    size: int
    seconds: float


@dataclass(frozen=True)
class Exchanged:
    """What one machine has seen: values of the sum that were wrong, and what its weights were after both trials."""

    backend: str
    num_wrong: int
    alone: str  # digest of the weights after steps on the same data, without the others
    together: str  # after steps on data of its own, with the mean of all gradients
    bad_copies: list[str]  # pairs of GPUs


def drawn_values(rank: int) -> torch.Tensor:
    """Whole numbers whose sum over a million ranks is exact."""
    return torch.randint(-(2**40), 2**40, (NUM_VALUES,), generator=torch.Generator().manual_seed(rank))


def trained(device: torch.device, rank: int, mean_: Callable[[torch.Tensor], None]) -> str:
    """Digest of a tiny model's weights after steps whose gradients `mean_` has made those of all."""
    draw = torch.Generator().manual_seed(7)
    layers = [torch.randn(64, 64, generator=draw).mul(0.1).to(device).requires_grad_() for _ in range(2)]
    own = torch.Generator().manual_seed(100 + rank)
    for _ in range(NUM_STEPS):
        inputs = torch.randn(32, 64, generator=own).to(device)
        loss = (torch.relu(inputs @ layers[0]) @ layers[1]).square().mean()
        for layer, grad in zip(layers, torch.autograd.grad(loss, layers), strict=True):
            mean_(grad)
            with torch.no_grad():
                layer -= 0.1 * grad
    digest = hashlib.sha256()
    for layer in layers:
        digest.update(layer.detach().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def bad_copies(devices: list[torch.device], copy: Copy) -> list[str]:
    """Pairs between which bytes change on their way; a driver may promise direct copies that a bridge garbles."""
    found = []
    for source in devices:
        draw = torch.Generator().manual_seed(source.index or 0)
        data = torch.randint(0, 256, (COPY_BYTES,), dtype=torch.uint8, generator=draw)
        there = data.to(source)
        for target in devices:
            if target != source and not torch.equal(copy(there, target).cpu(), data):
                found.append(f"{source} -> {target}")
    return found


def exchange(place: Place) -> Exchanged:
    os.environ.update(interface_environment(place.host, os.environ))
    on_gpu = torch.cuda.is_available()
    device, backend = torch.device("cuda", 0) if on_gpu else torch.device("cpu"), "nccl" if on_gpu else "gloo"
    patience = timedelta(seconds=place.seconds)
    store = dist.TCPStore(place.host, place.port, is_master=False, timeout=patience)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=patience)
    try:
        values = drawn_values(place.rank).to(device)
        dist.all_reduce(values)
        want = torch.stack([drawn_values(rank) for rank in range(place.size)]).sum(0)
        num_wrong = int((values.cpu() != want).sum())

        def mean_(grad: torch.Tensor) -> None:
            dist.all_reduce(grad)
            grad /= place.size

        alone, together = trained(device, 0, lambda _: None), trained(device, place.rank, mean_)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    gpus = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    return Exchanged(backend, num_wrong, alone, together, bad_copies(gpus, lambda data, to: data.to(to)))


def _answer(**words: Any) -> None:
    print(ANSWER + json.dumps(words), flush=True)


def main() -> None:
    """A line of JSON asks for a port (`serve`, the first machine), the next one to meet there."""
    lines = iter(sys.stdin.readline, "")
    store = None
    for line in lines:
        ask = json.loads(line) if line.strip() else {}
        if "serve" in ask:
            store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
            _answer(port=store.port)
        elif "meet" in ask:
            threading.Thread(target=_end_with_stdin, args=(lines,), daemon=True).start()
            try:
                _answer(exchanged=asdict(exchange(Place(**ask["meet"]))))
            except (RuntimeError, OSError, ValueError) as error:
                _answer(error=(str(error).strip().splitlines() or [type(error).__name__])[0])
            threading.Event().wait()  # the first machine's store serves the others until the connection ends
    del store


def _end_with_stdin(lines: Any) -> None:
    """Who asked for this is gone."""
    for _ in lines:
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
